// Runs by bisection, dimension by dimension, so that they come out in ascending order and need no sorting.
#include "plan/runs.h"

#include <algorithm>

#include "plan/facts.h"
#include "rules/classes.h"
#include "rules/words.h"

namespace anyflash::planning {

RunFinder::RunFinder(const rules::Program& program, const Grid& query_grid, const Grid& key_grid, Int3 k_size,
                     bool pad_queries)
    : program_(program), query_grid_(query_grid), key_grid_(key_grid), k_size_(k_size), pad_queries_(pad_queries) {
  std::int64_t inner = 1;
  for (int i = 2; i >= 0; --i) {
    chunks_[i] = key_grid.chunks(i);
    inner_blocks_[i] = inner;
    inner *= key_grid.blocks(i);
    inner_ragged_[i] = inner_ragged_[i + 1];
    // Residue classes differ in length by one entry at most: the last one decides.
    inner_ragged_[i] |= rules::class_length(k_size[i], key_grid.step[i] - 1, key_grid.step[i]) <
                        std::int64_t(chunks_[i]) * key_grid.extent[i];
  }
  const auto& bits = program.atoms[0];
  bitmap_ = program.conjunction && program.atom_count == 1 && bits.kind == rules::AtomKind::blocks &&
            program.dimensions == 1 && !program.has_documents && query_grid.step[2] == 1 && key_grid.step[2] == 1 &&
            bits.a[2] % query_grid.extent[2] == 0 && bits.b[2] % key_grid.extent[2] == 0;
  const auto& [q, k, axes] = program.documents;
  const bool same = q.segment_of == k.segment_of;
  by_documents_ = program.conjunction && program.dimensions == 1 && program.has_documents &&
                  program.documents_required && !program.pieces && query_grid.step[2] == 1 && key_grid.step[2] == 1;
  for (std::int32_t i = 0; i < program.atom_count; ++i) {
    const auto& atom = program.atoms[i];
    causal_ |= atom.kind == rules::AtomKind::causal;
    by_documents_ &= !atom.negated && (atom.kind == rules::AtomKind::documents || atom.kind == rules::AtomKind::causal);
  }
  by_documents_ &= !causal_ || same;
  if (program.has_documents && (q.tree != nullptr || k.tree != nullptr || (by_documents_ && !same)))
    documents_ = std::make_shared<DocumentBlocks>(program, key_grid);
  for (int i = 0; i < 3; ++i) {
    const auto& own = program.axis[i];
    const auto step = key_grid.step[i];
    const bool alike = step > 1 && query_grid.step[i] == step && own.q_step == 1 && own.k_step == 1;
    strided_[i] = alike && program.conjunction && !program.has_documents &&
                  std::any_of(program.atoms, program.atoms + program.atom_count, [&](const auto& atom) {
                    return atom.kind == rules::AtomKind::local && !atom.negated && atom.b[i] % step == 0;
                  });
  }
  const auto& axis = program.axis[2];
  const auto query_stride = std::int64_t(query_grid.extent[2]) * axis.q_step;
  const auto key_stride = std::int64_t(key_grid.extent[2]) * axis.k_step;
  const bool steps = query_grid.step[2] > 1 || key_grid.step[2] > 1;
  if (!steps && by_difference(program) && key_stride > 0 && query_stride % key_stride == 0) {
    shift_ = std::int32_t(std::min<std::int64_t>(query_stride / key_stride, chunks_[2]));
  }
}

void RunFinder::whole_dimension(int i) {
  keys_.origin[i] = 0;
  keys_.extent[i] = k_size_[i];
  keys_.step[i] = 1;
}

/// The class of keys_, which these blocks cover. Questions come in ascending order of their first blocks.
TileClass RunFinder::ask(std::int64_t first_block, std::int64_t end_block) {
  ++questions_;
  if (!documents_) return rules::tile_class(program_, queries_, keys_);
  while (next_meeting_ < meeting_.size() && meeting_[next_meeting_].end <= first_block) ++next_meeting_;
  const bool meet = next_meeting_ < meeting_.size() && meeting_[next_meeting_].first < end_block;
  return rules::tile_class(program_, queries_, keys_, meet);
}

void RunFinder::find(std::int32_t query_block, std::vector<Run>& runs) {
  query_block_ = query_grid_.box(query_block);
  if (rules::volume(k_size_) == 0 || !rules::inside(query_block_.origin, query_grid_.size)) return;
  queries_ = query_block_;
  query_ragged_ = clip(queries_, query_grid_.size);
  runs_ = &runs;
  first_run_ = runs.size();
  if (bitmap_) return read_bitmap();
  if (by_documents_) return documents_ ? read_documents() : read_documents_in_order();
  for (int i = 0; i < 3; ++i) whole_dimension(i);
  if (documents_) documents_->meeting(queries_, meeting_);
  next_meeting_ = 0;
  const bool next = last_block_ + 1 == query_block && query_block % query_grid_.chunks(2) != 0 && !query_ragged_;
  if (shift_ == 0 || !next || !move_along()) {
    expect();
    split_dimension(0, TileClass::partial);
  }
  std::swap(before_last_, last_);
  last_.assign(runs.begin() + std::ptrdiff_t(first_run_), runs.end());
  last_block_ = query_block;
}

/// A tile is as its bit: no question is asked of the rule. Tiles with padding are partial.
void RunFinder::read_bitmap() {
  const auto& bits = program_.atoms[0];
  const std::int64_t extent = key_grid_.extent[2], each = bits.b[2] / extent, keys = k_size_[2];
  const auto* const row = bits.data + query_block_.origin[2] / bits.a[2] * bits.stride_q;
  const bool padded = pad_queries_ && query_ragged_;
  const auto whole = keys / extent, end = (keys + extent - 1) / extent;
  for (std::int64_t block = 0; block < end; ++block) {
    if ((row[block / each * bits.stride_k] != 0) == bits.negated) continue;
    append(block, 1, padded || block >= whole ? TileClass::partial : TileClass::full);
  }
}

/// Documents that follow one another: the key blocks from the first one's beginning to the last one's end, with causal
/// to the diagonal. Full are those that lie whole in the only document, with causal before the diagonal.
void RunFinder::read_documents_in_order() {
  const auto& side = program_.documents.q;
  const std::int64_t extent = key_grid_.extent[2], origin = queries_.origin[2], end = origin + queries_.extent[2];
  const auto &first = side.segments[side.segment_of[origin]], &last = side.segments[side.segment_of[end - 1]];
  const std::int64_t seen = causal_ ? end : last.end, whole = causal_ ? origin : last.end;
  const bool one = &first == &last && !(pad_queries_ && query_ragged_);
  const auto begin = first.start / extent, stop = (seen + extent - 1) / extent;
  const auto full = one ? std::min((first.start + extent - 1) / extent, stop) : stop;
  const auto rest = std::max(full, std::min(whole / extent, stop));
  append(begin, full - begin, TileClass::partial);
  append(full, rest - full, TileClass::full);
  append(rest, stop - rest, TileClass::partial);
}

/// Documents in any order: the key blocks that hold one of the queries', with causal up to the diagonal. Where both
/// sides have the same documents, positions in each ascend with the place in memory: causal is the order of places.
void RunFinder::read_documents() {
  const auto& [q, k, axes] = program_.documents;
  const std::int64_t extent = key_grid_.extent[2], origin = queries_.origin[2], end = origin + queries_.extent[2];
  const auto seen = causal_ ? (end + extent - 1) / extent : key_grid_.count();
  const auto whole = (causal_ ? origin : k_size_[2]) / extent;
  const auto own = q.segments[q.segment_of[origin]];
  const bool one = own.end >= end && !(pad_queries_ && query_ragged_);
  documents_->meeting(queries_, meeting_);
  for (const auto& range : meeting_) {
    const auto stop = std::min(range.end, seen);
    for (auto block = range.first; block < stop;) {
      if (!one) {
        append(block, stop - block, TileClass::partial);
        break;
      }
      const auto& segment = k.segments[k.segment_of[block * extent]];
      const auto full = segment.document == own.document ? std::min({segment.end / extent, whole, stop}) : block;
      append(block, full - block, TileClass::full);
      if (full <= block) append(block, 1, TileClass::partial);
      block = std::max(full, block + 1);
    }
  }
}

/// Appends the runs of the query block before, moved by `shift_` key blocks. Returns false, with nothing appended, if
/// these might not be all or not the same. That is the case if a run wraps around the end. It is also the case if key
/// blocks that come in at the front of the last dimension, or one with padding at its end, are not hidden.
bool RunFinder::move_along() {
  const auto row = chunks_[2], extent = key_grid_.extent[2], whole = k_size_[2] / extent;
  const auto moved = std::min(shift_, whole);
  const auto hidden = [&](std::int32_t from, std::int32_t to) {
    if (from == to) return true;
    keys_.origin[2] = from;
    keys_.extent[2] = to - from;
    const bool skip = ask(0, key_grid_.count()) == TileClass::skip;
    whole_dimension(2);
    return skip;
  };
  if (!hidden(0, moved * extent) || !hidden(whole * extent, k_size_[2])) return false;
  for (const auto& run : last_) {
    if (run.first % row + run.count > row) return false;
  }
  for (const auto& run : last_) {
    const auto count = std::min(run.count, whole - moved - run.first % row);
    if (count > 0) append(run.first + moved, count, run.kind);
  }
  return true;
}

/// From one query block to the next most edges move by as much as the time before.
void RunFinder::expect() {
  expected_.clear();
  const bool alike = last_.size() == before_last_.size();
  for (std::size_t i = 0; i < last_.size(); ++i) {
    const Run now = last_[i], before = alike ? before_last_[i] : now;
    expected_.push_back(2 * std::int64_t(now.first) - before.first);
    expected_.push_back(2 * (std::int64_t(now.first) + now.count) - (std::int64_t(before.first) + before.count));
  }
  std::sort(expected_.begin(), expected_.end());
}

/// Where to split a range of `chunks`, each of which is `inner` blocks: 1 .. chunks - 1, at the expected edge nearest
/// to its middle; 0 if none is expected there.
std::int32_t RunFinder::split_point(std::int64_t block, std::int64_t inner, std::int32_t chunks) const {
  const auto end = block + chunks * inner, middle = block + chunks / 2 * inner;
  const auto behind = std::lower_bound(expected_.begin(), expected_.end(), middle);
  auto edge = behind != expected_.end() && *behind < end ? *behind : block;
  if (behind != expected_.begin() && (edge == block || middle - behind[-1] < edge - middle)) edge = behind[-1];
  if (edge <= block || chunks == 1) return 0;
  return std::max(1, std::int32_t((edge - block) / inner));
}

/// Dimensions before i are narrowed to one block, those from i on are whole; the class of that box is known.
void RunFinder::split_dimension(int i, TileClass known) {
  if (i == 3) return key_block(known);
  const auto step = key_grid_.step[i];
  const auto only = strided_[i] ? residue_of_keys(i) : -1;
  for (auto residue = std::max(only, 0); residue < (only < 0 ? step : only + 1); ++residue) {
    split_range(i, residue, 0, chunks_[i], known, i > 0 && step == 1);
  }
  whole_dimension(i);
}

/// The residue class of the keys that a strided rule may show to the query block.
std::int32_t RunFinder::residue_of_keys(int i) const {
  const auto& axis = program_.axis[i];
  const auto apart = std::int64_t(query_block_.origin[i]) + axis.q_offset - axis.k_offset,
             step = std::int64_t{key_grid_.step[i]};
  return std::int32_t((apart % step + step) % step);
}

/// Chunks first .. last - 1 of a residue class of dimension i. `known` is the class of a box around them, of exactly
/// this box if `asked`; full and skip hold for every part.
void RunFinder::split_range(int i, std::int32_t residue, std::int32_t first, std::int32_t last, TileClass known,
                            bool asked) {
  const auto step = key_grid_.step[i], extent = key_grid_.extent[i];
  const auto length = rules::class_length(k_size_[i], residue, step);
  if (std::int64_t(first) * extent >= length) return;
  const bool ragged = std::int64_t(last) * extent > length;
  keys_.origin[i] = residue + first * extent * step;
  keys_.extent[i] = (ragged ? length : last * extent) - first * extent;
  keys_.step[i] = step;
  auto block = (std::int64_t(residue) * chunks_[i] + first) * inner_blocks_[i];
  for (int j = 0; j < i; ++j) block += index_[j] * inner_blocks_[j];
  const auto count = (last - first) * inner_blocks_[i];
  const auto split = known == TileClass::partial ? split_point(block, inner_blocks_[i], last - first) : 0;
  if (known == TileClass::partial && !asked && split == 0) known = ask(block, block + count);
  if (known == TileClass::skip) return;
  const bool padded = ragged || key_ragged_ || inner_ragged_[i + 1] || (pad_queries_ && query_ragged_);
  if (known == TileClass::full && !padded) return append(block, count, TileClass::full);
  if (last - first > 1) {
    const auto middle = first + (split > 0 ? split : (last - first) / 2);
    split_range(i, residue, first, middle, known, false);
    split_range(i, residue, middle, last, known, false);
    return;
  }
  index_[i] = residue * chunks_[i] + first;
  const bool outer_ragged = key_ragged_;
  key_ragged_ |= ragged;
  split_dimension(i + 1, known);
  key_ragged_ = outer_ragged;
}

void RunFinder::key_block(TileClass known) {
  const bool ragged = key_ragged_ || (pad_queries_ && query_ragged_);
  const auto kind = known == TileClass::full ? (ragged ? TileClass::partial : known) : ask_words(ragged);
  if (kind == TileClass::skip) return;
  std::int64_t block = 0;
  for (int i = 0; i < 3; ++i) block += index_[i] * inner_blocks_[i];
  append(block, 1, kind);
}

/// The exact class of a single tile that the rule called partial. Most are, and their first words show it. A tile that
/// is really empty or full (a combination of rules, a dense mask) is worth the few hundred words that it takes to know.
TileClass RunFinder::ask_words(bool ragged) const {
  Box block{keys_.origin, key_grid_.extent, key_grid_.step};
  const auto cells = cells_of(block);
  bool any = false, all = !ragged;
  const auto rows = std::int32_t(rules::volume(queries_.extent));
  for (std::int32_t n = 0; n < rows; ++n) {
    // From both ends: where the edge of a visible area crosses a tile, its first and its last row differ.
    const auto query = queries_.entry(n % 2 == 0 ? n / 2 : rows - 1 - n / 2);
    for (int c = 0; c < cells; ++c) {
      const auto cell = cell_of(block, c);
      const auto word = rules::inside(cell.origin, k_size_) ? rules::word(program_, query, cell) : 0;
      any |= word != 0;
      all &= word == ~std::uint64_t{0};
      if (any && !all) return TileClass::partial;
    }
  }
  return any ? TileClass::full : TileClass::skip;
}

void RunFinder::append(std::int64_t first, std::int64_t count, TileClass kind) {
  if (count <= 0) return;
  auto& runs = *runs_;
  if (runs.size() > first_run_) {
    auto& last = runs.back();
    if (last.kind == kind && last.first + std::int64_t(last.count) == first) {
      last.count += std::int32_t(count);
      return;
    }
  }
  runs.push_back({std::int32_t(first), std::int32_t(count), kind});
}

// A key block's run of query blocks ends where the next query block's runs treat it differently. So two neighbouring
// lists are walked side by side, and only key blocks at which they differ cost time.
RunList transpose(const RunList& forward, std::int64_t key_blocks) {
  struct Open {
    std::int32_t first;
    TileClass kind;  // skip: none open
  };
  struct Closed {
    std::int32_t key_block;
    Run run;
  };
  std::vector<Open> open(key_blocks, {0, TileClass::skip});
  std::vector<Closed> closed;
  RunList result;
  result.start.assign(key_blocks + 1, 0);
  const auto query_blocks = std::int64_t(forward.start.size()) - 1;

  const auto change = [&](std::int64_t from, std::int64_t to, std::int32_t query_block, TileClass kind) {
    for (auto k = from; k < to; ++k) {
      auto& run = open[k];
      if (run.kind != TileClass::skip) {
        closed.push_back({std::int32_t(k), {run.first, query_block - run.first, run.kind}});
        ++result.start[k + 1];
      }
      run = {query_block, kind};
    }
  };
  const Run* old_at = nullptr;
  const Run* old_end = nullptr;
  for (std::int64_t q = 0; q <= query_blocks; ++q) {
    const Run* now_at = q < query_blocks ? forward.runs.data() + forward.start[q] : nullptr;
    const Run* now_end = q < query_blocks ? forward.runs.data() + forward.start[q + 1] : nullptr;
    const auto* next_at = now_at;
    // Kinds of both lists from `at` on are constant up to the nearest start or end of a run.
    for (std::int64_t at = 0; at < key_blocks;) {
      auto until = key_blocks;
      const auto kind_here = [&](const Run*& run, const Run* end) {
        while (run != end && run->first + std::int64_t(run->count) <= at) ++run;
        if (run == end) return TileClass::skip;
        if (run->first > at) {
          until = std::min<std::int64_t>(until, run->first);
          return TileClass::skip;
        }
        until = std::min<std::int64_t>(until, run->first + std::int64_t(run->count));
        return run->kind;
      };
      const auto before = kind_here(old_at, old_end);
      const auto now = kind_here(now_at, now_end);
      if (before != now) change(at, until, std::int32_t(q), now);
      at = until;
    }
    old_at = next_at;
    old_end = now_end;
  }

  for (std::int64_t k = 0; k < key_blocks; ++k) result.start[k + 1] += result.start[k];
  result.runs.resize(closed.size());
  auto place = result.start;
  for (const auto& [key_block, run] : closed) result.runs[place[key_block]++] = run;
  return result;
}

std::int64_t visited_by_any(const RunList& list, std::int64_t first, std::int64_t count) {
  const Run *next[3] = {}, *end[3] = {};
  for (std::int64_t n = 0; n < count && first + n + 1 < static_cast<std::int64_t>(list.start.size()); ++n)
    next[n] = list.runs.data() + list.start[first + n], end[n] = list.runs.data() + list.start[first + n + 1];
  std::int64_t visited = 0, counted = 0;  // counted: all key blocks before it
  for (;;) {
    int least = -1;
    for (int n = 0; n < 3; ++n)
      if (next[n] != end[n] && (least < 0 || next[n]->first < next[least]->first)) least = n;
    if (least < 0) return visited;
    const std::int64_t from = std::max<std::int64_t>(next[least]->first, counted);
    const std::int64_t to = next[least]->first + next[least]->count;
    if (to > from) visited += to - from, counted = to;
    ++next[least];
  }
}

}  // namespace anyflash::planning
