#include "cuda/common/device_plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/common/device.h"
#include "cuda/common/device_masks.h"
#include "cuda/common/lasting_memory.h"
#include "cuda/common/words.h"
#include "plan/facts.h"
#include "rules/classes.h"
#include "rules/compile.h"
#include "rules/words.h"

namespace anyflash::cuda {
namespace {

using rules::CellOf, rules::Program;

/// Bytes of a tile's mask words.
std::int64_t tile_bytes(const ExecutionPlan& plan, bool of_queries) {
  return rules::volume((of_queries ? plan.query_grid : plan.key_grid).extent) * 8;
}

/// How many tiles have mask words in no table: with one word per key (0), or per query (1).
struct WordTiles {
  std::int64_t of[2] = {};
};

/// The tiles of a plan that may share tables. A kept plan keeps their words too, within a limit over all plans.
class CountedWordTiles {
 public:
  CountedWordTiles(const ExecutionPlan& plan, const WordTiles& tiles) : tiles(tiles) {
    for (int side = 0; side < 2; ++side) {
      const auto bytes = tiles.of[side] * tile_bytes(plan, side == 1);
      const bool asked = side == 0 || plan.groups[0].queries_of_key_block.start.empty();  // backward: words of keys
      if (!plan.kept || !asked || bytes > most_words) continue;
      kept[side] = (all_words += bytes) <= most_of_all;
      kept[side] ? bytes_ += bytes : all_words -= bytes;
    }
  }
  ~CountedWordTiles() { all_words -= bytes_; }
  CountedWordTiles(const CountedWordTiles&) = delete;
  CountedWordTiles& operator=(const CountedWordTiles&) = delete;

  WordTiles tiles;
  bool kept[2] = {};

 private:
  static constexpr std::int64_t most_words = 64 << 20, most_of_all = 1 << 30;  // bytes on each GPU
  static inline std::atomic<std::int64_t> all_words = 0;

  std::int64_t bytes_ = 0;
};

/// The contents of device memory as they will be there. Pointers are offsets from its beginning until that is known.
class Image {
 public:
  void reserve(std::size_t bytes) { own_.reserve(bytes); }
  std::size_t add(const void* data, std::size_t bytes) {
    const auto at = aligned(own_.size());
    own_.resize(at);
    const auto* const from = static_cast<const char*>(data);
    own_.insert(own_.end(), from, from + bytes);
    return at;
  }
  template <class T>
  std::size_t add(const std::vector<T>& numbers) {
    return add(numbers.data(), numbers.size() * sizeof(T));
  }
  /// Adds memory of the plan, which is not copied before the image is placed.
  std::size_t refer(const void* data, std::size_t bytes) {
    const auto at = plan_bytes_;
    plan_.push_back({data, at, bytes});
    plan_bytes_ = aligned(at + bytes);
    return of_plan + at;
  }
  void write(std::size_t at, const void* data, std::size_t bytes) { std::memcpy(own_.data() + at, data, bytes); }
  /// Makes the pointer at `at` point to `target`.
  void point(std::size_t at, std::size_t target) { pointers_.push_back({at, target}); }

  std::size_t size() const { return aligned(own_.size()) + plan_bytes_; }
  /// Writes the contents for device memory at `base`.
  void place(char* to, const char* base) {
    const auto own = aligned(own_.size());
    for (const auto& [at, target] : pointers_) {
      const char* const address = base + (target < of_plan ? target : own + target - of_plan);
      std::memcpy(own_.data() + at, &address, sizeof(address));
    }
    std::memcpy(to, own_.data(), own_.size());
    for (const auto& part : plan_)
      if (part.bytes > 0) std::memcpy(to + own + part.at, part.data, part.bytes);
  }

 private:
  static constexpr std::size_t of_plan = std::size_t{1} << 62;  // offsets from there on are in the plan's part

