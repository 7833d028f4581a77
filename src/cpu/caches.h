// How much of the machine's caches a thread can count on. What threads keep at hand is sized by it; results are not.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

namespace anyflash::cpu {

/// Bytes of the second and third cache, each divided by the processors that share it: as the system says, asked once;
/// very many if it does not say. Tests set it.
std::atomic<std::int64_t>& cache_share();

/// That number of a processor, as Linux's files in the folder of its caches say; 0 if they say nothing.
std::int64_t cache_share_in(const std::string& folder);

/// `bytes`, which were measured to be best where a thread's share is 17 and 21 MiB; below `kEnoughCache`, fewer in
/// proportion. No smaller share was measured.
inline std::int64_t fit_to_caches(std::int64_t bytes) {
  constexpr std::int64_t kEnoughCache = std::int64_t{4} << 20, kUnit = 1024;
  return bytes / kUnit * std::min(cache_share().load(std::memory_order_relaxed), kEnoughCache) / (kEnoughCache / kUnit);
}

}  // namespace anyflash::cpu
