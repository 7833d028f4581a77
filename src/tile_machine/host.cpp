#include "tile_machine/host.h"

#include <cstring>

namespace anyflash::simulator {
namespace {

template <typename Number>
void copy_channels(const Number* from, std::int64_t from_step, Number* to, std::int64_t to_step, std::int64_t count) {
  if (from_step == 1 && to_step == 1) {
    std::memcpy(to, from, count * sizeof(Number));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
}

}  // namespace

void Host::load(const Operand& operand, std::int64_t at, std::int64_t channels, char* to) const {
  if (at == nowhere) {  // beyond the keys that exist: nobody sees it
    std::memset(to, 0, channels * call_.element);
  } else if (call_.element == 2) {
    copy_channels(reinterpret_cast<const std::uint16_t*>(operand.data) + at, operand.channel,
                  reinterpret_cast<std::uint16_t*>(to), 1, channels);
  } else {
    copy_channels(reinterpret_cast<const std::uint32_t*>(operand.data) + at, operand.channel,
                  reinterpret_cast<std::uint32_t*>(to), 1, channels);
  }
}

void Host::store(const Operand& operand, std::int64_t at, std::int64_t channels, const char* from) const {
  if (call_.element == 2) {
    copy_channels(reinterpret_cast<const std::uint16_t*>(from), 1, reinterpret_cast<std::uint16_t*>(operand.data) + at,
                  operand.channel, channels);
  } else {
    copy_channels(reinterpret_cast<const std::uint32_t*>(from), 1, reinterpret_cast<std::uint32_t*>(operand.data) + at,
                  operand.channel, channels);
  }
}

}  // namespace anyflash::simulator
