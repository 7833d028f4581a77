#include "cuda/hopper/decode.h"

#include "cuda/common/device.h"
#include "cuda/hopper/decode_args.h"
#include "cuda/hopper/maps.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {

bool take_bulk_decode(const Problem& problem, BulkDecodeArgs& args, DecodeKernels& kernels) {
  if (element_size(problem.type) != 2 || !has_groups(problem.device)) return false;
  const auto& pages = args.call.pages;
  const bool paged = args.call.paged;
  args.box_rows = 64;
  while (paged && pages.page_size % args.box_rows != 0) args.box_rows /= 2;
  if (args.box_rows < 16) return false;
  const auto rows = paged ? pages.page_size : static_cast<std::int32_t>(problem.keys());
  const Grid grid{{{1, 1, rows}}, {{1, 1, args.box_rows}}, {{1, 1, 1}}};
  for (int i = 0; i < 2; ++i) {
    const auto& tensor = i == 0 ? args.call.k : args.call.v;
    args.one_entry[i] = tensor.batch == 0, args.one_head[i] = tensor.head == 0;
    const std::int64_t entries = args.one_entry[i] ? 1 : paged ? pages.pages : problem.batch;
    if (!map_rows(args.maps[i], tensor, i == 0 ? problem.d_qk : problem.d_v, grid,
                  args.one_head[i] ? 1 : problem.heads_kv, entries, true))
      return false;
  }
  const auto of_type = problem.type == ElementType::float16 ? bulk_decode_kernel<ElementType::float16>
                                                            : bulk_decode_kernel<ElementType::bfloat16>;
  const auto kernel = of_type(padded_depth(problem), args.rows, args.masked);
  kernels.plain = kernel.function, kernels.rows = kernel.rows, kernels.values = padded_depth(problem);
  kernels.threads = kernel.threads, kernels.shared_bytes = kernel.bytes, kernels.in_turns = false;
  return true;
}

}  // namespace anyflash::cuda
