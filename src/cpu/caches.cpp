#include "cpu/caches.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace anyflash::cpu {
namespace {

/// Processors in a list such as 0-3,8.
std::int64_t listed(const std::string& list) {
  std::int64_t count = 0;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    long first = 0, last = 0;
    count += std::sscanf(part.c_str(), "%ld-%ld", &first, &last) == 2 ? last - first + 1 : 1;
  }
  return std::max<std::int64_t>(count, 1);
}

std::int64_t share_by_sysconf() {
#if defined(_SC_LEVEL2_CACHE_SIZE) && defined(_SC_LEVEL3_CACHE_SIZE)
  const auto known = [](int name) { return std::max<std::int64_t>(sysconf(name), 0); };
  const auto processors = std::max(known(_SC_NPROCESSORS_ONLN), std::int64_t{1});
  return known(_SC_LEVEL2_CACHE_SIZE) + known(_SC_LEVEL3_CACHE_SIZE) / processors;
#else
  return 0;
#endif
}

/// Linux's files come first because on some virtual machines sysconf returns the L3 size of the whole host.
std::int64_t ask() {
  for (const auto share : {cache_share_in("/sys/devices/system/cpu/cpu0/cache"), share_by_sysconf()})
    if (share > 0) return share;
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace

std::int64_t cache_share_in(const std::string& folder) {
  std::int64_t share = 0;
  for (int i = 0; i < 8; ++i) {
    const auto cache = folder + "/index" + std::to_string(i) + "/";
    int level = 0;
    std::int64_t kilobytes = 0;
    std::string users;
    std::ifstream(cache + "level") >> level;
    std::ifstream(cache + "size") >> kilobytes;
    std::ifstream(cache + "shared_cpu_list") >> users;
    if (level >= 2 && !users.empty()) share += kilobytes * 1024 / listed(users);
  }
  return share;
}

std::atomic<std::int64_t>& cache_share() {
  static std::atomic<std::int64_t> share{ask()};
  return share;
}

}  // namespace anyflash::cpu
