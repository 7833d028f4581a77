// Tensor views from and to DLPack (https://dmlc.github.io/dlpack). Any definition of DLTensor with the standard's members
// serves: include your dlpack.h before or after this header, whichever version it is.
#pragma once

#include <anyflash/tensor.h>

namespace anyflash {
}  // namespace anyflash
