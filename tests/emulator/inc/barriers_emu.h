// replaces cuda/hopper/barriers.cuh
#pragma once
#include <cuda.h>
#include "cuda/common/instructions.cuh"
namespace anyflash::cuda {
struct Barrier {
  int arrivals, left, bytes; unsigned phase;
  void begin(int n) { arrivals = left = n, bytes = 0, phase = 0; }
  void check() { if (left == 0 && bytes == 0) { ++phase; left = arrivals; } if (left < 0) emu::fail("too many arrivals"); }
  void arrive() { --left; check(); }
  void arrive_with_copies() { arrive(); }
  void arrive_and_expect(int n) { bytes += n; --left; check(); }
  void came(int n) { bytes -= n; check(); }
  void wait(unsigned parity) { while ((phase & 1) == (parity & 1)) emu::yield(); }
};
struct FakeMap { char* data; int bytes; std::int64_t size[5], stride[5]; int box[5], step[5]; };
template <class F> void each_of_box(const CUtensorMap* map, const int (&at)[5], const F& f) {
  FakeMap m; memcpy(&m, map, sizeof m); static_assert(sizeof(FakeMap) <= 128 + 64);
}
void box_to_shared(char* to, const CUtensorMap* map, const int (&at)[5], int& bytes);
void box_from_shared(const CUtensorMap* map, const char* from, const int (&at)[5]);
inline void copy_box(void* to, const CUtensorMap* map, int c, int x, int y, int z, int w, Barrier& barrier) {
  int bytes; box_to_shared(static_cast<char*>(to), map, {c, x, y, z, w}, bytes); barrier.came(bytes);
}
inline void store_box(const CUtensorMap* map, const void* from, int c, int x, int y, int z, int w) { box_from_shared(map, static_cast<const char*>(from), {c, x, y, z, w}); }
inline void copy_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
  if (uintptr_t(to) % 16 || uintptr_t(from) % 16 || bytes % 16) emu::fail("bulk align");
  shared_address(to), memcpy(to, from, bytes); barrier.came(bytes);
}
inline void add_bytes(float* to, const float* from, int bytes) { for (int i = 0; i < bytes / 4; ++i) to[i] += from[i]; }
inline void stores_commit() {}
inline void stores_read() {}
inline void barriers_begun() {}
template <int threads> void sync_threads(unsigned n) { emu::sync(emu::named[n], threads, false); }
template <int r> void take_registers() {}
template <int r> void give_registers() {}
}
