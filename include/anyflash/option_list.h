// The options of a call by name, for front ends: what reads or writes one reads or writes all.
#pragma once

#include <anyflash/attention.h>

namespace anyflash {

/// The options that are a word, a number or a switch: visit("softcap", &Options::softcap, "cap of the scores, ..."),
/// with one line for a user.
template <typename Visit>
constexpr void for_each_scalar(Visit&& visit) {
  visit("align", &Options::align,
        "where queries and keys of unequal numbers meet: none_front, none_end, scale_front or scale_end");
  visit("layout", &Options::layout,
        "order of the axes: bhsd, bshd, bhds (2 and 3 sequence axes too), qkv (packed) or thd (variable length)");
  visit("scale", &Options::scale, "factor of the scores, 1 / sqrt(channels) if not given");
  visit("softcap", &Options::softcap, "cap of the scores, none if 0");
  visit("deterministic", &Options::deterministic, "bitwise repeatable on every device");
  visit("allow_tf32", &Options::allow_tf32,
        "float32 on a GPU: products may be of TF32 numbers or better, where that is faster");
  visit("memory_budget", &Options::memory_budget, "most bytes of workspace, such as 67108864 or 64MiB");
  visit("num_chunks_q", &Options::num_chunks_q, "chunks that the queries are computed in, a divisor of their number");
  visit("num_chunks_kv", &Options::num_chunks_kv, "chunks that the keys are computed in, a divisor of their number");
  visit("threads", &Options::threads, "threads, all if 0");
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
