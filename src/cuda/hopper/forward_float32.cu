#include "cuda/hopper/forward_split.cuh"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {
namespace {

template <int terms, int depth, bool general, int stages>
GroupForwardKernel kernel_of() {
  using Block = SplitForward<SplitForwardSizes<terms, depth, general, stages>>;
  return {group_kernel_of<Block, SplitForwardArgs>(), Block::kThreads, shared_bytes<Block>(), Block::Sizes::kBlocks};
}

template <int terms>
GroupForwardKernel kernel_of(int depth, bool general) {
  if (depth == 64) return general ? kernel_of<terms, 64, true, 2>() : kernel_of<terms, 64, false, 3>();
  return general ? kernel_of<terms, 128, true, 1>() : kernel_of<terms, 128, false, terms == kBf16Terms ? 1 : 2>();
}

}  // namespace

GroupForwardKernel split_forward_kernel(int depth, bool general, int bf16_terms) {
  return bf16_terms == kBf16Terms ? kernel_of<kBf16Terms>(depth, general) : kernel_of<kTf32Terms>(depth, general);
}

}  // namespace anyflash::cuda
