#include "call.h"

#include <anyflash/names.h>
#include <anyflash/tile_machine.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "layouts.h"
#include "numbers.h"

namespace anyflash::cli {

namespace {

// Tensors with an option of their own. Those after v are used wherever an input file has them.
struct NamedOption {
  const char *option, *name, *help;
};
constexpr NamedOption named_options[] = {
    {"--query", "q", "queries"},
    {"--key", "k", "keys"},
    {"--value", "v", "values"},
    {"--qkv", "qkv", "packed queries, keys and values, for --layout qkv"},
    {"--bias", "bias", "added to the scores: (batch or 1, heads or 1, queries or 1, keys or 1)"},
    {"--sink", "sink", "one more logit a head: (heads,)"},
    {"--alibi", "alibi", "ALiBi slopes: (heads,) or (batch, heads)"},
    {"--cu-seqlens-q", "cu_seqlens_q", "cumulative lengths for --layout thd"},
    {"--cu-seqlens-k", "cu_seqlens_k", "cumulative lengths for --layout thd"},
    {"--key-lengths", "key_lengths", "keys of each batch entry: (batch,)"},
    {"--page-table", "page_table", "pages of each batch entry; k and v are then (pages, page size, heads, channels)"},
    {"--mask", "mask", "a dense boolean mask, the same as adding '& dense(mask)' to the rule"},
    {"--dout", "dout", "gradient of the output, for backward"},
    {"--dlse", "dlse", "gradient of lse, for backward"}};

/// An option whose value is one of `names`, in the order of the enumeration.
template <class Enum, std::size_t count>
void add_named(CLI::App& app, const std::string& option, Enum& value, const char* const (&names)[count],
               const char* help) {
  const auto set = [&value, &names](const std::string& name) {
    value = Enum(place_of_name("", name, names_of(names)));
  };
  app.add_option_function<std::string>(option, set, help)
      ->check(one_of({names, names + count}))
      ->default_str(names[int(value)])
      ->type_name("NAME");
}

void add(CLI::App& app, const std::string& option, Align& value, const char* help) {
  add_named(app, option, value, align_names, help);
}
void add(CLI::App& app, const std::string& option, Layout& value, const char* help) {
  add_named(app, option, value, layout_names, help);
}
void add(CLI::App& app, const std::string& option, bool& value, const char* help) { app.add_flag(option, value, help); }
void add(CLI::App& app, const std::string& option, std::int64_t& value, const char* help) {
  app.add_option(option, value, help)->check(CLI::Range(0, 4096).description(""))->type_name("N");
}
void add(CLI::App& app, const std::string& option, std::optional<std::int64_t>& value, const char* help) {
  const auto set = [&value, option](const std::string& text) {
    value = option == "--memory-budget" ? bytes_of(option, text) : whole_number(option, text);
  };
  app.add_option_function<std::string>(option, set, help)->type_name(option == "--memory-budget" ? "BYTES" : "N");
}
template <typename Number>
void add(CLI::App& app, const std::string& option, Number& value, const char* help) {
  app.add_option(option, value, help);
}

/// --allow-tf32 for allow_tf32.
void add_scalar(CLI::App& app, const char* name, auto& value, const char* help) {
  std::string option = std::string("--") + name;
  std::replace(option.begin(), option.end(), '_', '-');
  add(app, option, value, help);
}

/// Bytes with or without a unit: 1048576, 64MiB, 2GB.
std::int64_t number_with_unit(const std::string& option, const std::string& text, bool units) {
  constexpr std::pair<const char*, double> known[] = {
      {"", 1}, {"B", 1}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
  std::int64_t number = 0;
  const auto* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  const std::string unit(rest, end);
  for (const auto& [name, factor] : known) {
    if (error != std::errc() || unit != name || (!units && !unit.empty())) continue;
    if (std::abs(double(number) * factor) < 9e18) return number * static_cast<std::int64_t>(factor);
  }
  throw CLI::ValidationError(option, "'" + one_line(text) + "', expected " +
                                         (units ? "a number of bytes such as 67108864 or 64MiB" : "an integer"));
}

}  // namespace

std::int64_t bytes_of(const std::string& option, const std::string& text) {
  return number_with_unit(option, text, true);
}
std::int64_t whole_number(const std::string& option, const std::string& text) {
  return number_with_unit(option, text, false);
}

CLI::Validator one_of(std::vector<std::string> names) {
  const auto answer = [names = std::move(names)](const std::string& given) {
    const bool known = std::find(names.begin(), names.end(), given) != names.end();
    return known ? std::string() : unknown_name(given, Names(names.begin(), names.end()));
  };
  return CLI::Validator(answer, "");
}

void add_align(CLI::App& app, Align& align) {
  for_each_scalar([&](const char* name, auto member, const char* help) {
    if constexpr (std::is_same_v<decltype(member), Align Options::*>) add_scalar(app, name, align, help);
  });
}

void add_switches(CLI::App& app, Options& options) {
  for_each_scalar([&](const char* name, auto member, const char* help) {
    if constexpr (std::is_same_v<decltype(member), bool Options::*>) add_scalar(app, name, options.*member, help);
  });
}

void add_device(CLI::App& app, Device& device) {
  const auto set = [&device](const std::string& name) {
    const auto digits = name.size() > 5 ? name.substr(5) : std::string();
    const bool numbered = name.compare(0, 5, "cuda:") == 0 && !digits.empty() && digits.size() <= 3 &&
                          digits.find_first_not_of("0123456789") == std::string::npos;
    if (name != "cpu" && name != "cuda" && name != "tiles" && !numbered)
      throw CLI::ValidationError("--device", "'" + one_line(name) + "', expected cpu, cuda, cuda:NUMBER or tiles");
    const auto kind = name == "cpu" ? DeviceKind::cpu : name == "tiles" ? DeviceKind::tiles : DeviceKind::cuda;
    device = {kind, numbered ? std::stoi(digits) : 0};
  };
  auto* option = app.add_option_function<std::string>("--device", set,
                                                      "where it runs: cpu, cuda:0 (see 'anyflash devices') or tiles")
                     ->default_str("cpu")
                     ->type_name("NAME");
  const auto use = [&device](const std::string& name) {
    if (device.kind != DeviceKind::tiles) throw CLI::ValidationError("--machine", "only with --device tiles");
    use_tile_machine(tile_machine(name));
  };
  std::string names;
  for (const auto& name : tile_machine_names()) names += name + ", ";
  app.add_option_function<std::string>("--machine", use, "with --device tiles: " + names + "or a file")
      ->default_str("ipu-mk2")
      ->needs(option)
      ->type_name("NAME");
}

void CallArguments::add_to(CLI::App& app) {
  app.add_option("-i,--input", files,
                 "file with the tensors q, k, v and any of the below, by these names (may be repeated)")
      ->type_name("FILE");
  for (const auto& option : named_options)
    app.add_option_function<std::string>(
           option.option, [this, &option](const std::string& where) { named[option.name] = where; }, option.help)
        ->type_name("WHERE");
  app.add_option("--tensor", tensors, "any tensor, such as a table of the rule (may be repeated)")
      ->type_name("NAME=WHERE");
  app.add_option("--without", without, "do not use this tensor of an input file (may be repeated)")->type_name("NAME");
  app.add_option("-r,--rule", rule,
                 "mask rule; tables by their tensors' names: documents(ids_q, ids_k), blocks(bitmap, 64, 64)")
      ->capture_default_str();
  for_each_scalar(
      [&](const char* name, auto member, const char* help) { add_scalar(app, name, options.*member, help); });
  add_device(app, device);
}

Inputs CallArguments::inputs() const {
  Inputs inputs(files, type == "bfloat16");
  for (const auto& [name, where] : named) inputs.assign(name, where);
  for (const auto& assignment : tensors) inputs.assign(assignment);
  for (const auto& name : without) inputs.hide(name);
  return inputs;
}

const OwnedTensor* Call::find(const std::string& name) const {
  for (const auto& [found, tensor] : extra)
    if (found == name) return &tensor;
  return nullptr;
}

namespace {

/// A call's views and options, with everything that must be on its device declared to be there; nothing reads them.
struct Shapes {
  TensorView q, k, v;
  Options options;