  static std::size_t aligned(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

  struct Part {
    const void* data;
    std::size_t at, bytes;
  };

  std::vector<char> own_;
  std::vector<Part> plan_;  // behind its own
  std::size_t plan_bytes_ = 0;
  std::vector<std::pair<std::size_t, std::size_t>> pointers_;
};

/// The runs of one side of a mask, tables of the mask words that tiles share, and numbers for all other tiles.
class Lists {
 public:
  explicit Lists(const ExecutionPlan& plan) : plan_(plan) {}

  /// Finds the runs of blocks of one side, `of`, for each block of the other. Where a rule depends only on coordinate
  /// differences, whole tiles with the same difference may share mask words. Those are evaluated here, once.
  template <CellOf of>
  void find(const MaskGroup& group) {
    constexpr bool keys = of == CellOf::keys;
    const auto& list = keys ? group.keys_of_query_block : group.queries_of_key_block;
    const auto &own = keys ? plan_.query_grid : plan_.key_grid, &other = keys ? plan_.key_grid : plan_.query_grid;
    const bool shared = plan_.shares_words && planning::by_difference(group.program);
    start.clear(), runs.clear(), words.clear();
    start.reserve(list.start.size()), runs.reserve(list.runs.size());
    std::map<std::array<std::int64_t, 3>, std::int32_t> known;
    for (std::size_t block = 0; block + 1 < list.start.size(); ++block) {
      start.push_back(static_cast<std::int64_t>(runs.size()));
      for (auto i = list.start[block]; i < list.start[block + 1]; ++i) {
        const auto& run = list.runs[i];
        if (run.kind == rules::TileClass::full || !shared) {
          runs.push_back(
              {run.first, run.count, run.kind, run.kind == rules::TileClass::full ? -1 : asked<of>(run.count)});
          continue;
        }
        const auto rows = own.box(static_cast<std::int32_t>(block));
        for (auto cell = run.first; cell < run.first + run.count; ++cell) {
          const auto found = words_of<of>(group.program, rows, other.box(cell), known);
          runs.push_back({cell, 1, run.kind, found < 0 ? asked<of>(1) : found});
        }
      }
    }
    start.push_back(static_cast<std::int64_t>(runs.size()));
  }

  std::vector<std::int64_t> start;
  std::vector<DeviceRun> runs;
  std::vector<rules::Word> words;
  WordTiles word_tiles;  ///< over all lists found so far

 private:
  static constexpr std::size_t most_word_tiles = 4096;

  /// The number of a tile without words in a table: ~n, where n counts the tiles of each side over all masks. The -1 on
  /// overflow is never read: so many words are never made (word_bytes).
  template <CellOf of>
  std::int32_t asked(std::int32_t tiles) {
    auto& next = word_tiles.of[of == CellOf::keys];
    const auto first = std::exchange(next, next + tiles);
    return next > std::numeric_limits<std::int32_t>::max() ? -1 : ~static_cast<std::int32_t>(first);
  }

  template <CellOf of>
  std::int32_t words_of(const Program& program, const Box& rows, const Box& cell,
                        std::map<std::array<std::int64_t, 3>, std::int32_t>& known) {
    constexpr bool keys = of == CellOf::keys;
    const auto &queries = keys ? rows : cell, &key_box = keys ? cell : rows;
    if (!rules::whole(queries, program.q_size()) || !rules::whole(key_box, program.k_size())) return -1;
    std::array<std::int64_t, 3> difference;
    for (int i = 0; i < 3; ++i)
      difference[i] = program.axis[i].query(queries.origin[i]) - program.axis[i].key(key_box.origin[i]);
    if (const auto found = known.find(difference); found != known.end()) return found->second;
    if (known.size() == most_word_tiles) return -1;
    rules::CellWords<of> cell_words(program, cell);
    const auto count = static_cast<std::int32_t>(rules::volume(rows.extent));
    for (std::int32_t row = 0; row < count; ++row) words.push_back(cell_words(rows.entry(row)));
    return known.emplace(difference, static_cast<std::int32_t>(known.size())).first->second;
  }

