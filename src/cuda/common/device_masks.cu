// Masks from lengths and tables in device memory. Their values are not checked, since an error could not be reported in
// time. Instead lengths and indices are clamped, so that nothing is read out of bounds.
#include <algorithm>
#include <cstddef>

#include "cuda/common/device_masks.h"
#include "cuda/common/launches.h"
#include "rules/axis.h"
#include "rules/classes.h"

namespace anyflash::cuda {
namespace {

using rules::Box, rules::Program, rules::TileClass;

constexpr int threads = 128, warps = threads / 32;

__device__ std::int64_t within(std::int64_t x, std::int64_t least, std::int64_t most) {
  return x < least ? least : x > most ? most : x;
}

/// Called by the first kernel that finds documents. A memset would be one launch more.
__device__ void clear_counters(const DeviceMaskArgs& args) {
  if (args.numbered && blockIdx.x == 0 && threadIdx.x < 2) args.numbered[threadIdx.x] = 0;
}

/// Each entry's document, and each document's entries: one thread per entry or document.
__global__ void documents_kernel(const __grid_constant__ DeviceMaskArgs args) {
  clear_counters(args);
  const std::int64_t sizes[] = {rules::volume(args.program.q_size()), rules::volume(args.program.k_size())};
  const auto documents = static_cast<std::int32_t>(args.cu_seqlens[0].size - 1);
  const auto i = blockIdx.x * std::int64_t{threads} + threadIdx.x;
  std::int64_t lengths[2];
  for (int side = 0; side < 2; ++side) {
    const auto size = sizes[side];
    const auto begin = [&](std::int64_t d) { return within(args.cu_seqlens[side].at(d), 0, size); };
    const auto beyond = documents + side;  // entries behind the last document see nothing on the other side
    if (i < size) {
      std::int32_t first = 0, last = documents;  // the last document that begins at or before the entry
      while (first < last) {
        const auto middle = first + (last - first) / 2;
        if (begin(middle + 1) > i) last = middle;
        else first = middle + 1;
      }
      args.documents[side].segment_of[i] = first < documents ? first : beyond;
    }
    if (i > documents + 1) continue;
    const auto start = i < documents ? begin(i) : begin(documents);
    const auto end = i < documents ? within(begin(i + 1), start, size) : i == beyond ? size : start;
    args.documents[side].segments[i] = {static_cast<std::int32_t>(start), static_cast<std::int32_t>(end),
                                        static_cast<std::int32_t>(i), 0};
    lengths[side] = end - start;
  }
  if (i <= documents + 1) args.axes[i] = rules::axis_of(lengths[0], lengths[1], args.align);
}

__device__ std::int64_t id_at(const DeviceIds& ids, int side, std::int32_t row, std::int64_t entry) {
  Integers of = ids.of[side];
  of.data += row * ids.batch_stride[side];
  return of.at(entry);
}

constexpr int scanning = 1024, each = 4;

/// The sum of earlier threads' numbers in the warp and this one's.
__device__ std::int32_t sum_to_lane(std::int32_t own, int lane) {
  for (int n = 1; n < 32; n *= 2) {
    const auto more = __shfl_up_sync(0xffffffffu, own, n);
    if (lane >= n) own += more;
  }
  return own;
}

/// Segments of equal ids, and the segment of each entry. One thread block for each side of each row.
__global__ void __launch_bounds__(scanning) segments_kernel(const __grid_constant__ DeviceMaskArgs args) {
  __shared__ std::int32_t in_warp[32];
  static_assert(scanning == 32 * 32, "a warp adds up all warps' numbers");
  clear_counters(args);
  const auto& ids = args.ids;
  const auto row = static_cast<std::int32_t>(blockIdx.x) / 2, side = static_cast<int>(blockIdx.x % 2);
  if (side == 1 && ids.same) return;
  const auto entries = ids.entries[side];
  const auto& found = args.documents[side];
  auto* const segments = found.segments + std::int64_t{row} * entries;
  auto* const segment_of = found.segment_of + std::int64_t{row} * entries;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  std::int32_t before = 0;  // segments that began earlier
  for (std::int32_t chunk = 0; chunk < entries; chunk += scanning * each) {
    const auto first = chunk + static_cast<std::int32_t>(threadIdx.x) * each;
    std::uint32_t begins = 0;
    auto id = first > 0 && first < entries ? id_at(ids, side, row, first - 1) : 0;
#pragma unroll
    for (int e = 0; e < each; ++e) {
      if (first + e >= entries) continue;
      const auto next = id_at(ids, side, row, first + e);
      if (next != id || first + e == 0) begins |= 1u << e;
      id = next;
    }
    const auto until = sum_to_lane(__popc(begins), lane);
    if (lane == 31) in_warp[warp] = until;
    __syncthreads();
    const auto warps_until = sum_to_lane(in_warp[lane], lane);
    const auto earlier = __shfl_sync(0xffffffffu, warps_until, warp) - in_warp[warp];
    auto segment = before + earlier + until - __popc(begins) - 1;  // of the entry before
    for (int e = 0; e < each && first + e < entries; ++e) {
      const auto i = first + e;
      if (begins >> e & 1) {
        ++segment;
        segments[segment].start = i;
        if (segment > 0) segments[segment - 1].end = i;
      }
      segment_of[i] = segment;
    }
    before += __shfl_sync(0xffffffffu, warps_until, 31);
    __syncthreads();
  }
  if (threadIdx.x == 0) ids.counts[2 * row + side] = before, segments[before - 1].end = entries;
}

/// The n-th segment of both sides in a row; it exists if there are so many.
struct IdSegment {
  std::int32_t row, n, side, s;
  bool exists;
  rules::Segment* own;

