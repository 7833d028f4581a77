// The share of the caches that a thread can count on: read from files like Linux's, and what is sized by it.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "cpu/caches.h"

namespace {

using namespace anyflash::cpu;

constexpr std::int64_t kKilobyte = 1024, kMegabyte = kKilobyte * kKilobyte;

class Caches : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder); }

  void add(const std::string& level, const std::string& size, const std::string& users) {
    const auto cache = folder / ("index" + std::to_string(count++));
    std::filesystem::create_directories(cache);
    std::ofstream(cache / "level") << level << "\n";
    std::ofstream(cache / "size") << size << "\n";
    std::ofstream(cache / "shared_cpu_list") << users << "\n";
  }
  std::int64_t share() const { return cache_share_in(folder); }

  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "anyflash_caches";
  int count = 0;
};

TEST_F(Caches, EachIsDividedByThoseThatShareIt) {
  add("1", "48K", "0"), add("1", "32K", "0");  // the first cache does not count
  EXPECT_EQ(share(), 0);
  add("2", "2048K", "0,64");
  EXPECT_EQ(share(), kMegabyte);
  add("3", "30720K", "0-3,8");
  EXPECT_EQ(share(), 7 * kMegabyte);
}

TEST_F(Caches, ListsOfProcessors) {
  const std::pair<const char*, int> lists[] = {{"0", 1},     {"0-1", 2},        {"0,2", 2},          {"0-3,8", 5},
                                               {"8,0-3", 5}, {"0-7,64-71", 16}, {"0,2,4-6,10-11", 7}};
  for (const auto& [list, processors] : lists) {
    SCOPED_TRACE(list);
    count = 0;
    add("3", "5040K", list);
    EXPECT_EQ(share(), 5040 * kKilobyte / processors);
  }
}

TEST_F(Caches, FilesThatSayNothing) {
  EXPECT_EQ(share(), 0) << "no folder";
  add("", "1024K", "0");
  add("2", "", "0");
  add("2", "1024K", "");
  EXPECT_EQ(share(), 0);
}

TEST(CacheShare, WhatIsSizedByIt) {
  auto& share = cache_share();
  const auto usual = share.load();
  EXPECT_GT(usual, 0);
  const std::int64_t bytes = 8 * kMegabyte;
  for (const std::int64_t enough : {4 * kMegabyte, 17 * kMegabyte, INT64_MAX}) {
    share = enough;
    EXPECT_EQ(fit_to_caches(bytes), bytes) << enough;
  }
  share = kMegabyte;
  EXPECT_EQ(fit_to_caches(bytes), bytes / 4);
  share = 0;
  EXPECT_EQ(fit_to_caches(bytes), 0);
  share = usual;
}

}  // namespace