  const ExecutionPlan& plan_;
};

class Builder {
 public:
  explicit Builder(const ExecutionPlan& plan) : lists_(plan) {
    std::vector<DeviceGroup> groups(plan.groups.size());
    std::size_t about = 256;
    for (const auto& group : plan.groups) {
      about += sizeof(DeviceGroup) + sizeof(Program) + 256;
      for (const auto* list : {&group.keys_of_query_block, &group.queries_of_key_block})
        about += list->start.size() * sizeof(list->start[0]) + list->runs.size() * sizeof(DeviceRun);
    }
    image.reserve(about);
    groups_ = image.add(groups);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto& group = plan.groups[g];
      const auto at = groups_ + g * sizeof(DeviceGroup);
      add<CellOf::keys>(group, at + offsetof(DeviceGroup, keys_of_query_block));
      add<CellOf::queries>(group, at + offsetof(DeviceGroup, queries_of_key_block));
      image.point(at + offsetof(DeviceGroup, program), add(group.program));
    }
  }

  Image image;

 private:
  template <CellOf of>
  void add(const MaskGroup& group, std::size_t at) {
    lists_.find<of>(group);
    image.point(at + offsetof(DeviceRuns, start), image.add(lists_.start));
    image.point(at + offsetof(DeviceRuns, runs), image.add(lists_.runs));
    image.point(at + offsetof(DeviceRuns, words), image.add(lists_.words));
  }

  std::size_t add(const Program& program) {
    const auto at = image.add(&program, sizeof(program));
    if (program.has_documents) {
      add(program.documents.q, at + offsetof(Program, documents.q), rules::volume(program.q_size()));
      add(program.documents.k, at + offsetof(Program, documents.k), rules::volume(program.k_size()));
      std::int32_t documents = 0;
      for (const auto* side : {&program.documents.q, &program.documents.k})
        for (std::int32_t s = 0; s < side->segment_count; ++s)
          documents = std::max(documents, side->segments[s].document + 1);
      point(at + offsetof(Program, documents.axes), program.documents.axes, documents);
    }
    for (std::int32_t i = 0; i < program.atom_count; ++i)
      if (program.atoms[i].data)
        add_table(program, program.atoms[i], at + offsetof(Program, atoms) + i * sizeof(rules::Atom));
    return at;
  }

  void add(const rules::DocumentSide& side, std::size_t at, std::int64_t entries) {
    using Side = rules::DocumentSide;
    point(at + offsetof(Side, segment_of), side.segment_of, entries);
    point(at + offsetof(Side, document_of), side.document_of, entries);
    point(at + offsetof(Side, segments), side.segments, side.segment_count);
    const void* const none = nullptr;  // the tree serves tile classes, which kernels do not need
    image.write(at + offsetof(Side, tree), &none, sizeof(none));
  }

  /// An array that several groups may share.
  template <class T>
  void point(std::size_t at, const T* data, std::int64_t count) {
    auto [known, is_new] = arrays_.try_emplace({data, count});
    if (is_new) known->second = image.refer(data, count * sizeof(T));
    image.point(at, known->second);
  }

  /// A dense mask or a bitmap: contiguous rows and columns, with broadcast axes stored once.
  void add_table(const Program& program, const rules::Atom& atom, std::size_t at) {
    const bool blocks = atom.kind == rules::AtomKind::blocks;
    const std::int64_t block_q = blocks ? atom.a[2] : 1, block_k = blocks ? atom.b[2] : 1;
    const auto rows = atom.stride_q == 0 ? 1 : (rules::volume(program.q_size()) + block_q - 1) / block_q;
    const auto columns = atom.stride_k == 0 ? 1 : (rules::volume(program.k_size()) + block_k - 1) / block_k;
    auto [known, is_new] = tables_.try_emplace({atom.data, atom.stride_q, atom.stride_k, rows, columns});
    if (is_new) {
      std::vector<std::uint8_t> table(rows * columns);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < columns; ++c)
          table[r * columns + c] = atom.data[r * atom.stride_q + c * atom.stride_k];
      known->second = image.add(table);
    }
    rules::Atom packed = atom;
    packed.stride_q = atom.stride_q == 0 ? 0 : columns;
    packed.stride_k = atom.stride_k == 0 ? 0 : 1;
    image.write(at, &packed, sizeof(packed));
    image.point(at + offsetof(rules::Atom, data), known->second);
  }

