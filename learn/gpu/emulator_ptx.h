// The verbs of ptx.h for the emulator. Here one can read what an instruction does, and where its numbers lie.
//
// - mma and ldmatrix have their real fragment layouts. ldmatrix counts bank conflicts.
// - cp.async: the 16 bytes are copied when the thread waits for them, or at once. The first finds a missing wait, the
//   second a buffer that is filled while somebody still reads it.
// - TMA: a box arrives when no thread can go on, the newest one first; or at once.
// - bulk_add reads shared memory when the thread waits for it, or at once.
// - wgmma: until the wait, c is NaN. Operands in shared memory are read at the wait: by then a buffer that was given
//   away too early holds something else. Descriptors are decoded as the hardware does it.
// - wgmma reads shared memory through the asynchronous proxy, a second copy here. TMA writes both copies. Ordinary
//   stores reach the second one only by fence_async_proxy. A missing fence ends in unwritten memory.
#pragma once

#define __grid_constant__

namespace emulator {

// Where a pointer lies in dynamic shared memory. `what` names the instruction that wants `bytes` there.
inline std::size_t shared_offset(const char* what, const void* pointer, std::size_t bytes, std::size_t alignment) {
  const auto at = std::size_t(static_cast<const unsigned char*>(pointer) - block.shared);
  if (at > block.bytes || at + bytes > block.bytes) fail("%s: not in the dynamic shared memory", what);
  if (at % alignment) fail("%s: byte %zu of shared memory, expected a multiple of %zu", what, at, alignment);
  return at;
}

// A float16 of shared memory that something must have written.
inline half read_half(const char* what, const unsigned char* memory, std::size_t at) {
  half x;
  if (at + 2 > block.bytes) fail("%s: byte %zu is behind the shared memory", what, at);
  std::memcpy(&x.bits, memory + at, 2);
  if (x.bits == 0xffff) fail("%s: byte %zu of shared memory was never written", what, at);
  return x;
}

inline std::uint32_t pair_of(half low, half high) { return low.bits | std::uint32_t(high.bits) << 16; }
inline float number_of(std::uint32_t pair, int n) {
  half x;
  x.bits = std::uint16_t(pair >> 16 * n);
  return x;
}

}  // namespace emulator

inline std::uint32_t shared_address(const void* pointer) {
  return std::uint32_t(emulator::shared_offset("shared_address", pointer, 0, 1));
}

inline std::uint32_t pack(float low, float high) { return emulator::pair_of(half(low), half(high)); }
inline float unpack(std::uint32_t pair, int n) { return emulator::number_of(pair, n); }

// --- mma and ldmatrix ------------------------------------------------------------------------------------------------

inline void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                int line = __builtin_LINE()) {
  struct Lane {
    float* c;
    const std::uint32_t* a;
    std::uint32_t b[2];
  } mine{c, a, {b0, b1}};
  emulator::warp_meets("mma", line, &mine, [](void** lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Lane& from = *static_cast<Lane*>(lanes[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int n = 0; n < 2; ++n) {  // of a pair
        a[g][2 * t + n] = emulator::number_of(from.a[0], n), a[g + 8][2 * t + n] = emulator::number_of(from.a[1], n);
        a[g][2 * t + 8 + n] = emulator::number_of(from.a[2], n),
                         a[g + 8][2 * t + 8 + n] = emulator::number_of(from.a[3], n);
        b[2 * t + n][g] = emulator::number_of(from.b[0], n), b[2 * t + 8 + n][g] = emulator::number_of(from.b[1], n);
      }
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        float sum = static_cast<Lane*>(lanes[lane])->c[e];
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        static_cast<Lane*>(lanes[lane])->c[e] = sum;
      }
  });
}

