#include "npy.h"

#include <charconv>
#include <cstring>
#include <fstream>
#include <optional>

#include "tensor_file.h"

namespace anyflash::cli {

namespace {

constexpr char magic[] = "\x93NUMPY";
constexpr std::size_t longest_header = 1 << 16;  // NumPy itself writes under 200 bytes for eight axes

struct Header {
  std::string descr;
  bool fortran_order = false;
  Shape shape;
};

// The header is a Python dictionary literal with three known keys; this parser accepts only that.
class HeaderParser {
 public:
  HeaderParser(const std::string& label, const std::string& text) : label_(label), text_(text) {}

  Header parse() {
    Header header;
    bool descr = false, order = false, shape = false;
    expect('{');
    while (!accept('}')) {
      const auto key = string();
      expect(':');
      if (key == "descr" && !descr) {
        header.descr = dtype();
        descr = true;
      } else if (key == "fortran_order" && !order) {
        header.fortran_order = boolean();
        order = true;
      } else if (key == "shape" && !shape) {
        header.shape = tuple();
        shape = true;
      } else {
        wrong("unexpected key");
      }
      if (!accept(',') && peek() != '}') wrong("expected , or }");
    }
    if (peek() != '\0') wrong("text after the dictionary");
    if (!descr || !order || !shape) wrong("descr, fortran_order or shape is missing");
    return header;
  }

 private:
  [[noreturn]] void wrong(const char* why) const { fail(label_ + ": malformed .npy header: " + why); }

  char peek() {
    while (place_ < text_.size() && (text_[place_] == ' ' || text_[place_] == '\n')) ++place_;
    return place_ < text_.size() ? text_[place_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++place_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) wrong((std::string("expected ") + c).c_str());
  }
  std::string string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') wrong("expected a string");
    const auto end = text_.find(quote, ++place_);
    if (end == std::string::npos) wrong("a string does not end");
    auto result = text_.substr(place_, end - place_);
    place_ = end + 1;
    return result;
  }
  std::string dtype() {
    if (peek() == '[') fail(label_ + ": structured element types are not supported");
    return string();
  }
  bool boolean() {
    peek();
    for (const bool value : {true, false}) {
      const std::string word = value ? "True" : "False";
      if (text_.compare(place_, word.size(), word) == 0) {
        place_ += word.size();
        return value;
      }
    }
    wrong("fortran_order is not True or False");
  }
  Shape tuple() {
    Shape shape;
    expect('(');
    while (!accept(')')) {
      peek();
      std::int64_t size = 0;
      const auto* begin = text_.data() + place_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), size);
      if (error == std::errc::result_out_of_range) wrong("a size in shape overflows");
      if (error != std::errc()) wrong("shape is not a tuple of integers");
      place_ += std::size_t(end - begin);
      if (size < 0) wrong("negative size in shape");
      if (shape.size() == std::size_t(TensorView::max_rank)) wrong("more than 8 axes");
      shape.push_back(size);
      if (!accept(',') && peek() != ')') wrong("shape is not a tuple of integers");
    }
    return shape;
  }

  const std::string& label_;
  const std::string& text_;
  std::size_t place_ = 0;
};

std::optional<ElementType> type_of(const std::string& kind) {
  if (kind == "f2") return ElementType::float16;
  if (kind == "f4") return ElementType::float32;
  if (kind == "f8") return ElementType::float64;
  if (kind == "b1") return ElementType::boolean;
  if (kind == "u1") return ElementType::uint8;
  if (kind == "i4") return ElementType::int32;
  if (kind == "i8") return ElementType::int64;
  return {};
}

ElementType element_type(const std::string& label, const std::string& descr, bool two_bytes_are_bfloat16) {
  const std::string kind = descr.empty() ? descr : descr.substr(1);
  const bool one_byte = kind == "b1" || kind == "u1";
  if (!descr.empty() && descr[0] == '>' && !one_byte)
    fail(label + ": big-endian elements ('" + descr + "') are not supported, expected little-endian");
  if (!descr.empty() && (descr[0] == '<' || descr[0] == '|' || descr[0] == '>')) {
    if (const auto type = type_of(kind)) return *type;
    if (kind == "V2" || kind == "u2" || kind == "i2") {
      if (two_bytes_are_bfloat16) return ElementType::bfloat16;
      fail(label + ": element type '" + descr + "'; if these are bfloat16, say --type bfloat16");
    }
  }
  fail(label + ": element type '" + descr + "' is not supported");
}