  std::size_t groups_;
  Lists lists_;
  std::map<std::pair<const void*, std::int64_t>, std::size_t> arrays_;
  std::map<std::tuple<const void*, std::int64_t, std::int64_t, std::int64_t, std::int64_t>, std::size_t> tables_;
};

WordArgs word_args(const ExecutionPlan& plan, const DeviceGroup* groups, bool of_queries, char* words) {
  const auto& own = of_queries ? plan.query_grid : plan.key_grid;
  return {groups,        plan.query_grid,
          plan.key_grid, static_cast<std::int32_t>(own.count()),
          of_queries,    reinterpret_cast<std::uint64_t*>(words),
          nullptr,       0,
          nullptr,       {}};
}

/// For a plan that may share tables and whose masks are not found on the GPU.
const CountedWordTiles& counted_word_tiles(const ExecutionPlan& plan) {
  constexpr int host = -1;  // a key of companions that is no device's
  const auto found = plan.companions.of(host, [&] {
    Lists lists(plan);
    for (const auto& group : plan.groups) lists.find<CellOf::keys>(group), lists.find<CellOf::queries>(group);
    return std::static_pointer_cast<void>(std::make_shared<CountedWordTiles>(plan, lists.word_tiles));
  });
  return *static_cast<const CountedWordTiles*>(found.get());
}

bool keeps_words(const ExecutionPlan& plan, bool of_queries) {
  return plan.kept && !plan.masks_on_device && counted_word_tiles(plan).kept[of_queries];
}

std::int64_t word_tiles(const ExecutionPlan& plan, bool of_queries) {
  if (plan.shares_words) return counted_word_tiles(plan).tiles.of[of_queries];
  std::int64_t tiles = 0;  // all partial tiles
  for (const auto& group : plan.groups)
    for (const auto& run : (of_queries ? group.keys_of_query_block : group.queries_of_key_block).runs)
      if (run.kind != TileClass::full) tiles += run.count;
  return tiles;
}

/// The device memory of a kept plan.
class KeptMemory {
 public:
  KeptMemory(int device, Image& image) : memory_(device) {
    std::vector<char> placed(image.size());  // until the copy is there
    image_ = memory_.add(image.size(), [&](void* data, cudaStream_t stream) {
      image.place(placed.data(), static_cast<char*>(data));
      check(cudaMemcpyAsync(data, placed.data(), placed.size(), cudaMemcpyHostToDevice, stream),
            "bringing a plan to the device");
    });
  }

  void read_on(cudaStream_t stream) { memory_.read_on(stream); }

  const DeviceGroup* groups() const { return static_cast<const DeviceGroup*>(image_); }

  const std::uint64_t* words(const ExecutionPlan& plan, bool of_queries, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& words = words_[of_queries];
    if (!words) {
      words = memory_.add(bytes, [&](void* data, cudaStream_t stream) {
        ask_all_words(word_args(plan, groups(), of_queries, static_cast<char*>(data)),
                      static_cast<std::int64_t>(plan.groups.size()), stream);
      });
    }
    return static_cast<const std::uint64_t*>(words);
  }

 private:
  LastingMemory memory_;
  const void* image_ = nullptr;
  std::mutex mutex_;
  const void* words_[2] = {};
};

/// Keeps memory that a captured graph reads forever: each replay reads it, and nothing tells which replay was the last.
void keep_for_graphs(const std::shared_ptr<const void>& memory) {
  static std::mutex mutex;
  static auto& all = *new std::set<std::shared_ptr<const void>>;  // never destroyed: the process may be ending
  const std::lock_guard lock(mutex);
  all.insert(memory);
}

/// Throws Error unless a rule's tables that are declared to be on the device are there.
void check_tables(const DeviceMaskArgs& args, Device device) {
  for (const auto& lengths : args.cu_seqlens) check_pointer("rule: a table", lengths.data, device);
  for (const auto& ids : args.ids.of) check_pointer("rule: a table", ids.data, device);
  for (int i = 0; i < args.program.atom_count; ++i) check_pointer("rule: a table", args.program.atoms[i].data, device);
}

}  // namespace

