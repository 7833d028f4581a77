#include "plan/document_blocks.h"

#include <algorithm>
#include <bit>

#include "rules/classes.h"

namespace anyflash::planning {
namespace {

/// Calls f(document) for the entries of a box that exist, once for each segment of a row of it.
template <typename F>
void each_document(const rules::DocumentSide& side, const Box& box, Int3 size, const F& f) {
  rules::each_row(box, size, [&](std::int64_t first, std::int64_t step, std::int64_t count) {
    const auto end = first + (count - 1) * step + 1;
    for (auto entry = first; entry < end;) {
      const auto& segment = side.segments[side.segment_of[entry]];
      f(segment.document);
      entry += (segment.end - entry + step - 1) / step * step;
    }
    return true;
  });
}

}  // namespace

DocumentBlocks::DocumentBlocks(const rules::Program& program, const Grid& key_grid)
    : queries_(program.documents.q), q_size_(program.q_size()), row_words_((key_grid.count() + 63) / 64) {
  constexpr std::int64_t most_row_words = 1 << 19;  // 4 MiB
  const auto& keys = program.documents.k;
  const auto size = program.k_size();
  for (std::int32_t s = 0; s < keys.segment_count; ++s)
    documents_ = std::max(documents_, std::int64_t{keys.segments[s].document} + 1);
  if (documents_ * row_words_ <= most_row_words) {
    rows_.resize(documents_ * row_words_);
  } else {
    chains_.resize(documents_);
  }
  for (std::int64_t block = 0; block < key_grid.count(); ++block) {
    auto box = key_grid.box(std::int32_t(block));
    if (!rules::inside(box.origin, size)) continue;
    clip(box, size);
    each_document(keys, box, size, [&](std::int32_t document) { add(document, block); });
  }
}

void DocumentBlocks::add(std::int32_t document, std::int64_t block) {
  if (chains_.empty()) {
    rows_[document * row_words_ + block / 64] |= Word{1} << block % 64;
    return;
  }
  auto& chain = chains_[document];
  if (chain.last >= 0 && links_[chain.last].blocks.end >= block) {
    links_[chain.last].blocks.end = block + 1;
    return;
  }
  const auto link = std::int32_t(links_.size());
  links_.push_back({{block, block + 1}, -1});
  (chain.last < 0 ? chain.first : links_[chain.last].next) = link;
  chain.last = link;
}

/// Adds a document's key blocks to a set.
void DocumentBlocks::mark(std::int32_t document, std::vector<Word>& blocks) const {
  if (document >= documents_) return;  // it has no keys
  if (chains_.empty()) {
    const auto* const row = rows_.data() + document * row_words_;
    for (std::int64_t i = 0; i < row_words_; ++i) blocks[i] |= row[i];
    return;
  }
  for (auto link = chains_[document].first; link >= 0; link = links_[link].next) {
    const auto& range = links_[link].blocks;
    for (auto block = range.first; block < range.end; ++block) blocks[block / 64] |= Word{1} << block % 64;
  }
}

void DocumentBlocks::meeting(const Box& queries, std::vector<BlockRange>& found) const {
  std::vector<Word> blocks(row_words_);
  each_document(queries_, queries, q_size_, [&](std::int32_t document) { mark(document, blocks); });
  found.clear();
  for (std::int64_t i = 0; i < row_words_; ++i) {
    auto left = blocks[i];
    for (int at = 0; left != 0;) {
      const int gap = std::countr_zero(left), ones = std::countr_one(left >> gap);
      const auto first = i * 64 + at + gap;
      if (!found.empty() && found.back().end == first) {
        found.back().end += ones;
      } else {
        found.push_back({first, first + ones});
      }
      at += gap + ones;
      left = gap + ones == 64 ? 0 : left >> (gap + ones);
    }
  }
}

}  // namespace anyflash::planning