namespace emulator {
inline void load_matrices(const char* what, int line, std::uint32_t* to, const half* row, bool transposed) {
  struct Lane {
    std::uint32_t* to;
    std::size_t row;
    bool transposed;
  } mine{to, shared_offset(what, row, 16, 16), transposed};
  warp_meets(what, line, &mine, [](void** lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      half x[8][8];
      int banks[8] = {};
      for (int r = 0; r < 8; ++r) {
        const std::size_t at = static_cast<Lane*>(lanes[8 * matrix + r])->row;
        if (banks[at / 16 % 8]++) ++conflicts;  // 8 groups of 4 banks; each can deliver one row at a time
        for (int c = 0; c < 8; ++c) x[r][c] = read_half("ldmatrix", block.shared, at + 2 * c);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4 * 2;
        Lane& mine = *static_cast<Lane*>(lanes[lane]);
        mine.to[matrix] = mine.transposed ? pair_of(x[t][g], x[t + 1][g]) : pair_of(x[g][t], x[g][t + 1]);
      }
    }
  });
}
}  // namespace emulator

inline void ldmatrix(std::uint32_t (&to)[4], const half* row, int line = __builtin_LINE()) {
  emulator::load_matrices("ldmatrix", line, to, row, false);
}
inline void ldmatrix_trans(std::uint32_t (&to)[4], const half* row, int line = __builtin_LINE()) {
  emulator::load_matrices("ldmatrix_trans", line, to, row, true);
}

// --- cp.async --------------------------------------------------------------------------------------------------------

inline void copy_async(void* to, const void* from, bool inside) {
  emulator::shared_offset("cp.async", to, 16, 16);
  if (inside && reinterpret_cast<std::uintptr_t>(from) % 16) emulator::fail("cp.async from a misaligned address");
  const auto copy = [=] {
    if (inside) std::memcpy(to, from, 16);
    if (!inside) std::memset(to, 0, 16);
  };
  if (!emulator::block.late) copy();
  emulator::now->copies.back().push_back(emulator::block.late ? emulator::Work(copy) : [] {});
}
inline void copies_commit() { emulator::now->copies.emplace_back(); }

namespace emulator {
// The oldest groups, until so many committed ones are left.
inline void finish_groups(std::deque<std::vector<Work>>& groups, std::size_t left) {
  while (groups.size() - 1 > left) {
    for (const Work& work : groups.front()) work();
    groups.pop_front();
  }
}
}  // namespace emulator

template <int groups>
void copies_wait() {
  emulator::finish_groups(emulator::now->copies, groups);
}

// --- Barriers --------------------------------------------------------------------------------------------------------

inline void named_sync(int id, int threads, int line = __builtin_LINE()) {
  emulator::arrive(unsigned(id), unsigned(threads), true, "bar.sync", line);
}
inline void named_arrive(int id, int threads, int line = __builtin_LINE()) {
  emulator::arrive(unsigned(id), unsigned(threads), false, "bar.arrive", line);
}

struct alignas(8) Barrier {
  unsigned phase;
  int count, missing, bytes;  // bytes: announced, and not there yet

  void init(int threads) {
    *this = {0, threads, threads, 0};
    emulator::block.unfenced = true;
  }
  void arrive(int line = __builtin_LINE()) {
    ready(line);
    if (missing-- == 0) emulator::fail("mbarrier: more than %d arrivals in a phase, line %d", count, line);
    end_phase();
  }
  void arrive_expect(int more, int line = __builtin_LINE()) {
    ready(line);
    bytes += more;
    arrive(line);
  }
  void wait(int parity, int line = __builtin_LINE()) {
    ready(line);
    if (phase == unsigned(parity)) emulator::pause("an mbarrier", line, &phase, unsigned(parity));
  }
  void end_phase() {
    if (missing == 0 && bytes == 0) missing = count, phase ^= 1;
  }
  void ready(int line) const {
    if (phase > 1) emulator::fail("mbarrier of line %d: not initialized", line);
  }
};

inline void fence_barrier_init() { emulator::block.unfenced = false; }
inline void fence_async_proxy() { std::memcpy(emulator::block.proxy, emulator::block.shared, emulator::block.bytes); }

// --- TMA -------------------------------------------------------------------------------------------------------------

struct CUtensorMap {
  const half* data;
  int heads, rows, channels, box_rows;
};
inline CUtensorMap tensor_map(const half* data, int heads, int rows, int channels, int box_rows) {
  return {data, heads, rows, channels, box_rows};
}

