// Results over different keys become one, as where a sequence is split over processes.
#pragma once

#include <cstdint>

#include <anyflash/attention.h>

namespace anyflash {

/// Joins results over different keys: `into` becomes the result over the keys of both, as forward would give it. Each
/// row is weighted by its share of the softmax.
///
/// Both have out (batch, heads, sequence..., channels), row_sum and row_max, as forward writes them; lse is not read.
/// into.out has part.out's type, or float32 where that has 16 bits. On a GPU the work is queued on `stream`.
/// threads: on the CPU, as in Options.
/// Throws Error; then nothing has been written.
void join(const ForwardOutputs& into, const ForwardOutputs& part, void* stream = nullptr, std::int64_t threads = 0);

}  // namespace anyflash