  __device__ explicit IdSegment(const DeviceMaskArgs& args) {
    const auto& ids = args.ids;
    const auto i = blockIdx.x * std::int64_t{threads} + threadIdx.x;
    row = static_cast<std::int32_t>(i / ids.all), n = static_cast<std::int32_t>(i % ids.all);
    exists = row < ids.rows;
    if (!exists) return;
    find(args);
    exists = s < ids.counts[2 * row + side];
  }
  __device__ IdSegment(const DeviceMaskArgs& args, std::int32_t row, std::int32_t n) : row(row), n(n), exists(true) {
    find(args);
  }
  __device__ std::int64_t id(const DeviceMaskArgs& args) const { return id_at(args.ids, side, row, own->start); }

 private:
  __device__ void find(const DeviceMaskArgs& args) {
    side = n < args.ids.entries[0] ? 0 : 1;
    s = side == 0 ? n : n - args.ids.entries[0];
    own = args.documents[side].segments + std::int64_t{row} * args.ids.entries[side] + s;
  }
};

/// Finds segments of equal ids, by a hash table with open addressing that holds segments: ids may be any numbers. There
/// are more slots than segments, so each finds one, even if the ids change meanwhile.
__global__ void __launch_bounds__(threads) equal_ids_kernel(const __grid_constant__ DeviceMaskArgs args) {
  const auto& ids = args.ids;
  const IdSegment segment(args);
  if (!segment.exists) return;
  const auto id = segment.id(args);
  const auto table = std::int64_t{segment.row} * ids.slots;
  auto hash = static_cast<std::uint64_t>(id) * 0x9e3779b97f4a7c15;
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93;
  auto slot = static_cast<std::uint32_t>(hash ^ hash >> 32) & (ids.slots - 1);
  for (;; slot = (slot + 1) & (ids.slots - 1)) {
    const auto held = atomicCAS(ids.slot_segment + table + slot, 0, segment.n + 1);
    if (held == 0 || IdSegment(args, segment.row, held - 1).id(args) == id) break;
  }
  ids.slot_of[std::int64_t{segment.row} * ids.all + segment.n] = static_cast<std::int32_t>(slot);
  atomicMax(ids.closest + table + slot, ids.all - segment.n);
}

/// The number of each segment's document, and the documents' sizes.
__global__ void __launch_bounds__(threads) number_kernel(const __grid_constant__ DeviceMaskArgs args) {
  const auto& ids = args.ids;
  const IdSegment segment(args);
  if (!segment.exists) return;
  const auto all = std::int64_t{segment.row} * ids.all, table = std::int64_t{segment.row} * ids.slots;
  const auto document = ids.all - ids.closest[table + ids.slot_of[all + segment.n]];
  segment.own->document = document, segment.own->base = 0;
  atomicAdd(ids.sizes[segment.side] + all + document, segment.own->end - segment.own->start);
  if (document != segment.s) ids.apart[segment.row] = 1;
}

/// The document of each entry, and the frame of each document.
__global__ void __launch_bounds__(threads) entries_kernel(const __grid_constant__ DeviceMaskArgs args) {
  const auto& ids = args.ids;
  const IdSegment segment(args);  // and the entry, and the document, with that number
  if (segment.row >= ids.rows) return;
  const auto all = std::int64_t{segment.row} * ids.all, entries = std::int64_t{ids.entries[segment.side]};
  const auto& found = args.documents[segment.side];
  const auto* const segments = found.segments + segment.row * entries;
  const auto entry = segment.row * entries + segment.s;
  found.document_of[entry] = segments[found.segment_of[entry]].document;
  args.axes[all + segment.n] = rules::axis_of(ids.sizes[0][all + segment.n], ids.sizes[1][all + segment.n], args.align);
}

/// Sorts numbers of a thread block, one of each thread.
__device__ void sort(std::uint64_t (&keys)[scanning]) {
  const auto i = static_cast<int>(threadIdx.x);
  for (int size = 2; size <= scanning; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      const int other = i ^ step;
      if (other < i) continue;
      const auto a = keys[i], b = keys[other];
      if ((a > b) == ((i & size) == 0)) keys[i] = b, keys[other] = a;
    }
  __syncthreads();
}

/// Where each segment begins in its document. One thread block for each side of each row takes the segments in chunks,
/// the last first: a document's size less what was taken is what lies before. In a chunk they are sorted by documents.
/// The sizes are lost.
__global__ void __launch_bounds__(scanning) bases_kernel(const __grid_constant__ DeviceMaskArgs args) {
  __shared__ std::uint64_t keys[scanning];
  __shared__ std::int32_t sums[scanning], in_warp[32];
  constexpr int bits = 10;
  static_assert(scanning == 1 << bits, "a key's low bits are a place in the chunk");
  constexpr auto none = ~std::uint64_t{0};
  const auto& ids = args.ids;
  const auto row = static_cast<std::int32_t>(blockIdx.x) / 2, side = static_cast<int>(blockIdx.x % 2);
  if ((side == 1 && ids.same) || ids.apart[row] == 0) return;  // else each document is one segment
  auto* const segments = args.documents[side].segments + std::int64_t{row} * ids.entries[side];
  auto* const sizes = ids.sizes[side] + std::int64_t{row} * ids.all;
  const auto i = static_cast<int>(threadIdx.x), lane = i % 32, warp = i / 32;
  for (auto end = ids.counts[2 * row + side]; end > 0; end -= scanning) {
    keys[i] = i < end ? std::uint64_t(segments[end - 1 - i].document) << bits | std::uint64_t(i) : none;
    sort(keys);
    const auto key = keys[i], document = key >> bits;
    auto* const own = key == none ? nullptr : segments + (end - 1 - static_cast<std::int32_t>(key % scanning));
    const auto until = sum_to_lane(own ? own->end - own->start : 0, lane);
    if (lane == 31) in_warp[warp] = until;
    __syncthreads();
    const auto warps_until = sum_to_lane(in_warp[lane], lane);
    sums[i] = until + __shfl_sync(0xffffffffu, warps_until, warp) - in_warp[warp];
    const auto left = own ? sizes[document] : 0;
    __syncthreads();
    if (own) {
      int first = 0, last = i;  // the first key of this document
      while (first < last) {
        const int middle = (first + last) / 2;
        if (keys[middle] >> bits < document) first = middle + 1;
        else last = middle;
      }
      own->base = left - (sums[i] - (first > 0 ? sums[first - 1] : 0));
      if (i == scanning - 1 || keys[i + 1] >> bits != document) sizes[document] = own->base;
    }
    __syncthreads();
  }
}

/// The search trees of tile classes. One thread block for each side of each row.
__global__ void __launch_bounds__(scanning) trees_kernel(const __grid_constant__ DeviceMaskArgs args) {
  const auto& ids = args.ids;
  const auto row = static_cast<std::int32_t>(blockIdx.x) / 2, side = static_cast<int>(blockIdx.x % 2);
  if ((side == 1 && ids.same) || ids.apart[row] == 0) return;
  const auto* const segments = args.documents[side].segments + std::int64_t{row} * ids.entries[side];
  auto* const tree = ids.trees[side] + 2 * std::int64_t{row} * ids.entries[side];
  const auto count = ids.counts[2 * row + side];
  for (auto s = static_cast<std::int32_t>(threadIdx.x); s < count; s += scanning)
    tree[count + s] = {segments[s].document, segments[s].document};
  __syncthreads();
  std::int32_t level = 1;
  while (2 * level < count) level *= 2;
  for (; level > 0; level /= 2) {
    for (auto i = level + static_cast<std::int32_t>(threadIdx.x); i < 2 * level && i < count; i += scanning) {
      const auto a = tree[2 * i], b = tree[2 * i + 1];
      tree[i] = {min(a.least, b.least), max(a.largest, b.largest)};
    }
    __syncthreads();
  }
}

/// The documents of a row of ids, for a program.
__device__ rules::Documents documents_of_row(const DeviceMaskArgs& args, std::int32_t row) {
  const auto& ids = args.ids;
  const bool apart = ids.apart[row] != 0;
  const auto side_of = [&](int side) {
    const auto& found = args.documents[side];
    const auto first = std::int64_t{row} * ids.entries[side];
    return rules::DocumentSide{found.segment_of + first, (apart ? found.document_of : found.segment_of) + first,
                               found.segments + first, apart ? ids.trees[side] + 2 * first : nullptr,
                               ids.counts[2 * row + (ids.same ? 0 : side)]};
  };
  return {side_of(0), side_of(1), args.axes + std::int64_t{row} * ids.all};
}

/// The runs of a block, written by a warp. If there is not room for all, the last run also covers the gaps between the
/// others.
class Runs {
 public:
  __device__ Runs(DeviceRun* to, std::int32_t most) : to_(to), most_(most) {}