namespace emulator {
// The 128-byte swizzle: bits 4 to 6 of an address (which 16 bytes of a row) are exchanged by bits 7 to 9 (which row).
inline std::size_t swizzled(std::size_t at) { return at ^ (at >> 7 & 7) << 4; }
}  // namespace emulator

inline void tma_load(half* to, const CUtensorMap& map, Barrier& full, int channel, int row, int head) {
  using namespace emulator;
  if (block.unfenced) fail("TMA: no fence_barrier_init since an mbarrier was initialized");
  const std::size_t at = shared_offset("TMA", to, 128 * std::size_t(map.box_rows), 1024);
  const auto transfer = [=, &full] {
    for (int r = 0; r < map.box_rows; ++r)
      for (int c = 0; c < 64; ++c) {
        const bool inside = row + r >= 0 && row + r < map.rows && channel + c < map.channels && head < map.heads;
        const half x =
            inside ? map.data[(std::size_t(head) * map.rows + row + r) * map.channels + channel + c] : half(0.0f);
        const std::size_t place = swizzled(at + 128 * r + 2 * c);
        std::memcpy(block.shared + place, &x, 2), std::memcpy(block.proxy + place, &x, 2);
      }
    full.bytes -= 128 * map.box_rows;
    full.end_phase();
  };
  block.late ? block.transfers.push_back(transfer) : transfer();
}

inline void bulk_load(void* to, const void* from, int bytes, Barrier& full) {
  using namespace emulator;
  if (block.unfenced) fail("TMA: no fence_barrier_init since an mbarrier was initialized");
  if (reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16) fail("bulk_load: not multiples of 16 bytes");
  const std::size_t at = shared_offset("bulk_load", to, std::size_t(bytes), 16);
  const auto transfer = [=, &full] {
    std::memcpy(block.shared + at, from, bytes), std::memcpy(block.proxy + at, from, bytes);
    full.bytes -= bytes;
    full.end_phase();
  };
  block.late ? block.transfers.push_back(transfer) : transfer();
}
// Reads through the asynchronous proxy, at the wait or at once.
inline void bulk_add(float* to, const float* from, int count) {
  using namespace emulator;
  if (reinterpret_cast<std::uintptr_t>(to) % 16 || count % 4) fail("bulk_add: not multiples of 16 bytes");
  const std::size_t at = shared_offset("bulk_add", from, 4 * std::size_t(count), 16);
  const auto add = [=] {
    for (int n = 0; n < count; ++n) {
      float x;
      std::memcpy(&x, block.proxy + at + 4 * std::size_t(n), 4);
      to[n] += x;
    }
  };
  if (!block.late) add();
  now->bulks.push_back(block.late ? Work(add) : [] {});
}
inline void bulk_wait() {
  for (const auto& work : emulator::now->bulks) work();
  emulator::now->bulks.clear();
}

// --- wgmma -----------------------------------------------------------------------------------------------------------

inline std::uint64_t descriptor(const half* tile, int panels) {
  const std::uint64_t at = emulator::shared_offset("descriptor", tile, 0, 16);
  return std::uint64_t(1) << 62 | std::uint64_t(1024 >> 4) << 32 | std::uint64_t(panels >> 4) << 16 | at >> 4;
}