DevicePlan::DevicePlan(const Problem& problem, const ExecutionPlan& plan, CallMemory& memory, cudaStream_t stream)
    : problem_(problem), plan_(plan), stream_(stream) {
  const int device = problem.device.index;
  if (plan.masks_on_device) {
    std::int64_t bytes = 0;
    check_tables(device_mask_args(problem, plan, nullptr, bytes), problem.device);
    const auto args = device_mask_args(problem, plan, memory.take(bytes), bytes);
    find_device_masks(args, stream);
    groups_ = args.groups, numbered_ = args.numbered, ragged_ = args.ragged;
    return;
  }
  if (plan.kept) {
    kept_ = plan.companions.of(device, [&] {
      Builder builder(plan);
      return std::static_pointer_cast<void>(std::make_shared<KeptMemory>(device, builder.image));
    });
    auto& kept = *static_cast<KeptMemory*>(kept_.get());
    capturing(stream) ? keep_for_graphs(kept_) : kept.read_on(stream);
    groups_ = kept.groups();
    return;
  }
  if (capturing(stream)) {
    throw Error(Error::Kind::unsupported,
                "rule: with tables, key_lengths or more than 64 MiB of plan in a captured stream, expected a plan made "
                "before the capture");
  }
  Builder builder(plan);
  char* const image = memory.take(static_cast<std::int64_t>(builder.image.size()));
  bring(
      image, builder.image.size(), [&](char* to) { builder.image.place(to, image); }, device, stream,
      "bringing a plan to the device");
  groups_ = reinterpret_cast<const DeviceGroup*>(image);
}

const std::uint64_t* DevicePlan::words(bool of_queries, char* memory, std::int32_t* too_many) {
  const auto bytes = word_bytes(problem_, plan_, of_queries);
  if (bytes == 0) return nullptr;
  if (keeps_words(plan_, of_queries)) return static_cast<KeptMemory*>(kept_.get())->words(plan_, of_queries, bytes);
  auto args = word_args(plan_, groups_, of_queries, memory);
  if (plan_.masks_on_device) {
    args.numbered = numbered_ + (of_queries ? 0 : 1), args.most_tiles = device_mask_tiles(problem_, plan_);
    args.too_many = too_many, args.ragged = ragged_;
  }
  ask_all_words(args, plan_.batch_groups * plan_.head_groups, stream_);
  return reinterpret_cast<const std::uint64_t*>(memory);
}

std::int64_t word_bytes(const Problem& problem, const ExecutionPlan& plan, bool of_queries) {
  const auto tiles = plan.masks_on_device ? device_mask_tiles(problem, plan) : word_tiles(plan, of_queries);
  return tiles * tile_bytes(plan, of_queries);
}

bool may_differ_in_batch(const Problem& problem) {
  return problem.key_lengths.given() || rules::table_axes(problem.rule).batch_axis;
}

bool words_fit(const Problem& problem, const ExecutionPlan& plan, bool of_queries, std::int64_t entry_bytes,
               bool changes_bits) {
  if (plan.masks_on_device) return true;  // some words for each block of queries or keys
  if (!changes_bits || !may_differ_in_batch(problem))
    return word_bytes(problem, plan, of_queries) / plan.batch_groups <= entry_bytes;
  const auto tiles = plan.head_groups * std::int64_t{plan.query_grid.count()} * plan.key_grid.count();
  return tiles * tile_bytes(plan, of_queries) <= entry_bytes;
}

std::int64_t word_workspace(const Problem& problem, const ExecutionPlan& plan, bool of_queries) {
  return keeps_words(plan, of_queries) ? 0 : word_bytes(problem, plan, of_queries);
}

std::size_t device_bytes(const Problem& problem, const ExecutionPlan& plan) {
  if (!plan.masks_on_device) return plan.kept ? 0 : Builder(plan).image.size();
  std::int64_t bytes = 0;
  device_mask_args(problem, plan, nullptr, bytes);
  return static_cast<std::size_t>(bytes);
}

}  // namespace anyflash::cuda
