// A driver that is older than the CUDA that the library was built with, or that does not work yet. No GPU is needed:
// what the run-time library says then is said here.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "cuda/common/device.h"

namespace {

int driver = 0;  ///< its version, 0 where there is none
cudaError_t status = cudaErrorInsufficientDriver;
int devices = 0;

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = devices, status; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = driver, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaErrorInsufficientDriver; }
const char* cudaGetErrorString(cudaError_t) { return "not yet"; }
cudaError_t cudaGetDevice(int*) { return cudaErrorInsufficientDriver; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*, const void*) { return cudaErrorInsufficientDriver; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return cudaErrorInsufficientDriver;
}
cudaError_t cudaGetDriverEntryPoint(const char*, void**, unsigned long long, cudaDriverEntryPointQueryResult*) {
  return cudaErrorInsufficientDriver;
}
}

namespace anyflash::cuda {
namespace {

std::string line_of(int version) {
  driver = version;
  try {
    facts_of({DeviceKind::cuda, 0});
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Error::Kind::device);
    return error.what();
  }
  return "";
}

TEST(Driver, IsToldFromNoneWhereItDoesNotWork) {
  EXPECT_EQ(line_of(11080), "query: on cuda:0, but the driver is for CUDA 11.8, expected " +
                                std::to_string(CUDART_VERSION / 1000) + ".0 or newer");
  EXPECT_EQ(line_of(0), "query: on cuda:0, but CUDA finds no GPU here");
  EXPECT_EQ(line_of(CUDART_VERSION), "query: on cuda:0, but CUDA finds no GPU here");
  // And is asked again.
  status = cudaErrorSystemNotReady;
  EXPECT_EQ(line_of(CUDART_VERSION), "query: on cuda:0, but CUDA finds no GPU here: not yet");
  status = cudaErrorNoDevice;
  EXPECT_EQ(line_of(CUDART_VERSION), "query: on cuda:0, but CUDA finds no GPU here");
  status = cudaSuccess, devices = 1;
  EXPECT_EQ(line_of(CUDART_VERSION), "");
}

}  // namespace
}  // namespace anyflash::cuda
