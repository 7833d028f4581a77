// Tensor files: .npy, .npz and .safetensors, told apart by their extension.
//
// Readers trust nothing: every size is checked against the file before memory is taken. Errors are one line that begins
// with the file's name. Writers make a temporary file beside the target and rename it, so a failure leaves no half
// file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "owned_tensor.h"

namespace anyflash::cli {

enum class FileFormat : std::uint8_t { npy, npz, safetensors };

/// By extension; throws Error for any other.
FileFormat file_format(const std::string& path);
bool has_tensor_extension(const std::string& path);

/// The names in an archive; for .npy none.
std::vector<std::string> tensor_names(const std::string& path);

/// Reads one tensor. `entry` names it in an archive and is empty for .npy. NumPy has no name for bfloat16: two-byte
/// integers and two-byte voids (as saved by ml_dtypes) are read as bfloat16 if `two_bytes_are_bfloat16`.
OwnedTensor read_tensor(const std::string& path, const std::string& entry, bool two_bytes_are_bfloat16 = false);

/// Writes all tensors to one file; .npy takes exactly one.
void write_tensors(const std::string& path, const NamedTensors& tensors);

/// Throws Error, with a line that begins with `path`, if a file cannot be created or replaced there. Called before the
/// work.
void check_target(const std::string& path);

/// A new file next to `path`, which it replaces when it is finished. Else nothing stays of it, not even where a signal
/// ends the program.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path);  ///< throws Error, with a line that begins with `path`
  TemporaryFile(const TemporaryFile&) = delete;
  ~TemporaryFile();

  const std::string& name() const { return name_; }
  int descriptor() const { return descriptor_; }
  void close();
  /// Renames it to `path`. Throws Error, with a line that begins with `path`.
  void finish();

 private:
  std::string path_, name_;
  int descriptor_ = -1;
};

/// Removes all temporary files. For handlers of signals, before the program ends.
void remove_temporary_files();

/// Calls `write` with the name of a new file next to `path`, then renames that to `path`. If `write` throws, removes it
/// and throws Error, with a line that begins with `path`.
void write_file_whole(const std::string& path, const std::function<void(const std::string&)>& write);

/// A file of known size, readable at any offset.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  /// Throws Error if the file ends before that.
  void read(std::uint64_t offset, void* to, std::size_t bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace anyflash::cli