  __device__ void add(std::int32_t first, std::int32_t count, TileClass kind) {
    if (open_.count > 0 && kind == open_.kind && first == open_.first + open_.count) {
      open_.count += count;
    } else if (open_.count > 0 && written_ == most_ - 1) {
      open_.count = first + count - open_.first, open_.kind = TileClass::partial;
    } else {
      write();
      open_ = {first, count, kind, -1};
    }
  }
  /// Unused runs end the walk.
  __device__ void finish(int lane) {
    write();
    for (auto i = written_ + lane; i < most_; i += 32) store(i, {0, 0, TileClass::partial, -1});
  }
  /// Numbers partial tiles uniquely on their side, as long as there are numbers.
  __device__ void number(int lane, unsigned long long& numbered) {
    __syncwarp();
    for (std::int32_t first = 0; first < written_; first += 32) {
      const bool partial = first + lane < written_ && to_[first + lane].kind != TileClass::full;
      const auto own = partial ? to_[first + lane].count : 0;
      auto end = static_cast<unsigned long long>(own);
      for (int n = 1; n < 32; n *= 2) {
        const auto before = __shfl_up_sync(0xffffffffu, end, n);
        if (lane >= n) end += before;
      }
      unsigned long long begin = 0;
      if (lane == 31) begin = atomicAdd(&numbered, end);
      begin = __shfl_sync(0xffffffffu, begin, 31) + end - own;
      if (partial) to_[first + lane].words = begin + own <= most_numbers ? ~static_cast<std::int32_t>(begin) : -1;
    }
  }

