// Values chosen by measurement for the CPU kernels, in one table. docs/notes has the figures. gemm-inl.h has the
// register layout, since it depends on the instruction set.
#pragma once

#include <cstdint>

namespace anyflash::cpu::tuning {

// The plan's choice of boxes.
constexpr int kQueryRows[] = {64, 128, 256};     // of a query block, forward; backward takes the first
constexpr std::int64_t kKeysOfFewQueries = 512;  // from so many keys on, forward uses 64 too, for up to 256 queries
constexpr double kTileCost = 2048.0;             // overhead of a tile, in pairs: about 32 rows

// Partial tiles (spans.h).
constexpr std::int32_t kSpanRows = 8;  // queries computed at a time
constexpr int kSpanStep = 16;          // keys: a multiple of all instruction sets' vectors
constexpr int kSpanKeys = 8;           // keys of a product that sums over queries

// Forward.
constexpr int kShiftLag = 4;  // how much a row's shift may lag behind its maximum before the row is rescaled; its sums
                              // are up to exp(kShiftLag) larger for it
constexpr std::int64_t kPanelBytes = std::int64_t{4} << 20;  // most packed key blocks of a thread (caches.h),
constexpr std::int64_t kPanelTimes = 8;                      // or as many as so many query blocks visit, if less
constexpr std::int64_t kStrip = 8;                           // query blocks across a strip of the walk
constexpr std::int64_t kMostFewRows = 16;                    // few rows: at most so many queries times heads of a group
constexpr std::int64_t kPartBlocks = 16;                     // key blocks of a split-KV part
constexpr std::int64_t kMostRowsOfTask = 64;                 // most rows in all heads of a task
constexpr std::int64_t kShortRow = 256;                      // bytes: 64 such rows of K and of V fit the nearest cache
constexpr std::int64_t kRowInOrder = 128;    // bytes: shorter rows of keys are prefetched in memory order
constexpr std::int64_t kBytesAhead = 16384;  // how far ahead longer rows are prefetched
constexpr std::int64_t kRowsAhead = 16;      // the same with several heads, in rows

// Backward.
constexpr double kFarLse = 32;  // from this |lse| on its rounding matters: lse remainder
constexpr std::int64_t kKeptQueryBytes = std::int64_t{2} << 20;         // loaded query blocks that a thread keeps
constexpr std::int64_t kKeptQueryBytesOfTiles = std::int64_t{8} << 20;  // the same with AMX tiles (both: at most,
                                                                        // see caches.h)
constexpr std::int64_t kKeyBlocksOfTiles = 4;                           // key blocks that are then taken together

// Threads.
constexpr double kProductsOfThread = 2e5;       // multiplications that are worth waking a thread, forward
constexpr std::int64_t kTasksOfThread = 4;      // minimum tasks before a task takes several key blocks
constexpr std::int64_t kTilesOfThread = 2;      // tiles that are worth waking a thread, backward
constexpr std::int64_t kMostBlocksAtOnce = 16;  // query blocks that a thread takes at a time

}  // namespace anyflash::cpu::tuning