const char* descr_of(ElementType type) {
  switch (type) {
    case ElementType::float16: return "<f2";
    case ElementType::bfloat16: return "<V2";
    case ElementType::float32: return "<f4";
    case ElementType::float64: return "<f8";
    case ElementType::boolean: return "|b1";
    case ElementType::uint8: return "|u1";
    case ElementType::int32: return "<i4";
    default: return "<i8";
  }
}

}  // namespace

OwnedTensor npy_shape(const std::string& label, std::uint64_t size, const ByteSource& source,
                      bool two_bytes_are_bfloat16) {
  unsigned char start[12];
  if (size < 10) fail(label + ": not a .npy file: " + std::to_string(size) + " bytes");
  source(start, 10);
  if (std::memcmp(start, magic, 6) != 0) fail(label + ": not a .npy file: wrong magic");
  const int version = start[6];
  if (version < 1 || version > 3) fail(label + ": .npy version " + std::to_string(version) + ", expected 1 to 3");
  std::uint64_t read = 10, length = start[8] | start[9] << 8;
  if (version > 1) {
    if (size < 12) fail(label + ": the file ends too early");
    source(start + 10, 2);
    read = 12;
    length |= std::uint64_t(start[10]) << 16 | std::uint64_t(start[11]) << 24;
  }
  if (length > size - read)
    fail(label + ": header of " + std::to_string(length) + " bytes, the file has " + std::to_string(size));
  if (length > longest_header) fail(label + ": header of " + std::to_string(length) + " bytes is too long");
  std::string text(length, '\0');
  source(text.data(), length);
  const auto header = HeaderParser(label, text).parse();

  OwnedTensor tensor;
  tensor.type = element_type(label, header.descr, two_bytes_are_bfloat16);
  tensor.shape = header.shape;
  const auto bytes = checked_bytes(label, header.shape, tensor.type);
  const auto left = size - read - length;
  if (bytes != left)
    fail(label + ": " + std::to_string(left) + " bytes of data, shape " + shape_text(header.shape) + " needs " +
         std::to_string(bytes));
  tensor.strides = row_major(header.shape);
  if (header.fortran_order) {
    const Shape reversed(header.shape.rbegin(), header.shape.rend());
    const auto strides = row_major(reversed);
    tensor.strides.assign(strides.rbegin(), strides.rend());
  }
  return tensor;
}

OwnedTensor read_npy(const std::string& label, std::uint64_t size, const ByteSource& source,
                     bool two_bytes_are_bfloat16) {
  auto tensor = npy_shape(label, size, source, two_bytes_are_bfloat16);
  const auto bytes = tensor.bytes();
  tensor.data = std::make_shared_for_overwrite<std::byte[]>(bytes > 0 ? bytes : 1);
  source(tensor.data.get(), bytes);
  return tensor;
}

OwnedTensor read_npy_file(const std::string& path, bool two_bytes_are_bfloat16) {
  const InputFile file(path);
  std::uint64_t offset = 0;
  const auto source = [&](void* to, std::size_t bytes) {
    file.read(offset, to, bytes);
    offset += bytes;
  };
  return read_npy(path, file.size(), source, two_bytes_are_bfloat16);
}

std::string npy_header(const OwnedTensor& tensor) {
  std::string text = std::string("{'descr': '") + descr_of(tensor.type) +
                     "', 'fortran_order': False, 'shape': " + shape_text(tensor.shape) + ", }";
  text.append(63 - (10 + text.size()) % 64, ' ');  // data begins at a multiple of 64 bytes
  text += '\n';
  std::string header(magic, 6);
  header += {'\1', '\0', char(text.size() & 255), char(text.size() >> 8)};
  return header + text;
}

void write_npy_file(const std::string& path, const OwnedTensor& tensor) {
  std::ofstream file(path, std::ios::binary);
  const auto header = npy_header(tensor);
  file.write(header.data(), std::streamsize(header.size()));
  file.write(reinterpret_cast<const char*>(tensor.data.get()), std::streamsize(tensor.bytes()));
  file.close();
  if (!file) fail("cannot be written");
}

}  // namespace anyflash::cli
