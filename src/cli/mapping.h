// Tensors of .npy files in the address space instead of in memory: their pages come from the file and can go again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "owned_tensor.h"
#include "tensor_file.h"

namespace anyflash::cli {

/// The tensor of a .npy file, which is only read. Throws Error if it cannot be mapped.
OwnedTensor map_npy_file(const std::string& path, bool two_bytes_are_bfloat16);

/// A .npy file that is written through its mapping. It gets its name when it is finished; else nothing stays of it.
class MappedResult {
 public:
  MappedResult(const std::string& path, ElementType type, const Shape& shape);

  const OwnedTensor& tensor() const { return tensor_; }
  /// Writes what is left and gives the file its name.
  void finish();

 private:
  TemporaryFile file_;
  OwnedTensor tensor_;
};

/// Gives back the memory of all mapped pages. The files keep the numbers.
void release_mapped_pages();

}  // namespace anyflash::cli
