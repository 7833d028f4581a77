// The options of a call by name, for front ends: what reads or writes one reads or writes all.
#pragma once

#include <anyflash/attention.h>

namespace anyflash {

/// The options that are a word, a number or a switch: visit("softcap", &Options::softcap) and so on. All front ends read
/// them by this list.
template <typename Visit>
constexpr void for_each_scalar(Visit&& visit) {
  visit("align", &Options::align);
  visit("layout", &Options::layout);
  visit("scale", &Options::scale);
  visit("softcap", &Options::softcap);
  visit("deterministic", &Options::deterministic);
  visit("allow_tf32", &Options::allow_tf32);
  visit("threads", &Options::threads);
}

/// The options that are tensors, but for the workspace: visit(name, member, whether it holds integers).
template <typename Visit>
constexpr void for_each_tensor(Visit&& visit) {
  visit("bias", &Options::bias, false);
  visit("alibi_slopes", &Options::alibi_slopes, false);
  visit("sink", &Options::sink, false);
  visit("cu_seqlens_q", &Options::cu_seqlens_q, true);
  visit("cu_seqlens_k", &Options::cu_seqlens_k, true);
  visit("key_lengths", &Options::key_lengths, true);
  visit("page_table", &Options::page_table, true);
}

}  // namespace anyflash
