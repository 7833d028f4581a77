// mbarriers in shared memory, by which producer and consumer warpgroups hand over tiles; TMA copies that complete at
// them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/instructions.cuh"
#include "cuda/tile/setmaxnreg.cuh"

namespace anyflash::cuda {

/// compute-sanitizer's racecheck does not model that __syncwarp() orders a warp's accesses before one lane's arrival.
/// So in the build of scripts/sanitize-gpu all lanes arrive. (Nor does it model named barriers at which warps meet from
/// different places in the code.)
#ifdef ANYFLASH_FOR_RACECHECK
inline constexpr bool kForRacecheck = true;
#else
inline constexpr bool kForRacecheck = false;
#endif

/// An mbarrier. A phase completes when `arrivals` threads have arrived; then the next phase begins. Waits name a phase
/// by its parity: 0 for the first.
struct Barrier {
  std::uint64_t state;
  static constexpr int kLanes = kForRacecheck ? 32 : 1;  ///< lanes that arrive for a warp

  __device__ __forceinline__ void begin(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals) : "memory");
  }
  /// The same for warps, which arrive by arrive_for_warp(), and for other threads.
  __device__ __forceinline__ void begin_for_warps(int warps, int threads = 0) { begin(warps * kLanes + threads); }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  /// The arrival of a whole warp. Call __syncwarp() before it if its lanes have read or written themselves.
  __device__ __forceinline__ void arrive_for_warp() {
    if (kForRacecheck || lane_number() == 0) arrive();
  }
  /// Arrives, and delays completion until as many bytes have been copied for this barrier.
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }
  /// The same for a whole warp, as arrive_for_warp().
  __device__ __forceinline__ void arrive_and_expect_for_warp(int bytes) {
    if (lane_number() == 0) arrive_and_expect(bytes);
    else if (kForRacecheck) arrive();
  }
  /// Delays completion without arriving.
  __device__ __forceinline__ void expect(int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
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

/// The arrival of a whole warp, after all that its lanes have read and written.
__device__ __forceinline__ void release(Barrier& barrier) {
  __syncwarp();
  barrier.arrive_for_warp();
}

/// Prefetches a tensor map.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// TMA load of a box of a tensor of five dimensions, from a coordinate on; zeros beyond the tensor.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int c, int x, int y, int z, int w,
                                         Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(shared_address(to)),
      "l"(map), "r"(c), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(&barrier.state))
      : "memory");
}
/// The same for data that is read once: L2 evicts it first. policy: read_once().
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int c, int x, int y, int z, int w,
                                         Barrier& barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)),
      "l"(map), "r"(c), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(&barrier.state)), "l"(policy)
      : "memory");
}
/// Prefetches a cache line to L2.
__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
/// Prefetches a box to L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c), "r"(x),
               "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ std::uint64_t read_once() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// TMA store of a box; parts beyond the tensor are left out.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int c, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
               "r"(c), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(from))
               : "memory");
}

/// fence.proxy.async: makes this thread's writes to shared memory visible to the products of all threads after the next
/// barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Bulk copy of a multiple of 16 bytes, at 16-byte addresses.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier.state))
               : "memory");
}

/// Bulk reduction: adds float32 numbers in shared memory to those in global memory, each atomically, in no fixed order.
/// `bytes` as above.
__device__ __forceinline__ void add_bytes(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
/// Commits a group of this thread's bulk stores and additions.
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until this thread's bulk stores and additions have been read from shared memory.
__device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/// Makes begin() visible to all threads after the next barrier of the thread block.
__device__ __forceinline__ void barriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// A named barrier of some warps of the thread block, by number (0 is __syncthreads').
template <int threads>
__device__ __forceinline__ void sync_threads(unsigned number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

/// The same for warps that come from different places in the code.
template <int threads>
__device__ __forceinline__ void sync_warps_anywhere(unsigned number) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

/// barrier.red.or: the same, and true if `value` is true in any of the threads.
template <int threads>
__device__ __forceinline__ bool any_of_threads(unsigned number, bool value) {
  int any;
  asm volatile(
      "{ .reg .pred own, all;\n"
      "setp.ne.s32 own, %3, 0;\n"
      "barrier.red.or.pred all, %1, %2, own;\n"
      "selp.s32 %0, 1, 0, all; }"
      : "=r"(any)
      : "r"(number), "n"(threads), "r"(int{value})
      : "memory");
  return any != 0;
}

/// Arrives at a named barrier without waiting.
template <int threads>
__device__ __forceinline__ void arrive_threads(unsigned number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

}  // namespace anyflash::cuda
