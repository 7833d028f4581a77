#include "safetensors.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "tensor_file.h"

namespace anyflash::cli {

namespace {

using nlohmann::json;

constexpr std::uint64_t longest_header = 100'000'000;  // the format's own limit
constexpr int deepest_header = 3;                      // file > tensor > shape

struct Entry {
  std::string name, dtype;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // from the start of the data
};

struct Contents {
  std::uint64_t data_start = 0;
  std::vector<Entry> entries;
};

struct Dtype {
  const char* name;
  std::size_t size;
  std::optional<ElementType> type;
};
const Dtype dtypes[] = {{"F16", 2, ElementType::float16},
                        {"BF16", 2, ElementType::bfloat16},
                        {"F32", 4, ElementType::float32},
                        {"F64", 8, ElementType::float64},
                        {"BOOL", 1, ElementType::boolean},
                        {"U8", 1, ElementType::uint8},
                        {"I32", 4, ElementType::int32},
                        {"I64", 8, ElementType::int64},
                        {"I8", 1, {}},
                        {"I16", 2, {}},
                        {"U16", 2, {}},
                        {"U32", 4, {}},
                        {"U64", 8, {}},
                        {"F8_E4M3", 1, {}},
                        {"F8_E5M2", 1, {}}};

const Dtype* find_dtype(const std::string& name) {
  for (const auto& dtype : dtypes)
    if (name == dtype.name) return &dtype;
  return nullptr;
}

// Parses the header, refusing depth bombs and duplicate names. Duplicates are searched in a pass of their own, which
// keeps nothing: after every object a parser with a callback walks over everything that it has kept so far.
json parse_header(const std::string& path, const std::string& text) {
  std::vector<std::set<std::string>> keys(deepest_header + 2);
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > deepest_header) fail(path + ": malformed header: nested too deep");
    if (event == json::parse_event_t::object_start) keys[std::size_t(depth) + 1].clear();
    if (event == json::parse_event_t::key && !keys[std::size_t(depth)].insert(parsed.get<std::string>()).second)
      fail(path + ": malformed header: '" + parsed.get<std::string>() + "' comes twice");
    return false;
  };
  try {
    std::ignore = json::parse(text, watch);
    return json::parse(text);
  } catch (const json::exception&) {
    fail(path + ": malformed header: not JSON");
  }
}

Entry parse_entry(const std::string& path, const std::string& name, const json& value) {
  const std::string label = path + ":" + name;
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets"))
    fail(label + ": malformed header: expected dtype, shape and data_offsets");
  const auto &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  const auto sizes = [](const json& list) {
    return list.is_array() &&
           std::all_of(list.begin(), list.end(), [](const json& n) { return n.is_number_unsigned(); });
  };
  if (!dtype.is_string()) fail(label + ": malformed header: dtype is not a string");
  if (!sizes(shape)) fail(label + ": malformed header: shape is not a list of sizes");
  if (!sizes(offsets) || offsets.size() != 2) fail(label + ": malformed header: data_offsets are not two offsets");
  Entry entry{name, dtype.get<std::string>(), {}, offsets[0].get<std::uint64_t>(), offsets[1].get<std::uint64_t>()};
  for (const auto& size : shape) {
    if (size.get<std::uint64_t>() > std::uint64_t(INT64_MAX))
      fail(label + ": malformed header: a size in shape overflows");
    entry.shape.push_back(size.get<std::int64_t>());
  }
  return entry;
}

void check_entry(const std::string& label, const Entry& entry, std::uint64_t data_bytes) {
  if (entry.begin > entry.end || entry.end > data_bytes)
    fail(label + ": data offsets " + std::to_string(entry.begin) + " to " + std::to_string(entry.end) +
         ", the file has " + std::to_string(data_bytes) + " bytes of data");
  const auto* dtype = find_dtype(entry.dtype);
  if (!dtype) fail(label + ": unknown element type '" + entry.dtype + "'");
  std::uint64_t bytes = dtype->size;
  bool empty = false;
  for (const auto size : entry.shape) {
    empty |= size == 0;
    if (size > 0 && __builtin_mul_overflow(bytes, std::uint64_t(size), &bytes))
      fail(label + ": shape " + shape_text(entry.shape) + " overflows");
  }
  if (empty) bytes = 0;
  if (bytes != entry.end - entry.begin)
    fail(label + ": " + std::to_string(entry.end - entry.begin) + " bytes of data, shape " + shape_text(entry.shape) +
         " of " + entry.dtype + " needs " + std::to_string(bytes));
}

