// DLPack's C functions for the exchange of arrays, as far as reading a tensor needs them. PyTorch has them from 2.10
// on. DLPack keeps this binary interface stable within a major version, so no PyTorch header is needed to build.
// tests/frameworks/test_torch_package.py compares the structures with the header of the installed PyTorch.
//
// Source: dlpack/dlpack.h of DLPack 1.2, where each of these names has the prefix DLPack.
#pragma once

#include <cstdint>

namespace anyflash::dlpack {

struct Version {
  std::uint32_t major, minor;
};
inline constexpr std::uint32_t known_major = 1;

struct Device {
  std::int32_t device_type, device_id;
};

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

/// Of a framework's array type: the capsule `capsule_name` in its __dlpack_c_exchange_api__.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;  ///< of an older major version
  void (*allocate)();
  void (*from_object)();
  void (*to_object)();
  /// Fills `out` with a view of the Python object, which owns shape and strides. Returns 0, or -1 with Python's error
  /// set.
  int (*view_of_object)(void* object, Tensor* out);
  void (*current_stream)();
};
inline constexpr const char* capsule_name = "dlpack_exchange_api";

}  // namespace anyflash::dlpack
