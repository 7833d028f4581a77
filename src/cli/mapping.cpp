#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "npy.h"

namespace anyflash::cli {

namespace {

const std::size_t page_bytes = std::size_t(sysconf(_SC_PAGESIZE));

struct Mapping {
  void* start;
  std::size_t bytes;
  std::string line;  ///< the error if a page of it cannot be had
};
std::vector<Mapping>& mappings() {
  static std::vector<Mapping> all;
  return all;
}

/// A page of a mapping that lies behind its file's end, or that the disk does not give: the error, and the end of the
/// program. Only what a handler of signals may call; mappings do not change while tensors are read.
extern "C" void end_without_page(int number, siginfo_t* info, void*) {
  static std::atomic_flag told;
  while (told.test_and_set()) pause();  // another thread ends the program
  const auto* const at = static_cast<const std::byte*>(info->si_addr);
  for (const auto& [start, bytes, line] : mappings()) {
    const auto* const first = static_cast<const std::byte*>(start);
    if (at < first || at >= first + (bytes + page_bytes - 1) / page_bytes * page_bytes) continue;
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(1);
    remove_temporary_files();
    _exit(1);
  }
  std::signal(number, SIG_DFL);  // the instruction that failed is repeated
}

void handle_lost_pages() {
  struct sigaction action{};
  action.sa_sigaction = end_without_page, action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

/// The bytes from `offset` of a file, as memory that unmaps itself.
std::shared_ptr<std::byte[]> mapped(const std::string& path, int descriptor, std::size_t offset, std::size_t bytes,
                                    bool writable) {
  const auto all = offset + std::max<std::size_t>(bytes, 1);
  auto* const start = mmap(nullptr, all, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, descriptor, 0);
  if (start == MAP_FAILED) fail(path + ": cannot be mapped: " + std::strerror(errno));
  madvise(start, all, MADV_NOHUGEPAGE);
  handle_lost_pages();
  const auto clear = isatty(STDERR_FILENO) ? "\r\x1b[K" : "";  // the progress bar
  mappings().push_back({start, all, clear + ("anyflash: " + one_line(path) + ": truncated while it was read\n")});
  const auto unmap = [start, all](std::byte*) {
    auto& known = mappings();
    std::erase_if(known, [&](const Mapping& one) { return one.start == start; });
    munmap(start, all);
  };
  return {static_cast<std::byte*>(start) + offset, unmap};
}

}  // namespace

OwnedTensor map_npy_file(const std::string& path, bool two_bytes_are_bfloat16) {
  if (file_format(path) != FileFormat::npy) fail(path + ": expected a .npy file, which can be mapped");
  std::uint64_t offset = 0;
  OwnedTensor tensor;
  {
    const InputFile file(path);
    const auto source = [&](void* to, std::size_t bytes) {
      file.read(offset, to, bytes);
      offset += bytes;
    };
    tensor = npy_shape(path, file.size(), source, two_bytes_are_bfloat16);
  }
  if (offset % element_size(tensor.type) != 0) fail(path + ": data misaligned, cannot be mapped");
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(path + ": " + std::strerror(errno));
  const auto close_it = [](const int* open) { close(*open); };
  const std::unique_ptr<const int, decltype(close_it)> closing(&descriptor, close_it);
  tensor.data = mapped(path, descriptor, std::size_t(offset), tensor.bytes(), false);
  return tensor;
}

MappedResult::MappedResult(const std::string& path, ElementType type, const Shape& shape) : file_(path) {
  tensor_.type = type, tensor_.shape = shape, tensor_.strides = row_major(shape);
  const auto header = npy_header(tensor_);
  const auto bytes = header.size() + std::max<std::size_t>(tensor_.bytes(), 1);
  // All of it now: to run out of disk while a mapping is written would end the program.
  if (const int error = posix_fallocate(file_.descriptor(), 0, off_t(header.size() + tensor_.bytes())); error != 0)
    fail(path + ": cannot be written: " + std::strerror(error));
  if (pwrite(file_.descriptor(), header.data(), header.size(), 0) != ssize_t(header.size()))
    fail(path + ": cannot be written: " + std::strerror(errno));
  tensor_.data = mapped(path, file_.descriptor(), header.size(), bytes - header.size(), true);
  file_.close();
}

void MappedResult::finish() {
  tensor_.data.reset();
  file_.finish();
}

void release_mapped_pages() {
  for (const auto& [start, bytes, line] : mappings()) {
    msync(start, bytes, MS_ASYNC);  // of input files it does nothing
    madvise(start, bytes, MADV_DONTNEED);
  }
}

}  // namespace anyflash::cli
