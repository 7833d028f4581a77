// Barriers in shared memory (mbarrier) by which a warpgroup that loads and warpgroups that compute hand tiles over, and
// the division of a multiprocessor's registers between them (sm_90a).
#pragma once

#include <cstdint>

#include "cuda/common/instructions.cuh"

namespace anyflash::cuda {

/// Complete when as many threads as `arrivals` have arrived; then it begins its next phase. A phase is waited for by
/// its parity: 0 for the first.
struct Barrier {
  std::uint64_t state;

  __device__ __forceinline__ void begin(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  /// Arrives when all copies of this thread so far have.
  __device__ __forceinline__ void arrive_with_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  __device__ __forceinline__ void wait(unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(&state)),
        "r"(parity)
        : "memory");
  }
};

/// Makes begin() known to all threads behind the next barrier of the block.
__device__ __forceinline__ void barriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// A barrier of some warps of the block, by number (0 is __syncthreads').
template <int number, int threads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace anyflash::cuda
