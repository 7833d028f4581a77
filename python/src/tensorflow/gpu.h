// When a call on a GPU may run. TensorFlow's C API does not reveal the stream of TensorFlow's own GPU devices
// (TF_GetStream returns only those of pluggable devices), and that stream waits for no other. So a call waits for all
// work queued on the GPU, runs on CUDA's default stream, and is waited for.
#pragma once

#include <anyflash/anyflash.h>

namespace anyflash::tensorflow {

#ifdef ANYFLASH_HAS_CUDA
inline constexpr bool gpus_are_built = true;
#else
inline constexpr bool gpus_are_built = false;
#endif

/// Does nothing on a CPU.
class GpuTurn {
 public:
  explicit GpuTurn(Device device) : device_(device) {
    if (device_.kind == DeviceKind::cuda) synchronize_device(device_);
  }
  void finish() const {
    if (device_.kind == DeviceKind::cuda) synchronize(device_);
  }

 private:
  Device device_;
};

}  // namespace anyflash::tensorflow
