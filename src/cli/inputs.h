// A call's tensors by name, from archives and single files, as the command line names them.
#pragma once

#include <anyflash/names.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "owned_tensor.h"

namespace anyflash::cli {

/// A tensor is found by its name: by its assignment, if there is one, else in the input files. An assignment is
///   FILE.npy   FILE.npz:ENTRY   FILE.safetensors:ENTRY   ENTRY (of an input file)
/// FILE.npz or FILE.safetensors without an entry means the entry of the tensor's own name. A .npy input file holds one
/// tensor, with the name of the file.
class Inputs {
 public:
  Inputs(std::vector<std::string> files, bool two_bytes_are_bfloat16);

  void assign(const std::string& name, const std::string& where);
  /// "NAME=WHERE"; throws Error if it does not look like that.
  void assign(const std::string& assignment);
  /// Is it, under any path, a file in which tensors are searched?
  bool names_file(const std::string& path) const;
  /// The tensor is not used even if an input file has it. Throws Error if there is none of the name.
  void hide(const std::string& name);

  /// The tensor, read once; nothing if no file has it. Throws Error if it is assigned and cannot be read.
  std::optional<OwnedTensor> find(const std::string& name);
  /// Throws Error if it is absent; `option` is the option that would name it.
  OwnedTensor get(const std::string& name, const std::string& option = "--tensor NAME=FILE");
  /// From now on tensors of these names are mapped, not read; each must come from a .npy file of its own.
  void map(Names names) { mapped_ = std::move(names); }
  /// Throws Error if a tensor is assigned that nobody has looked for. of_backward: what --backward would look for.
  void refuse_unused(const Names& of_backward = {}) const;

 private:
  Names names() const;  ///< of the input files' tensors
  std::optional<OwnedTensor> load(const std::string& name);
  std::optional<OwnedTensor> from_files(const std::string& entry);

  struct File {
    std::string path;
    std::vector<std::string> names;
    std::optional<OwnedTensor> only;  // of a .npy file: read at once, so that a broken file is reported as such
  };
  std::vector<File> files_;
  std::map<std::string, std::string> assigned_;
  std::vector<std::string> hidden_;
  Names mapped_;
  std::map<std::string, std::optional<OwnedTensor>> read_;
  bool two_bytes_are_bfloat16_;
};

}  // namespace anyflash::cli
