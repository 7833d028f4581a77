#include "npz.h"

#include <zip.h>

#include <algorithm>
#include <memory>

#include "npy.h"
#include "tensor_file.h"

namespace anyflash::cli {

namespace {

// An entry that grows by this ratio beyond this size is treated as a zip bomb. (Deflate reaches 1032 : 1 on zeros.)
constexpr std::uint64_t bomb_bytes = std::uint64_t(1) << 28;
constexpr std::uint64_t bomb_ratio = 200;

struct Discard {
  void operator()(zip_t* archive) const { zip_discard(archive); }
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};
using Archive = std::unique_ptr<zip_t, Discard>;
using Entry = std::unique_ptr<zip_file_t, Discard>;

Archive open_archive(const std::string& path) {
  {
    const InputFile readable(path);
  }  // libzip's own messages for a missing file or a folder are less clear
  int code = 0;
  Archive archive(zip_open(path.c_str(), ZIP_RDONLY | ZIP_CHECKCONS, &code));
  if (!archive) {
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    const std::string words = zip_error_strerror(&error);
    zip_error_fini(&error);
    fail(path + ": not a sound .npz file: " + words);
  }
  return archive;
}

}  // namespace

std::vector<std::string> npz_names(const std::string& path) {
  const auto archive = open_archive(path);
  std::vector<std::string> names;
  const auto count = zip_get_num_entries(archive.get(), 0);
  for (zip_int64_t i = 0; i < count; ++i) {
    const char* name = zip_get_name(archive.get(), zip_uint64_t(i), 0);
    std::string text = name ? name : "";
    if (text.size() > 4 && text.ends_with(".npy")) text.resize(text.size() - 4);
    names.push_back(text);
  }
  return names;
}

OwnedTensor read_npz(const std::string& path, const std::string& entry, bool two_bytes_are_bfloat16) {
  const auto archive = open_archive(path);
  const std::string label = path + ":" + entry;
  auto index = zip_name_locate(archive.get(), (entry + ".npy").c_str(), 0);
  if (index < 0) index = zip_name_locate(archive.get(), entry.c_str(), 0);
  if (index < 0) fail_no_entry(path, entry, npz_names(path));

  zip_stat_t stat;
  zip_stat_init(&stat);
  constexpr zip_uint64_t needed =
      ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
  if (zip_stat_index(archive.get(), zip_uint64_t(index), 0, &stat) != 0 || (stat.valid & needed) != needed)
    fail(label + ": " + zip_strerror(archive.get()));
  if (stat.encryption_method != ZIP_EM_NONE) fail(label + ": the entry is encrypted");
  if (stat.comp_method != ZIP_CM_STORE && stat.comp_method != ZIP_CM_DEFLATE)
    fail(label + ": zip method " + std::to_string(stat.comp_method) + ", expected stored or deflated");
  if (stat.size > bomb_bytes && stat.size / bomb_ratio > stat.comp_size)
    fail(label + ": " + bytes_text(double(stat.comp_size)) + " that unpack to " + bytes_text(double(stat.size)) +
         " are not read");

  const Entry file(zip_fopen_index(archive.get(), zip_uint64_t(index), 0));
  if (!file) fail(label + ": " + zip_strerror(archive.get()));
  const auto source = [&](void* to, std::size_t bytes) {
    auto* place = static_cast<char*>(to);
    while (bytes > 0) {
      const auto got = zip_fread(file.get(), place, std::min(bytes, std::size_t(1) << 30));
      if (got < 0) fail(label + ": " + zip_file_strerror(file.get()));
      if (got == 0) fail(label + ": the entry ends too early");
      place += got;
      bytes -= std::size_t(got);
    }
  };
  auto tensor = read_npy(label, stat.size, source, two_bytes_are_bfloat16);
  char beyond = 0;  // reading past the end makes libzip compare the checksum
  const auto rest = zip_fread(file.get(), &beyond, 1);
  if (rest < 0) fail(label + ": " + zip_file_strerror(file.get()));
  if (rest > 0) fail(label + ": the entry is longer than the archive says");
  return tensor;
}

void write_npz(const std::string& path, const NamedTensors& tensors) {
  int code = 0;
  Archive archive(zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code));
  if (!archive) fail("cannot be written");
  std::vector<std::string> headers;  // must live until zip_close
  headers.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    headers.push_back(npy_header(tensor));
    const zip_buffer_fragment_t fragments[] = {
        {reinterpret_cast<zip_uint8_t*>(headers.back().data()), headers.back().size()},
        {reinterpret_cast<zip_uint8_t*>(tensor.data.get()), tensor.bytes()}};
    const zip_uint64_t count = tensor.bytes() > 0 ? 2 : 1;
    auto* source = zip_source_buffer_fragment(archive.get(), fragments, count, 0);
    const auto index = source ? zip_file_add(archive.get(), (name + ".npy").c_str(), source, ZIP_FL_ENC_UTF_8) : -1;
    if (index < 0) {
      zip_source_free(source);
      fail(zip_strerror(archive.get()));
    }
    zip_set_file_compression(archive.get(), zip_uint64_t(index), ZIP_CM_STORE, 0);
  }
  if (zip_close(archive.get()) != 0) fail(std::string("cannot be written: ") + zip_strerror(archive.get()));
  archive.release();
}

}  // namespace anyflash::cli
