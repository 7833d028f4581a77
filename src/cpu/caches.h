// How much of the machine's caches a thread can use. It sets how much data threads keep; results do not depend on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

namespace anyflash::cpu {

/// Bytes of L2 and L3, each divided by the processors that share it, as the system reports them. It is read once, and
/// very large if unknown. Tests set it.
std::atomic<std::int64_t>& cache_share();

/// That number for a processor, from Linux's files in its cache folder; 0 if they do not tell.
std::int64_t cache_share_in(const std::string& folder);

/// `bytes`, measured to be best where a thread's share is 17 and 21 MiB; below `kEnoughCache` less in proportion. No
/// smaller share was measured.
inline std::int64_t fit_to_caches(std::int64_t bytes) {
  constexpr std::int64_t kEnoughCache = std::int64_t{4} << 20, kUnit = 1024;
  return bytes / kUnit * std::min(cache_share().load(std::memory_order_relaxed), kEnoughCache) / (kEnoughCache / kUnit);
}

}  // namespace anyflash::cpu
