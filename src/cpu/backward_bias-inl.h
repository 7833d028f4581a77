// The gradient of the bias: a separate pass over tiles of the bias tensor. Each tile is the sum of dS over all pairs
// that map to it (batch entries, heads, query blocks, key blocks along the axes in which the bias is broadcast). A tile
// is written once, by one thread, in a fixed order, without further memory. S, P and dP are computed again: two of the
// five products.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_BIAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_BIAS_INL_H_
#undef ANYFLASH_CPU_BACKWARD_BIAS_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_BIAS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

template <class T, class E>
class BiasTask {
 public:
  /// block_terms: null, or the same as rows, with memory for one block only. Its terms are then found again for each
  /// block.
  BiasTask(const Problem& problem, const ExecutionPlan& plan, const RowTerms<T>& rows, T* memory,
           RowTerms<T>* block_terms = nullptr)
      : problem_(problem),
        plan_(plan),
        blocks_(problem, plan, rows, memory),
        sum_(memory + LoadedBlocks<T, E>::memory_size(problem, plan)),
        block_terms_(block_terms),
        whole_queries_(problem.dbias.size[2] == 1),
        whole_keys_(problem.dbias.size[3] == 1) {}
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    return (problem.chunks.any() ? 2 : 1) * LoadedBlocks<T, E>::memory_size(problem, plan) + kTile * kTile;
  }

  /// Tiles of the bias tensor. A broadcast axis has one.
  static std::int64_t count(const Problem& problem, const ExecutionPlan& plan) {
    const auto* size = problem.dbias.size;
    const auto along_q = size[2] == 1 ? 1 : plan.query_grid.count(), along_k = size[3] == 1 ? 1 : plan.key_grid.count();
    return size[0] * size[1] * along_q * along_k;
  }

  void run(std::int64_t tile) {
    const auto along_k = whole_keys_ ? 1 : plan_.key_grid.count();
    const auto along_q = whole_queries_ ? 1 : plan_.query_grid.count();
    const auto* size = problem_.dbias.size;
    const auto key_block = static_cast<std::int32_t>(tile % along_k);
    const auto query_block = static_cast<std::int32_t>(tile / along_k % along_q);
    const auto h_at = tile / along_k / along_q % size[1], b_at = tile / along_k / along_q / size[1];
    std::fill_n(sum_, kTile * kTile, T(0));
    loaded_ = {};
    for (auto b = b_at; b < (size[0] == 1 ? problem_.batch : b_at + 1); ++b)
      for (auto h = h_at; h < (size[1] == 1 ? problem_.heads_q : h_at + 1); ++h) add_head(b, h, query_block, key_block);
    write(b_at, h_at, query_block, key_block);
  }

 private:
  struct Loaded {
    std::int64_t b = -1, g = -1;
    std::int32_t key_block = -1;
    friend bool operator==(const Loaded&, const Loaded&) = default;
  };

  static TileClass class_of(const RunList& list, std::int32_t block, std::int32_t other) {
    const auto first = list.runs.begin() + list.start[block], last = list.runs.begin() + list.start[block + 1];
    const auto behind =
        std::upper_bound(first, last, other, [](std::int32_t i, const Run& run) { return i < run.first; });
    return behind != first && other - behind[-1].first < behind[-1].count ? behind[-1].kind : TileClass::skip;
  }

  void add_head(std::int64_t b, std::int64_t h, std::int32_t query_block, std::int32_t key_block) {
    const MaskGroup& group = plan_.group(b, h);
    const auto for_each = [](const RunList& list, std::int32_t block, auto visit) {
      for (auto r = list.start[block]; r < list.start[block + 1]; ++r)
        for (std::int32_t i = 0; i < list.runs[r].count; ++i) visit(list.runs[r].first + i, list.runs[r].kind);
    };
    if (!whole_keys_ && !whole_queries_) {
      const auto kind = class_of(group.keys_of_query_block, query_block, key_block);
      if (kind != TileClass::skip) add_tile(b, h, query_block, key_block, kind);
      return;
    }
    if (!whole_keys_) {
      for_each(group.queries_of_key_block, key_block,
               [&](std::int32_t i, TileClass kind) { add_tile(b, h, i, key_block, kind); });
      return;
    }
    const auto last = whole_queries_ ? static_cast<std::int32_t>(plan_.query_grid.count()) : query_block + 1;
    for (auto i = query_block; i < last; ++i)
      for_each(group.keys_of_query_block, i, [&](std::int32_t j, TileClass kind) { add_tile(b, h, i, j, kind); });
  }

  void add_tile(std::int64_t b, std::int64_t h, std::int32_t query_block, std::int32_t key_block, TileClass kind) {
    const Loaded keys{b, h / (problem_.heads_q / problem_.heads_kv), key_block};
    if (keys != loaded_) blocks_.load_keys(b, keys.g, key_block, true);
    loaded_ = keys;
    if (block_terms_) find_terms(b, h, query_block);
    blocks_.load_queries(b, h, query_block);
    blocks_.compute(b, h, kind, true, false);
    AddRows(sum_, blocks_.ds_numbers, kTile * kTile, sum_);
  }

  void find_terms(std::int64_t b, std::int64_t h, std::int32_t query_block) {
    const auto name = block_terms_->name(b, h, query_block);
    if (std::exchange(terms_name_, name) == name) return;
    block_terms_->move_to(b, h, query_block);
    T* const memory = sum_ + kTile * kTile;
    FindRowTerms<E>(problem_, plan_, b, h, query_block, memory, *block_terms_);
    FindRests<E>(problem_, plan_, b, h, query_block, memory, *block_terms_, [] {});
  }

  /// Sums the tile over its broadcast axes and writes what lies inside the sequences.
  void write(std::int64_t b, std::int64_t h, std::int32_t query_block, std::int32_t key_block) {
    const Bias& bias = problem_.dbias;
    const auto base = b * bias.stride[0] + h * bias.stride[1];
    const auto offsets = [](const Grid& grid, std::int32_t block, std::int64_t stride, std::int64_t* to) {
      const Box box = grid.box(block);
      for (int e = 0; e < kTile; ++e) {
        const Int3 c = box.entry(e);
        to[e] = rules::inside(c, grid.size) ? rules::flat_index(c, grid.size) * stride : outside;
      }
    };
    std::int64_t query_at[kTile] = {}, key_at[kTile] = {};
    const int rows = whole_queries_ ? 1 : kTile, cols = whole_keys_ ? 1 : kTile;
    if (!whole_queries_) offsets(plan_.query_grid, query_block, bias.stride[2], query_at);
    if (!whole_keys_) offsets(plan_.key_grid, key_block, bias.stride[3], key_at);
    for (int row = 0; row < rows; ++row)
      for (int col = 0; col < cols; ++col) {
        if (query_at[row] == outside || key_at[col] == outside) continue;
        double sum = 0;  // adds sums of rows, because one long sum would round more
        for (int i = row; i < (whole_queries_ ? kTile : row + 1); ++i) {
          double of_row = 0;
          for (int j = col; j < (whole_keys_ ? kTile : col + 1); ++j) of_row += sum_[i * kTile + j];
          sum += of_row;
        }
        WriteNumber(bias.data, bias.type, base + query_at[row] + key_at[col], sum);
      }
  }

  static constexpr std::int64_t outside = std::numeric_limits<std::int64_t>::min();

  const Problem& problem_;
  const ExecutionPlan& plan_;
  LoadedBlocks<T, E> blocks_;
  T* sum_;
  RowTerms<T>* block_terms_;
  std::int64_t terms_name_ = -1;           ///< of the block whose terms are there
  const bool whole_queries_, whole_keys_;  ///< the bias has one entry along the axis: its tile covers all blocks
  Loaded loaded_;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_BIAS_INL_H_
