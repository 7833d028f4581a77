// Tensor views: how a caller passes tensors to anyflash. A view owns nothing; the memory must live as long as the call.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

namespace anyflash {

/// Element types. q, k and v have one of the first four. The others appear in masks, document ids, cumulative lengths
/// and page tables.
enum class ElementType : std::uint8_t { float16, bfloat16, float32, float64, boolean, uint8, int32, int64 };

/// Where a tensor lies and a call runs: cuda is an NVIDIA GPU, tiles the simulated tile machine (tile_machine.h), whose
/// tensors are in the CPU's memory.
enum class DeviceKind : std::uint8_t { cpu, cuda, tiles };

/// A CPU or one of the GPUs.
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  ///< of the GPU, as CUDA numbers them
  friend bool operator==(const Device&, const Device&) = default;
};

/// The library's one exception. `what()` is one line: which argument, what was expected, what was passed.
/// A call that throws has written nothing to its outputs.
class Error : public std::runtime_error {
 public:
  /// What is wrong.
  enum class Kind : std::uint8_t {
    value,        ///< a shape, stride, size or number is wrong
    type,         ///< an element type is wrong
    device,       ///< a tensor lives on another device, or the device cannot run this
    unsupported,  ///< correct, but not supported (the line says what is)
    memory        ///< an allocation failed
  };
  Error(Kind kind, const std::string& line) : std::runtime_error(line), kind_(kind) {}
  Kind kind() const noexcept { return kind_; }  ///< what is wrong

 private:
  Kind kind_;
};

/// A non-owning view of a strided tensor.
/// Strides count elements, may be negative or zero, and need no alignment beyond the element's own.
struct TensorView {
  static constexpr int max_rank = 8;  ///< axes at most

  void* data = nullptr;  ///< of the first element; on a GPU its address there
  ElementType type = ElementType::float32;
  Device device;
  int rank = -1;                                 ///< the number of axes; -1: the tensor is not given
  std::array<std::int64_t, max_rank> shape{};    ///< the first `rank` numbers count
  std::array<std::int64_t, max_rank> strides{};  ///< in elements

  TensorView() = default;
  /// A contiguous (row-major) view. Throws Error for more than max_rank sizes or 2^63 elements.
  TensorView(void* data, ElementType type, std::initializer_list<std::int64_t> shape, Device device = {});
  /// A view with explicit strides, in elements. Throws Error if the ranks differ or exceed max_rank.
  TensorView(void* data, ElementType type, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> strides, Device device = {});

  bool given() const { return rank >= 0; }  ///< is there a tensor?
  std::int64_t elements() const;            ///< the product of the shape, at most 2^63 - 1; 1 for rank 0
  void set_row_major_strides();             ///< from the shape; throws Error for more than 2^63 elements
};

std::size_t element_size(ElementType type);  ///< the bytes of an element
const char* element_name(ElementType type);  ///< the type's name: "float16", "bfloat16", ...
std::string device_name(Device device);      ///< the device's name: "cpu", "cuda:0", ...

/// Text from outside as errors print it: at most `most` bytes, then "...". Bytes that are not printable ASCII are
/// printed as `\\xHH`.
std::string shown(std::string_view text, std::size_t most = 40);

}  // namespace anyflash
