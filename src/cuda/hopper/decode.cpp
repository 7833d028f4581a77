#include "cuda/hopper/decode.h"

#include "cuda/common/device.h"
#include "cuda/hopper/decode_args.h"
#include "cuda/hopper/maps.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {

namespace {

/// Keys of a box: no more than a page has.
std::int32_t box_rows_of(const Problem& problem) {
  std::int32_t rows = 64;
  while (problem.pages.page_size % rows != 0) rows /= 2;
  return rows;
}

}  // namespace

bool bulk_decode_serves(const Problem& problem) {
  return element_size(problem.type) == 2 && has_groups(problem.device) && !is_general(problem) &&
         problem.dimensions == 1 && problem.d_qk % 8 == 0 && problem.d_v % 8 == 0 && box_rows_of(problem) >= 16;
}

bool map_bulk_decode(const Problem& problem, BulkDecodeArgs& args) {
  const bool paged = problem.pages.page_size > 0;
  args.box_rows = box_rows_of(problem);
  const auto rows = static_cast<std::int32_t>(paged ? problem.pages.page_size : problem.keys());
  const Grid grid{{{1, 1, rows}}, {{1, 1, args.box_rows}}, {{1, 1, 1}}};
  for (int i = 0; i < 2; ++i) {
    const auto tensor = rows_of(problem, i == 0 ? problem.k : problem.v);
    args.one_entry[i] = tensor.batch == 0, args.one_head[i] = tensor.head == 0;
    const std::int64_t entries = args.one_entry[i] ? 1 : paged ? problem.pages.pages : problem.batch;
    if (!map_rows(args.maps[i], tensor, i == 0 ? problem.d_qk : problem.d_v, grid,
                  args.one_head[i] ? 1 : problem.heads_kv, entries, true))
      return false;
  }
  return rows_of(problem, problem.q).vectors;
}

bool take_bulk_decode(const Problem& problem, BulkDecodeArgs& args, DecodeKernels& kernels, bool alone) {
  if (!bulk_decode_serves(problem) || !map_bulk_decode(problem, args)) return false;
  const auto of_type = problem.type == ElementType::float16 ? bulk_decode_kernel<ElementType::float16>
                                                            : bulk_decode_kernel<ElementType::bfloat16>;
  const auto kernel = of_type(padded_depth(problem), args.rows, args.masked, alone);
  kernels.plain = kernel.function, kernels.rows = kernel.rows, kernels.values = padded_depth(problem);
  kernels.threads = kernel.threads, kernels.shared_bytes = kernel.bytes, kernels.in_turns = false;
  return true;
}

}  // namespace anyflash::cuda
