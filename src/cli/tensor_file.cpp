#include "tensor_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "npy.h"
#include "npz.h"
#include "safetensors.h"

namespace anyflash::cli {

namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() > end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

bool has_tensor_extension(const std::string& path) {
  return ends_with(path, ".npy") || ends_with(path, ".npz") || ends_with(path, ".safetensors");
}

FileFormat file_format(const std::string& path) {
  if (ends_with(path, ".npy")) return FileFormat::npy;
  if (ends_with(path, ".npz")) return FileFormat::npz;
  if (ends_with(path, ".safetensors")) return FileFormat::safetensors;
  fail(path + ": unknown extension, expected .npy, .npz or .safetensors");
}

std::vector<std::string> tensor_names(const std::string& path) {
  switch (file_format(path)) {
    case FileFormat::npz: return npz_names(path);
    case FileFormat::safetensors: return safetensors_names(path);
    default: return {};
  }
}

OwnedTensor read_tensor(const std::string& path, const std::string& entry, bool two_bytes_are_bfloat16) {
  const auto format = file_format(path);
  if (format == FileFormat::npy && !entry.empty())
    fail(path + ": a .npy file has no entries, '" + entry + "' was asked for");
  if (format != FileFormat::npy && entry.empty()) fail(path + ": name an entry of the file, as in " + path + ":q");
  auto tensor = format == FileFormat::npy   ? read_npy_file(path, two_bytes_are_bfloat16)
                : format == FileFormat::npz ? read_npz(path, entry, two_bytes_are_bfloat16)
                                            : read_safetensors(path, entry);
  if (tensor.type == ElementType::boolean)  // a file may hold any byte; a C++ bool may not
    std::transform(tensor.data.get(), tensor.data.get() + tensor.bytes(), tensor.data.get(),
                   [](std::byte b) { return std::byte(b != std::byte(0)); });
  return tensor;
}

void write_tensors(const std::string& path, const NamedTensors& tensors) {
  const auto format = file_format(path);
  if (format == FileFormat::npy && tensors.size() != 1)
    fail(path + ": a .npy file holds one tensor, there are " + std::to_string(tensors.size()) +
         "; use .npz or .safetensors");
  write_file_whole(path, [&](const std::string& temporary) {
    switch (format) {
      case FileFormat::npy: return write_npy_file(temporary, tensors.front().second);
      case FileFormat::npz: return write_npz(temporary, tensors);
      default: return write_safetensors(temporary, tensors);
    }
  });
}

void check_target(const std::string& path) {
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) fail(path + ": is a directory");
  if (std::filesystem::exists(path, code) && !std::filesystem::is_regular_file(path, code))
    fail(path + ": not a regular file");  // the result would replace a device
  const auto folder = std::filesystem::path(path).parent_path() / ".";
  if (access(folder.c_str(), W_OK | X_OK) != 0) fail(path + ": cannot be written: " + std::strerror(errno));
}

namespace {

// The names of the temporary files, for the handler of signals. A call has at most 8 results.
constexpr int most_temporaries = 16;
std::atomic<const char*> temporaries[most_temporaries];

void replace_temporary(const char* known, const char* now) {
  for (auto& one : temporaries)
    if (auto expected = known; one.compare_exchange_strong(expected, now)) return;
}

extern "C" void remove_temporaries(int signal_number) {
  remove_temporary_files();
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

void handle_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP})
    if (std::signal(number, remove_temporaries) == SIG_IGN) std::signal(number, SIG_IGN);
}

}  // namespace

void remove_temporary_files() {
  for (auto& one : temporaries)
    if (const auto* const name = one.load()) unlink(name);
}

TemporaryFile::TemporaryFile(std::string path) : path_(std::move(path)), name_(path_ + ".XXXXXX") {
  check_target(path_);
  handle_signals();
  descriptor_ = mkstemp(name_.data());
  if (descriptor_ < 0) fail(path_ + ": cannot be written: " + std::strerror(errno));
  replace_temporary(nullptr, name_.c_str());
  const mode_t mask = umask(0);
  umask(mask);
  fchmod(descriptor_, 0666 & ~mask);
}

TemporaryFile::~TemporaryFile() {
  close();
  if (name_.empty()) return;
  std::remove(name_.c_str());
  replace_temporary(name_.c_str(), nullptr);
}

void TemporaryFile::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

void TemporaryFile::finish() {
  if (std::rename(name_.c_str(), path_.c_str()) != 0) fail(path_ + ": cannot be written: " + std::strerror(errno));
  replace_temporary(name_.c_str(), nullptr);
  name_.clear();
}

void write_file_whole(const std::string& path, const std::function<void(const std::string&)>& write) {
  TemporaryFile file(path);
  file.close();
  try {
    write(file.name());
  } catch (const std::exception& error) {
    fail(path + ": " + error.what());
  }
  file.finish();
}

InputFile::InputFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail(path + ": " + std::strerror(errno));
  struct stat status{};
  if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    fail(path + ": not a regular file");
  }
  size_ = std::uint64_t(status.st_size);
}

InputFile::~InputFile() { close(descriptor_); }

void InputFile::read(std::uint64_t offset, void* to, std::size_t bytes) const {
  auto* place = static_cast<char*>(to);
  while (bytes > 0) {
    const auto got = pread(descriptor_, place, std::min(bytes, std::size_t(1) << 30), off_t(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_ + ": " + std::strerror(errno));
    if (got == 0) fail(path_ + ": the file ends too early");
    place += got;
    offset += std::uint64_t(got);
    bytes -= std::size_t(got);
  }
}

}  // namespace anyflash::cli
