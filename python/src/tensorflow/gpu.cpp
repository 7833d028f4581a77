#include "gpu.h"

#include <cuda_runtime_api.h>

#include <string>

namespace anyflash::tensorflow {

void wait_for_all(Device device) {
  int before = 0;
  auto error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != device.index) error = cudaSetDevice(device.index);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (before != device.index) cudaSetDevice(before);
  if (error != cudaSuccess) throw Error(Error::Kind::device, std::string("query: ") + cudaGetErrorString(error));
}

}  // namespace anyflash::tensorflow
