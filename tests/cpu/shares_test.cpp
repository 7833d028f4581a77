// Work handed out in groups: all of it once, in order, and none of a thread's next group before its last is done.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cpu/shares.h"

namespace anyflash::cpu {
namespace {

struct Memory {
  explicit Memory(std::int64_t groups, int threads) {
    Parts counted(nullptr);
    const Shares shares(groups, 1, threads, counted);
    bytes.resize(static_cast<std::size_t>(counted.bytes() + HWY_ALIGNMENT));
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    start = bytes.data() + (HWY_ALIGNMENT - address % HWY_ALIGNMENT);
  }
  std::vector<char> bytes;
  char* start;
};

TEST(Shares, OneThreadTakesGroupAfterGroup) {
  Memory memory(3, 1);
  Parts parts(memory.start);
  Shares shares(3, 5, 1, parts);
  Shares::Share share;
  for (std::int64_t group = 0; group < 3; ++group)
    for (std::int64_t first = 0; first < 5; first += 2) {
      ASSERT_TRUE(shares.next(0, 2, share));
      EXPECT_EQ(share.group, group);
      EXPECT_EQ(share.first, first);
      EXPECT_EQ(share.count, std::min<std::int64_t>(2, 5 - first));
      EXPECT_EQ(share.owner, 0);
    }
  EXPECT_FALSE(shares.next(0, 2, share));
  EXPECT_FALSE(shares.next(0, 2, share));
}

TEST(Shares, WhoIsDoneHelpsWhereMostIsLeft) {
  Memory memory(3, 3);
  Parts parts(memory.start);
  Shares shares(3, 4, 3, parts);
  Shares::Share share[3];
  for (int thread = 0; thread < 3; ++thread) ASSERT_TRUE(shares.next(thread, 1, share[thread]));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(shares.next(1, 1, share[1]));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(shares.next(0, 1, share[0]));
  ASSERT_TRUE(shares.next(0, 1, share[0]));  // of 4 parts each, 0, 1 and 3 are left
  EXPECT_EQ(share[0].group, 2);
  EXPECT_EQ(share[0].first, 1);
  EXPECT_EQ(share[0].owner, 2);
}

TEST(Shares, NoGroups) {
  Memory memory(0, 2);
  Parts parts(memory.start);
  Shares shares(0, 4, 2, parts);
  Shares::Share share;
  EXPECT_FALSE(shares.next(0, 1, share));
}

TEST(Shares, ManyThreadsTakeEveryPartOnce) {
  constexpr int kThreads = 8, kGroups = 11, kParts = 37;
  for (int round = 0; round < 50; ++round) {
    Memory memory(kGroups, kThreads);
    Parts parts(memory.start);
    Shares shares(kGroups, kParts, kThreads, parts);
    std::vector<std::atomic<int>> taken(kGroups * kParts), done(kGroups);
    std::atomic<int> early{0};
    std::vector<std::thread> pool;
    for (int thread = 0; thread < kThreads; ++thread)
      pool.emplace_back([&, thread] {
        std::int64_t own = -1;
        for (Shares::Share share; shares.next(thread, 2, share);) {
          if (share.owner == thread && share.group != own) {
            if (own >= 0 && done[own] != kParts) ++early;
            own = share.group;
          }
          for (auto i = share.first; i < share.first + share.count; ++i) ++taken[share.group * kParts + i];
          done[share.group] += static_cast<int>(share.count);
        }
      });
    for (auto& thread : pool) thread.join();
    for (const auto& times : taken) ASSERT_EQ(times, 1);
    ASSERT_EQ(early, 0);
  }
}

}  // namespace
}  // namespace anyflash::cpu
