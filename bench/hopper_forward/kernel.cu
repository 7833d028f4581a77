// One variant of src/cuda/hopper/attention.cuh as a shared library, which run.py builds, checks and times. Macros
// choose the variant: TYPE, HEAD_SIZE, KEYS, WARPGROUPS, STAGES, QUERY_STAGES, SCORE, BLOCKS, SECTION_MIB.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/hopper/attention.cuh"
#include "cuda/hopper/kernel.cuh"
#include "cuda/hopper/maps.h"

using namespace anyflash;
using namespace anyflash::cuda;

namespace {

using Traits = AttentionTraits<TYPE, HEAD_SIZE, KEYS, WARPGROUPS, STAGES, QUERY_STAGES, ScoreModKind::SCORE, BLOCKS>;

/// Of K and V, that thread blocks at work at a time share in the L2.
constexpr long long kSectionBytes = (SECTION_MIB ? SECTION_MIB : 32ll) << 20;

using Block = Attention<Traits>;

/// Contiguous (batch, sequence, heads, channels).
Rows rows_of(void* data, const Int3& size, int heads) {
  const long long row = (long long)heads * HEAD_SIZE, plane = row * size[2];
  return {static_cast<char*>(data), plane * size[1] * size[0], HEAD_SIZE, 1, {plane * size[1], plane, row}, true};
}

/// How many heads run at a time so that their K and V fit the L2; where tasks are short, that all thread blocks are at
/// work once, so that memory is read all the time. All sections have about as many heads, so that the
/// last one has tasks enough for all thread blocks.
int section_heads(long long heads, long long group, long long head_bytes, long long tiles, long long thread_blocks) {
  const long long wave = tiles <= 8 && SECTION_MIB == 0 ? std::max(thread_blocks / tiles, 1ll) : heads;
  const long long near = std::min({std::max(kSectionBytes / head_bytes, 1ll) * group, heads, wave});
  const long long sections = std::max(heads / near, 1ll);
  return int(((heads + sections - 1) / sections + group - 1) / group * group);
}

}  // namespace

/// As run.py has it. Pointers are to device memory.
struct Call {
  void *q, *k, *v, *out;  ///< contiguous (batch, sequence, heads, channels)
  float *lse, *sink;      ///< null: none
  int* counters;          ///< two that are 0; the second changes if a result is not finite
  const DeviceGroup* groups;
  int batch, heads, heads_kv;
  rules::Grid query_grid, key_grid;
  float scale, softcap;
};

/// 0, or 1: TMA takes no such tensor; 2: too much shared memory; 3: the launch failed.
extern "C" int attention(const Call* call, void* stream) {
  const auto &query_grid = call->query_grid, &key_grid = call->key_grid;
  AttentionArgs args{};
  args.queries = int(rules::volume(query_grid.size));
  const auto keys = rules::volume(key_grid.size);
  const rules::Grid steps{key_grid.size, {{1, 1, KEYS}}, {{1, 1, 1}}};
  const auto map = [&](RowMap& to, void* data, const rules::Grid& boxes, int heads) {
    return map_rows(to, rows_of(data, boxes.size, heads), HEAD_SIZE, boxes, heads, call->batch);
  };
  if (!map(args.q, call->q, query_grid, call->heads) || !map(args.k, call->k, steps, call->heads_kv) ||
      !map(args.v, call->v, steps, call->heads_kv))
    return 1;
  if (!map(args.out_map, call->out, query_grid, call->heads)) return 1;
  if (!map(args.k_block, call->k, key_grid, call->heads_kv) || !map(args.v_block, call->v, key_grid, call->heads_kv))
    return 1;
  const auto is_plain = [](const rules::Grid& grid) { return grid.extent[2] == 64 && grid.step[2] == 1; };
  args.query_cut = cut_of(query_grid, is_plain(query_grid)), args.key_cut = cut_of(key_grid, is_plain(key_grid));
  args.out = rows_of(call->out, query_grid.size, call->heads), args.d_v = HEAD_SIZE;
  if (call->lse)
    args.lse = {reinterpret_cast<char*>(call->lse), 2, (long long)call->heads * args.queries, args.queries, 1, 0};
  args.sink = {reinterpret_cast<char*>(call->sink), 2, 0, 1, 0, 0};
  args.stores_lse_or_pair = call->lse, args.has_sink_or_pair = call->sink;
  args.groups = call->groups, args.batch_groups = args.head_groups = 1;
  args.heads = call->heads, args.group = call->heads / call->heads_kv;
  args.tiles = (args.query_cut.blocks + WARPGROUPS - 1) / WARPGROUPS;
  args.tasks = args.tiles * args.heads * call->batch;
  args.next_task = call->counters, args.again = call->counters + 1;
  args.scale = call->scale, args.scale_log2 = call->scale * 1.4426950409f;
  args.cap = call->softcap, args.cap_inverse = call->softcap > 0 ? 1 / call->softcap : 0;
  const auto kernel = group_kernel<Block, AttentionArgs, BLOCKS>;
  const int bytes = shared_bytes<Block>();
  static const auto allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return 2;
  static const int sms = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  args.section_heads =
      section_heads((long long)args.heads * call->batch, args.group, 4 * keys * HEAD_SIZE, args.tiles, BLOCKS * sms);
  args.early = HEAD_SIZE == 128 && args.tasks >= 8 * BLOCKS * sms;
  kernel<<<std::min(args.tasks, BLOCKS * sms), Traits::kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError() == cudaSuccess ? 0 : 3;
}
