// Runs when tf.load_op_library, or a model server, loads this library: registers its ops and kernels with TensorFlow.
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
  } catch (const std::exception& error) {  // TensorFlow then reports which op is missing
    std::fprintf(stderr, "anyflash: %s\n", error.what());
    return false;
  }
}();

}  // namespace
}  // namespace anyflash::tensorflow
