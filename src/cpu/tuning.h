// What was chosen by measurement for the CPU kernels, in one table. docs/notes has the figures; how the
// registers are split is in gemm-inl.h, since it depends on the instruction set.
#pragma once

#include <cstdint>

namespace anyflash::cpu::tuning {

// The plan's choice of boxes.
constexpr int kQueryRows[] = {64, 128, 256};     // of a query block, forward; backward takes the first
constexpr std::int64_t kKeysOfFewQueries = 512;  // from here on forward too takes the first for up to 256 queries
constexpr double kTileCost = 2048.0;             // pairs that a tile costs beside its own: about 32 rows of them

// Partial tiles (spans.h).
constexpr std::int32_t kSpanRows = 8;  // queries worked on at a time
constexpr int kSpanStep = 16;          // keys: whole vectors of any instruction set
constexpr int kSpanKeys = 8;           // keys of a product that sums over queries

// Forward.
constexpr int kShiftLag = 4;  // how far what is subtracted from a row's scores may lie below their maximum before the
                              // row is scaled down; its sums are up to exp(kShiftLag) larger for it
constexpr std::int64_t kPanelBytes = std::int64_t{4} << 20;  // of packed key blocks a thread keeps at most (caches.h),
constexpr std::int64_t kPanelTimes = 8;                      // and as many as this many query blocks meet
constexpr std::int64_t kStrip = 8;                           // query blocks across a strip of the walk
constexpr std::int64_t kMostFewRows = 16;                    // queries times heads of a group that count as few
constexpr std::int64_t kPartBlocks = 16;                     // key blocks of a part of theirs
constexpr std::int64_t kMostRowsOfTask = 64;                 // of theirs in all heads of a task
constexpr std::int64_t kShortRow = 256;                      // bytes: 64 rows of K and of V fit the nearest cache
constexpr std::int64_t kRowInOrder = 128;                    // those of keys up to here in the order of memory
constexpr std::int64_t kBytesAhead = 16384;                  // of longer rows, so many are prefetched,
constexpr std::int64_t kRowsAhead = 16;                      // of rows that several heads have, so many rows

// Backward.
constexpr double kFarLse = 32;  // from here on P may be off by the rounding of lse: it is summed first
constexpr std::int64_t kKeptQueryBytes = std::int64_t{2} << 20;         // of loaded query blocks a thread keeps,
constexpr std::int64_t kKeptQueryBytesOfTiles = std::int64_t{8} << 20;  // where the tiles of AMX multiply them (both:
                                                                        // at most, see caches.h)
constexpr std::int64_t kKeyBlocksOfTiles = 4;                           // key blocks that are taken together there

// Threads.
constexpr double kProductsOfThread = 2e5;       // multiplications that pay for waking one, forward
constexpr std::int64_t kTasksOfThread = 4;      // so many at least before they take several key blocks
constexpr std::int64_t kTilesOfThread = 2;      // tiles that do, backward
constexpr std::int64_t kMostBlocksAtOnce = 16;  // query blocks that a thread takes at a time

}  // namespace anyflash::cpu::tuning