 private:
  __device__ void write() {
    if (open_.count == 0) return;
    if (threadIdx.x % 32 == 0) store(written_, open_);
    ++written_;
    open_.count = 0;
  }
  /// Writes the padding between its members too, since a run is read as one vector.
  __device__ void store(std::int32_t i, const DeviceRun& run) {
    static_assert(sizeof(DeviceRun) == 16 && offsetof(DeviceRun, kind) == 8);
    reinterpret_cast<int4*>(to_)[i] = {run.first, run.count, static_cast<int>(run.kind), run.words};
  }

  static constexpr unsigned long long most_numbers = 0x7fffffff;

  DeviceRun* to_;
  std::int32_t most_, written_ = 0;
  DeviceRun open_{0, 0, TileClass::partial, -1};
};

/// Blocks first .. end - 1 of the other side may see a block, or be seen by it.
struct Candidates {
  std::int32_t first, end;
};

/// Where each document is one segment, documents ascend on both sides.
__device__ Candidates candidates(const Program& program, const rules::Documents& documents, const Box& own, int side,
                                 const rules::Grid& other) {
  const auto size = side == 0 ? program.q_size() : program.k_size();
  if (!rules::inside(own.origin, size)) return {0, 0};
  const Candidates all{0, static_cast<std::int32_t>(other.count())};
  if (!program.documents_required || program.dimensions != 1 || own.step[2] != 1 || other.step[2] != 1) return all;
  const auto& here = side == 0 ? documents.q : documents.k;
  const auto& there = side == 0 ? documents.k : documents.q;
  if (here.document_of != here.segment_of) return all;
  const auto first = here.segment_of[own.origin[2]], beyond = there.segment_count - 1;
  if (first > beyond) return {0, 0};
  const auto last = here.segment_of[within(std::int64_t{own.origin[2]} + own.extent[2], 0, size[2]) - 1];
  const auto begin = there.segments[first].start, end = there.segments[last < beyond ? last : beyond].end;
  return {begin / other.extent[2], (end + other.extent[2] - 1) / other.extent[2]};
}

/// The segments of a block in a row.
struct BlockSegments {
  std::int32_t begin, end;  // entries
  std::int32_t first, last;

