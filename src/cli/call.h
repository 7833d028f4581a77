// A call to the library as the command line describes it: the options shared by `run` and `check --input`.
#pragma once

#include <anyflash/option_list.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "inputs.h"

namespace CLI {
class Validator;
class App;  // CLI11's header takes seconds to compile
}

namespace anyflash::cli {

/// A check of an option's value: one of the names, or an error that lists them.
CLI::Validator one_of(std::vector<std::string> names);
/// The number that an option's text gives: bytes, with or without a unit (64MiB), or a whole number.
std::int64_t bytes_of(const std::string& option, const std::string& text);
std::int64_t whole_number(const std::string& option, const std::string& text);
void add_align(CLI::App& app, Align& align);
void add_switches(CLI::App& app, Options& options);

/// The options that are true or false: visit(name, member).
template <typename Visit>
void for_each_switch(Visit&& visit) {
  for_each_scalar([&](const char* name, auto member, const char*) {
    if constexpr (std::is_same_v<decltype(member), bool Options::*>) visit(name, member);
  });
}
void add_device(CLI::App& app, Device& device);

/// The command line's arguments.
struct CallArguments {
  std::vector<std::string> files, tensors, without;
  std::map<std::string, std::string> named;  ///< by option: tensor name -> where
  std::string rule = "full()";
  std::string type;  ///< bfloat16: two-byte elements of .npy and .npz files are that; each command adds its own --type
  Options options;   ///< the scalar ones
  Device device;

  void add_to(CLI::App& app);
  Inputs inputs() const;
};

/// Tensors and options, ready for the library. All are on the CPU; results.h copies them to the call's device.
struct Call {
  Device device;
  OwnedTensor q, k, v;  ///< k and v are empty for the layout qkv
  NamedTensors extra;   ///< bias, sink, ... and the rule's tables: what the options point to
  std::string rule;     ///< as text, with the tables' names
  Options options;

  const OwnedTensor* find(const std::string& name) const;  ///< among extra; null if absent
  bool packed() const { return options.layout == Layout::qkv; }
  /// The call as its device would see it, with shapes only.
  ResultShapes result_shapes() const;
  /// Throws Error if forward, or backward if asked for, would refuse the shapes or the budget.
  void check(bool backward) const;
};

/// Reads the tensors that the arguments name and lets the library check them. Throws Error.
Call make_call(const CallArguments& arguments, Inputs& inputs, bool backward);

/// "q (1, 4, 512, 64) float32"
std::string describe(const std::string& name, const OwnedTensor& tensor);

}  // namespace anyflash::cli
