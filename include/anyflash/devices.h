// The devices that the library can use.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <anyflash/tensor.h>

namespace anyflash {

/// A device that calls can run on.
struct DeviceInfo {
  Device device;
  std::string model;  ///< the vendor's name for it, or "unknown"
  int threads = 0;    ///< CPU only: how many threads a call uses by default
};

/// The devices of this machine that the library can use.
std::vector<DeviceInfo> devices();

/// Waits until all work queued on a GPU's stream is done. stream: a cudaStream_t, null for the default one. On the CPU
/// it returns at once. Throws Error if there is no such device, or if the work has failed.
void synchronize(Device device, void* stream = nullptr);

/// Waits until all work queued on any stream of a device is done. Throws Error as synchronize does.
void synchronize_device(Device device);

/// Allocates memory on a device. It is freed with the last copy of the pointer. Throws Error if there is too little
/// memory, or no such device.
std::shared_ptr<void> device_memory(Device device, std::size_t bytes);

/// Copies bytes between the CPU's memory and a device's, or within either. The copy runs after all work already queued
/// on the device; the call returns when it is done. Throws Error.
void copy_memory(void* to, const void* from, std::size_t bytes, Device device);

/// The instruction set that the CPU's kernels use, e.g. "AVX2": the best that this machine has, or the one that the
/// environment variable ANYFLASH_ISA names. Throws Error if that one does not run here.
const char* instruction_set();

/// All instruction sets that were compiled in and run on this machine, best first. Throws Error as instruction_set
/// does.
std::vector<const char*> instruction_sets();

/// Makes the CPU's kernels use an instruction set of instruction_sets() from the next call on; "" for the best one. No
/// other thread may be in a call at the same time. Throws Error if the name is not in the list.
void use_instruction_set(std::string_view name);

}  // namespace anyflash
