// What happens when tf.load_op_library, or a program that serves models, loads this library: its ops and kernels become
// TensorFlow's.
#include <cstdio>

#include "definitions.h"
#include "tensors.h"

namespace anyflash::tensorflow {
namespace {

[[maybe_unused]] const bool loaded = [] {
  try {
    define_ops();
    register_kernels();
    return true;
  } catch (const std::exception& error) {  // TensorFlow then says which op there is not
    std::fprintf(stderr, "anyflash: %s\n", error.what());
    return false;
  }
}();

}  // namespace
}  // namespace anyflash::tensorflow
