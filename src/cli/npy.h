// The .npy format, versions 1.0 to 3.0 (NumPy Enhancement Proposal 1), little-endian.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "owned_tensor.h"

namespace anyflash::cli {

/// Delivers the next `bytes` bytes, or throws Error.
using ByteSource = std::function<void(void* to, std::size_t bytes)>;

/// Reads a .npy stream of `size` bytes; errors begin with `label`.
/// The tensor without its data, before which the source then is.
OwnedTensor npy_shape(const std::string& label, std::uint64_t size, const ByteSource& source,
                      bool two_bytes_are_bfloat16);
OwnedTensor read_npy(const std::string& label, std::uint64_t size, const ByteSource& source,
                     bool two_bytes_are_bfloat16);
OwnedTensor read_npy_file(const std::string& path, bool two_bytes_are_bfloat16);

/// The header before the tensor's row-major data. bfloat16 is written as two-byte voids ('<V2'), as by ml_dtypes.
std::string npy_header(const OwnedTensor& tensor);
void write_npy_file(const std::string& path, const OwnedTensor& tensor);

}  // namespace anyflash::cli
