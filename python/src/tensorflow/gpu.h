// When a call on a GPU may run. TensorFlow's C API does not tell the stream of TensorFlow's own GPU devices
// (TF_GetStream gives those of pluggable devices alone), and that stream waits for no other. So a call waits for all
// work that was queued on the GPU, runs on CUDA's default stream, and is waited for.
#pragma once

#include <anyflash/anyflash.h>

namespace anyflash::tensorflow {

#ifdef ANYFLASH_HAS_CUDA
inline constexpr bool gpus_are_built = true;
void wait_for_all(Device device);  ///< throws Error
#else
inline constexpr bool gpus_are_built = false;
inline void wait_for_all(Device) {}
#endif

/// Nothing on a CPU.
class GpuTurn {
 public:
  explicit GpuTurn(Device device) : device_(device) {
    if (device_.kind == DeviceKind::cuda) wait_for_all(device_);
  }
  void finish() const {
    if (device_.kind == DeviceKind::cuda) synchronize(device_);
  }

 private:
  Device device_;
};

}  // namespace anyflash::tensorflow
