#include "plan/document_blocks.h"

#include <algorithm>

#include "rules/classes.h"

namespace anyflash::planning {
namespace {

/// Calls f(document) for the entries of a box that exist; once for neighbours of one document.
template <typename F>
void each_document(const rules::DocumentSide& side, const Box& box, Int3 size, const F& f) {
  std::int32_t before = -1;
  rules::each_row(box, size, [&](std::int64_t entry, std::int64_t step, std::int64_t count) {
    for (; count > 0; --count, entry += step) {
      if (const auto document = side.document_of[entry]; document != before) f(before = document);
    }
    return true;
  });
}

}  // namespace

DocumentBlocks::DocumentBlocks(const rules::Program& program, const Grid& key_grid)
    : queries_(program.documents.q), q_size_(program.q_size()) {
  const auto& keys = program.documents.k;
  const auto size = program.k_size();
  std::int32_t largest = -1;
  for (std::int32_t s = 0; s < keys.segment_count; ++s) largest = std::max(largest, keys.segments[s].document);
  chains_.resize(largest + 1);
  for (std::int64_t block = 0; block < key_grid.count(); ++block) {
    auto box = key_grid.box(std::int32_t(block));
    if (!rules::inside(box.origin, size)) continue;
    clip(box, size);
    each_document(keys, box, size, [&](std::int32_t document) { add(document, block); });
  }
}

void DocumentBlocks::add(std::int32_t document, std::int64_t block) {
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

void DocumentBlocks::meeting(const Box& queries, std::vector<BlockRange>& found) const {
  std::vector<std::int32_t> documents;
  each_document(queries_, queries, q_size_, [&](std::int32_t document) { documents.push_back(document); });
  std::sort(documents.begin(), documents.end());
  documents.erase(std::unique(documents.begin(), documents.end()), documents.end());
  found.clear();
  for (const auto document : documents) {
    if (std::size_t(document) >= chains_.size()) continue;  // a document without keys
    for (auto link = chains_[document].first; link >= 0; link = links_[link].next) found.push_back(links_[link].blocks);
  }
  std::sort(found.begin(), found.end(), [](BlockRange a, BlockRange b) { return a.first < b.first; });
  std::size_t kept = 0;
  for (const auto& range : found) {
    if (kept > 0 && range.first <= found[kept - 1].end) {
      found[kept - 1].end = std::max(found[kept - 1].end, range.end);
    } else {
      found[kept++] = range;
    }
  }
  found.resize(kept);
}

}  // namespace anyflash::planning