  __device__ BlockSegments(const rules::DocumentSide& side, const Box& block, std::int32_t size)
      : begin(block.origin[2]), end(static_cast<std::int32_t>(within(begin + std::int64_t{block.extent[2]}, 0, size))) {
    first = side.segment_of[begin], last = side.segment_of[end - 1];
  }
};

/// Whether some query and some key may be of one document. Cautious where they have many segments, or where a document
/// has entries on one side alone.
__device__ bool may_meet(const rules::Documents& documents, const BlockSegments& queries, const BlockSegments& keys) {
  const auto& [q, k, axes] = documents;
  if (q.document_of == q.segment_of && k.document_of == k.segment_of)
    return queries.first <= keys.last && keys.first <= queries.last;
  const std::int64_t rows = queries.last - queries.first + 1, columns = keys.last - keys.first + 1;
  if (rows * columns > rules::most_segment_pairs) {
    const auto of_q = rules::documents_of(q, queries.first, queries.last),
               of_k = rules::documents_of(k, keys.first, keys.last);
    return of_q.least <= of_k.largest && of_k.least <= of_q.largest;
  }
  for (auto i = queries.first; i <= queries.last; ++i)
    for (auto j = keys.first; j <= keys.last; ++j)
      if (q.segments[i].document == k.segments[j].document) return true;
  return false;
}

/// The class of such a rule.
__device__ TileClass class_of_documents(const rules::Documents& documents, const BlockSegments& queries,
                                        const BlockSegments& keys, bool causal) {
  if ((causal && keys.begin >= queries.end) || !may_meet(documents, queries, keys)) return TileClass::skip;
  const bool one = queries.first == queries.last && keys.first == keys.last;
  return one && (!causal || keys.end - 1 <= queries.begin) ? TileClass::full : TileClass::partial;
}

/// The program of one mask, in shared memory, and what points to it, by a thread block.
__device__ void make_program(const DeviceMaskArgs& args, std::int32_t group, bool writes, Program& program) {
  const auto b = group / args.head_groups, h = group % args.head_groups;
  for (int i = threadIdx.x; i < int(sizeof(Program) / 8); i += threads)
    reinterpret_cast<std::uint64_t*>(&program)[i] = reinterpret_cast<const std::uint64_t*>(&args.program)[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    auto& axis = program.axis[2];
    if (args.ids.rows > 0) program.documents = documents_of_row(args, args.ids.rows > 1 ? b : 0);
    if (args.key_lengths.data)
      axis = rules::axis_of(axis.q_size, within(args.key_lengths.at(b), 0, axis.k_size), args.align);
    for (int i = 0; i < program.atom_count; ++i)
      program.atoms[i].data += b * args.batch_stride[i] + h * args.head_stride[i];
    if (writes) {
      const auto list = [&](int side) {
        return DeviceRuns{args.starts[side], args.runs[side] + std::int64_t{group} * args.blocks[side] * args.most_runs,
                          nullptr};
      };
      args.programs[group] = program;
      args.groups[group] = {args.programs + group, list(0), list(1)};
    }
    if (group == 0 && writes) args.starts[0][0] = args.starts[1][0] = 0;
  }
  __syncthreads();
}

/// One warp for each block of queries, or of keys, of one mask. The program of a ragged mask is made by one more thread
/// block, since that takes longer than a block's runs.
template <bool kRagged>
__global__ void masks_kernel(const __grid_constant__ DeviceMaskArgs args, std::int32_t chunks) {
  __shared__ Program own_program;
  const auto group = static_cast<std::int32_t>(blockIdx.x / chunks),
             chunk = static_cast<std::int32_t>(blockIdx.x % chunks);
  const bool writes = chunk == chunks - 1;
  if (!kRagged || writes) make_program(args, group, writes, own_program);
  const Program& program = kRagged ? args.program : own_program;
  const auto documents = kRagged && args.ids.rows > 0
                             ? documents_of_row(args, args.ids.rows > 1 ? group / args.head_groups : 0)
                             : program.documents;
  const int lane = static_cast<int>(threadIdx.x % 32);
  auto block = chunk * warps + static_cast<std::int32_t>(threadIdx.x / 32);
  const int side = block < args.blocks[0] ? 0 : 1;
  if (side == 1) block -= args.blocks[0];
  if (block >= args.blocks[side]) return;
  if (group == 0 && lane == 0) args.starts[side][block + 1] = std::int64_t{block + 1} * args.most_runs;

  const auto &own_grid = args.grids[side], &other_grid = args.grids[1 - side];
  const rules::Int3 sizes[] = {program.q_size(), program.k_size()};
  const Box own = own_grid.box(block);
  const bool own_whole = rules::whole(own, sizes[side]);
  Runs runs(args.runs[side] + (std::int64_t{group} * args.blocks[side] + block) * args.most_runs, args.most_runs);
  const auto others = candidates(program, documents, own, side, other_grid);
  for (auto first = others.first; first < others.end; first += 32) {
    auto kind = TileClass::skip;
    if (first + lane < others.end) {
      const Box other = other_grid.box(first + lane);
      if (rules::inside(other.origin, sizes[1 - side])) {
        if constexpr (kRagged) {
          const auto &queries = side == 0 ? own : other, &keys = side == 0 ? other : own;
          kind = class_of_documents(documents, {documents.q, queries, sizes[0][2]}, {documents.k, keys, sizes[1][2]},
                                    args.ragged.rule == RaggedMask::Rule::causal);
        } else {
          kind = side == 0 ? rules::tile_class(program, own, other) : rules::tile_class(program, other, own);
        }
        const bool other_whole = rules::whole(other, sizes[1 - side]);
        const bool keys_whole = side == 0 ? other_whole : own_whole,
                   queries_whole = side == 0 ? own_whole : other_whole;
        if (kind == TileClass::full && !(keys_whole && (queries_whole || !args.backward))) kind = TileClass::partial;
      }
    }
    const auto full = __ballot_sync(0xffffffffu, kind == TileClass::full);
    const auto any = __ballot_sync(0xffffffffu, kind != TileClass::skip);
    for (auto left = any; left != 0;) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      const bool is_full = full >> at & 1;
      const auto alike = any & (is_full ? full : ~full);
      const auto others_behind = ~(alike >> at);  // its lowest bit is where the run ends
      const int count = others_behind == 0 ? 32 : __ffs(static_cast<int>(others_behind)) - 1;
      runs.add(first + at, count, is_full ? TileClass::full : TileClass::partial);
      left &= at + count == 32 ? 0u : ~0u << (at + count);
    }
  }
  runs.finish(lane);
  if (args.numbered) runs.number(lane, args.numbered[side]);
}

}  // namespace