Contents read_contents(const InputFile& file) {
  const auto& path = file.path();
  unsigned char start[8];
  if (file.size() < 8) fail(path + ": not a .safetensors file: " + std::to_string(file.size()) + " bytes");
  file.read(0, start, 8);
  std::uint64_t length = 0;
  for (int i = 8; i-- > 0;) length = length << 8 | start[i];
  if (length > longest_header || length > file.size() - 8)
    fail(path + ": header of " + std::to_string(length) + " bytes, the file has " + std::to_string(file.size()));
  std::string text(length, '\0');
  file.read(8, text.data(), length);
  const auto header = parse_header(path, text);
  if (!header.is_object()) fail(path + ": malformed header: not a JSON object");

  Contents contents{8 + length, {}};
  const auto data_bytes = file.size() - contents.data_start;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    contents.entries.push_back(parse_entry(path, name, value));
    check_entry(path + ":" + name, contents.entries.back(), data_bytes);
  }
  auto& entries = contents.entries;
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  for (std::size_t i = 1; i < entries.size(); ++i)
    if (entries[i].begin < entries[i - 1].end)
      fail(path + ": the data of '" + entries[i - 1].name + "' and '" + entries[i].name + "' overlap");
  std::uint64_t end = 0;
  for (const auto& entry : entries) {
    if (entry.begin != end) fail(path + ": a hole of " + std::to_string(entry.begin - end) + " bytes in the data");
    end = entry.end;
  }
  if (end != data_bytes) fail(path + ": " + std::to_string(data_bytes - end) + " bytes behind the data");
  return contents;
}

const char* dtype_of(ElementType type) {
  for (const auto& dtype : dtypes)
    if (dtype.type == type) return dtype.name;
  return nullptr;
}

}  // namespace

std::vector<std::string> safetensors_names(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : read_contents(InputFile(path)).entries) names.push_back(entry.name);
  return names;
}

OwnedTensor read_safetensors(const std::string& path, const std::string& name) {
  const InputFile file(path);
  const auto contents = read_contents(file);
  const auto found =
      std::find_if(contents.entries.begin(), contents.entries.end(), [&](const Entry& e) { return e.name == name; });
  if (found == contents.entries.end()) fail_no_entry(path, name, safetensors_names(path));
  const std::string label = path + ":" + name;
  const auto type = find_dtype(found->dtype)->type;
  if (!type) fail(label + ": element type '" + found->dtype + "' is not supported");
  OwnedTensor tensor{*type, found->shape, row_major(found->shape), nullptr};
  const auto bytes = checked_bytes(label, found->shape, *type);
  tensor.data = std::make_shared_for_overwrite<std::byte[]>(bytes > 0 ? bytes : 1);
  file.read(contents.data_start + found->begin, tensor.data.get(), bytes);
  return tensor;
}

void write_safetensors(const std::string& path, const NamedTensors& tensors) {
  json header = json::object();
  std::uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {
        {"dtype", dtype_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes()}}};
    offset += tensor.bytes();
  }
  auto text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // data begins at a multiple of 8 bytes
  std::ofstream file(path, std::ios::binary);
  for (int i = 0; i < 8; ++i) file.put(char(text.size() >> (8 * i) & 255));
  file << text;
  for (const auto& [name, tensor] : tensors)
    file.write(reinterpret_cast<const char*>(tensor.data.get()), std::streamsize(tensor.bytes()));
  file.close();
  if (!file) fail("cannot be written");
}

}  // namespace anyflash::cli