  explicit Shapes(const Call& call) : q(call.q.view()), options(call.options) {
    if (!call.packed()) k = call.k.view(), v = call.v.view();
    for (auto* view : {&q, &k, &v, &options.bias, &options.sink, &options.alibi_slopes}) view->device = call.device;
  }
};

}  // namespace

ResultShapes Call::result_shapes() const {
  const Shapes shapes(*this);
  return anyflash::result_shapes(shapes.q, shapes.k, shapes.v, shapes.options);
}

void Call::check(bool backward) const {
  Shapes shapes(*this);
  const auto budget = shapes.options.memory_budget;
  if (device.kind != DeviceKind::cpu || budget.value_or(-1) < 0) {
    plan(shapes.q, shapes.k, shapes.v, shapes.options);
    return;
  }
  shapes.options.memory_budget.reset();  // plan() would stop at the forward pass and name only what that needs
  plan(shapes.q, shapes.k, shapes.v, shapes.options);
  backward = backward && !options.page_table.given();  // which has none
  const auto least = least_workspace(shapes.q, shapes.k, shapes.v, shapes.options, backward);
  if (*budget < least)
    fail("memory_budget: " + std::to_string(*budget) + " bytes, expected at least " + std::to_string(least));
}

Call make_call(const CallArguments& arguments, Inputs& inputs, bool backward) {
  Call call;
  call.device = arguments.device;
  auto& options = call.options = arguments.options;
  if (call.packed()) {
    call.q = inputs.get("qkv", "--qkv");
  } else {
    call.q = inputs.get("q", "--query");
    call.k = inputs.get("k", "--key");
    call.v = inputs.get("v", "--value");
  }
  const auto keep = [&](const std::string& name, const OwnedTensor& tensor) {
    if (const auto* kept = call.find(name)) return kept->view();
    call.extra.emplace_back(name, tensor);
    return tensor.view();
  };
  const auto optional = [&](const std::string& name, TensorView& place) {
    if (const auto tensor = inputs.find(name)) place = keep(name, *tensor);
  };
  optional("bias", options.bias);
  optional("sink", options.sink);
  optional("alibi", options.alibi_slopes);
  optional("cu_seqlens_q", options.cu_seqlens_q);
  optional("cu_seqlens_k", options.cu_seqlens_k);
  optional("key_lengths", options.key_lengths);
  optional("page_table", options.page_table);
  call.rule = arguments.rule;
  if (arguments.named.count("mask")) call.rule = "(" + call.rule + ") & dense(mask)";
  options.rule = parse_rule(call.rule, [&](const std::string& name) { return keep(name, inputs.get(name)); });
  call.check(backward);  // everything is checked before any result is made
  return call;
}

std::string describe(const std::string& name, const OwnedTensor& tensor) {
  return name + " " + shape_text(tensor.shape) + " " + element_name(tensor.type);
}

}  // namespace anyflash::cli
