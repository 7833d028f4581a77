// The frame that aligns the queries and keys of one dimension, or of one document.
#pragma once

#include <anyflash/attention.h>

#include "rules/program.h"

namespace anyflash::rules {

/// The frame of q_size queries and k_size keys.
ANYFLASH_HD Axis axis_of(std::int64_t q_size, std::int64_t k_size, Align align) {
  const auto r = q_size > k_size ? q_size : k_size;
  const bool scaled = align == Align::scale_front || align == Align::scale_end;
  const auto step = [&](std::int64_t size) { return scaled && size > 0 ? static_cast<std::int32_t>(r / size) : 1; };
  const auto offset = [&](std::int64_t size, std::int32_t step) {
    return align == Align::none_end ? static_cast<std::int32_t>(r - size) : align == Align::scale_end ? step - 1 : 0;
  };
  const auto q_step = step(q_size), k_step = step(k_size);
  return {static_cast<std::int32_t>(q_size),
          static_cast<std::int32_t>(k_size),
          static_cast<std::int32_t>(r),
          q_step,
          offset(q_size, q_step),
          k_step,
          offset(k_size, k_step)};
}

}  // namespace anyflash::rules