namespace emulator {

struct Descriptor {
  explicit Descriptor(std::uint64_t bits)
      : start((bits & 0x3fff) << 4), panels((bits >> 16 & 0x3fff) << 4), groups((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) fail("wgmma: only the 128-byte swizzle");
  }
  // Entry `inner` of row `row`: an operand whose rows are of 64 numbers along the depth (K-major), or along the columns
  // (MN-major), then with panels of 64 columns.
  float read(int row, int inner) const {
    const std::size_t at = start + row / 8 * groups + row % 8 * 128 + inner / 64 * panels + inner % 64 * 2;
    return read_half("wgmma", block.proxy, swizzled(at));
  }
  std::size_t start, panels, groups;
};

// Issues c = A B (+ c), 64 rows of a warpgroup. a(row, k), b(k, column). The lane does its own part, at its wait.
template <int tiles, class A, class B>
void issue_product(const char* what, int line, float (&c)[tiles][4], bool sum, const A& a, const B& b) {
  meet(block.warpgroups[thread() / kWarpgroup], kWarpgroup, what, line, nullptr, [](void**) {});
  if (!now->fenced) fail("%s of line %d: no wgmma_fence since the products before", what, line);
  float* const to = &c[0][0];
  std::vector<float> before;
  bool waiting = false;  // do products before this one add to c?
  for (const float* one : now->pending) waiting |= one == to;
  if (!waiting) before.assign(to, to + 4 * tiles), std::fill_n(to, 4 * tiles, NAN);
  now->pending.push_back(to);
  now->products.back().push_back([=, lane = int(thread() % kWarp), warp = int(thread() / kWarp % 4)] {
    if (!before.empty()) std::copy(before.begin(), before.end(), to);
    float left[2][16], right[16];  // of rows g and g + 8, of a column
    for (int r = 0; r < 2; ++r)
      for (int k = 0; k < 16; ++k) left[r][k] = a(16 * warp + lane / 4 + 8 * r, k);
    for (int column = 0; column < 4 * tiles / 2; ++column) {
      for (int k = 0; k < 16; ++k) right[k] = b(k, column / 2 * 8 + lane % 4 * 2 + column % 2);
      for (int r = 0; r < 2; ++r) {
        float& x = to[column / 2 * 4 + 2 * r + column % 2];
        if (!sum) x = 0;
        for (int k = 0; k < 16; ++k) x += left[r][k] * right[k];
      }
    }
    now->pending.erase(std::find(now->pending.begin(), now->pending.end(), to));
  });
}

}  // namespace emulator

inline void wgmma_fence() { emulator::now->fenced = true; }
inline void wgmma_commit() {
  emulator::now->products.emplace_back();
  emulator::now->fenced = false;
}
// The lanes of a warp come back together: what one of them does behind the wait, it does for all.
template <int groups, int tiles>
void wgmma_wait(float (&)[tiles][4], int line = __builtin_LINE()) {
  emulator::finish_groups(emulator::now->products, groups);
  emulator::warp_meets("wgmma_wait", line, nullptr, [](void**) {});
}

template <int tiles>
void wgmma_abt(float (&c)[tiles][4], std::uint64_t a, std::uint64_t b, bool sum, int line = __builtin_LINE()) {
  const emulator::Descriptor left(a), right(b);
  emulator::issue_product(
      "wgmma_abt", line, c, sum, [=](int row, int k) { return left.read(row, k); },
      [=](int k, int column) { return right.read(column, k); });
}
template <int tiles>
void wgmma_atb(float (&c)[tiles][4], std::uint64_t a, std::uint64_t b, bool sum, int line = __builtin_LINE()) {
  const emulator::Descriptor left(a), right(b);
  emulator::issue_product(
      "wgmma_atb", line, c, sum, [=](int row, int k) { return left.read(k, row); },
      [=](int k, int column) { return right.read(k, column); });
}
template <int tiles>
void wgmma_ab(float (&c)[tiles][4], const std::uint32_t (&a)[4], std::uint64_t b, bool sum,
              int line = __builtin_LINE()) {
  const emulator::Descriptor right(b);
  struct Registers {  // of this lane: it asks for its own two rows only, but for all 16 columns
    float x[2][16];
  };
  // A lane needs the rows g and g + 8 whole: they are spread over the four lanes of its quad.
  Registers rows{};
  const int quad = int(emulator::thread() % 32) / 4 * 4;
  for (int n = 0; n < 4; ++n)
    for (int t = 0; t < 4; ++t) {
      const std::uint32_t pair = __shfl_sync(~0u, a[n], quad + t, line);
      for (int e = 0; e < 2; ++e) rows.x[n % 2][n / 2 * 8 + 2 * t + e] = emulator::number_of(pair, e);
    }
  emulator::issue_product(
      "wgmma_ab", line, c, sum, [=](int row, int k) { return rows.x[row % 16 / 8][k]; },
      [=](int k, int column) { return right.read(k, column); });
}

template <int registers>
void more_registers() {}
template <int registers>
void fewer_registers() {}
