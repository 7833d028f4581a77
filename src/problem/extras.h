// A call's optional tensors: bias, slopes, sink, lengths, pages.
#pragma once

#include "problem/layout.h"
#include "problem/problem.h"
#include "problem/regions.h"

namespace anyflash::problem {

/// Checks bias, alibi_slopes, sink, cu_seqlens and key_lengths against the sizes in the problem and stores them there.
void read_extras(const Options& options, const Axes& axes, bool data, Problem& problem, Regions& regions);

/// Checks the page table and key lengths of a cache whose keys are (pages, page size, heads, channels). Sets the
/// problem's pages and its number of keys: those of all pages of an entry. data: whether to check the table's numbers.
void read_pages(const TensorView& page_table, const TensorView& key, bool data, Problem& problem, Regions& regions);

Bias bias_of(const TensorView& view);
HeadNumbers head_numbers(const TensorView& view);

}  // namespace anyflash::problem