void find_device_masks(const DeviceMaskArgs& args, cudaStream_t stream) {
  if (args.ids.rows > 0) {
    const auto sides = std::int64_t{args.ids.rows} * 2;
    const auto blocks = (std::int64_t{args.ids.rows} * args.ids.all + threads - 1) / threads;
    check(cudaMemsetAsync(args.ids.counts, 0, args.ids.zero_bytes, stream), "clearing a table");
    launch_plainly(segments_kernel, sides, scanning, stream, args);
    launch_plainly(equal_ids_kernel, blocks, threads, stream, args);
    launch_plainly(number_kernel, blocks, threads, stream, args);
    launch_plainly(entries_kernel, blocks, threads, stream, args);
    if (args.program.rule_restarts) launch_plainly(bases_kernel, sides, scanning, stream, args);
    launch_plainly(trees_kernel, sides, scanning, stream, args);
  } else if (args.program.has_documents) {
    const std::int64_t most = std::max<std::int64_t>(
        {rules::volume(args.program.q_size()), rules::volume(args.program.k_size()), args.cu_seqlens[0].size + 1});
    launch_plainly(documents_kernel, (most + threads - 1) / threads, threads, stream, args);
  }
  if (args.numbered && !args.program.has_documents)
    check(cudaMemsetAsync(args.numbered, 0, 16, stream), "clearing counters");
  const bool ragged = args.ragged.rule != RaggedMask::Rule::none;
  const auto chunks =
      static_cast<std::int32_t>((std::int64_t{args.blocks[0]} + args.blocks[1] + warps - 1) / warps) + ragged;
  const auto tasks = std::int64_t{args.batch_groups} * args.head_groups * chunks;
  if (tasks > 0x7fffffff) throw Error(Error::Kind::unsupported, "query: more than 2^31 blocks of masks on cuda");
  launch_plainly(ragged ? masks_kernel<true> : masks_kernel<false>, tasks, threads, stream, args, chunks);
}

}  // namespace anyflash::cuda
