// Blocks of queries are dealt to processes so that all have as many tokens and as much work.
#include <anyflash/sharding.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

namespace anyflash {
namespace {

/// Receiving one key costs as much time as this many visible pairs of one head. On an H100 a pair of 128 channels takes
/// about 1.3 ps and a key and its value (512 bytes) about 2.5 ns of NVLink; most of it is hidden behind the work.
constexpr double pairs_of_a_key = 200;
constexpr std::int64_t most_blocks = 512;  // 32 for each process if these are fewer

using Owners = std::vector<std::int64_t>;  // the process of each block

std::int64_t inner_of(const SequenceShape& shape) {
  return std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// Ends of equal blocks, the same even number for each process: in a text on multiples of 64, a key block.
std::vector<std::int64_t> block_cuts(const SequenceShape& shape, std::int64_t ranks) {
  const auto size = shape[0];
  std::int64_t each = 2, grain = shape.size() == 1 ? 64 : 1;
  const std::int64_t most = shape.size() == 1 ? 32 : 16;  // counting takes longer in two and three dimensions
  while (2 * each * ranks <= std::max(most_blocks, 2 * ranks) && each < most && size / (2 * each * ranks) >= grain)
    each *= 2;
  const auto blocks = each * ranks;
  if (size / blocks < grain) grain = 1;
  std::vector<std::int64_t> cuts;
  for (std::int64_t i = 0; i < blocks; ++i) cuts.push_back(i * size / blocks / grain * grain);
  cuts.push_back(size);
  return cuts;
}

Owners contiguous(std::int64_t blocks, std::int64_t ranks) {
  Owners owners;
  for (std::int64_t i = 0; i < blocks; ++i) owners.push_back(i * ranks / blocks);
  return owners;
}

/// Each process has one part from the front and one from the back.
Owners zigzag(std::int64_t blocks, std::int64_t ranks) {
  Owners owners;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const auto part = i * 2 * ranks / blocks;
    owners.push_back(std::min(part, 2 * ranks - 1 - part));
  }
  return owners;
}

/// In chunks, the longest first, each to the process with the least work that still lacks chunks; all get as many.
Owners dealt(const std::vector<double>& visible, std::int64_t chunks, std::int64_t ranks) {
  const auto blocks = std::int64_t(visible.size()), each = blocks / chunks;
  std::vector<double> work(chunks), load(ranks);
  for (std::int64_t i = 0; i < blocks; ++i) work[i / each] += visible[i];
  std::vector<std::int64_t> order(chunks), left(ranks, chunks / ranks);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return work[a] > work[b]; });
  Owners owners(blocks);
  for (const auto chunk : order) {
    std::int64_t rank = -1;
    for (std::int64_t r = 0; r < ranks; ++r)
      if (left[r] > 0 && (rank < 0 || load[r] < load[rank])) rank = r;
    load[rank] += work[chunk];
    --left[rank];
    std::fill_n(owners.begin() + chunk * each, each, rank);
  }
  return owners;
}

std::vector<Pieces> pieces_of(const Owners& owners, const std::vector<std::int64_t>& cuts, std::int64_t ranks) {
  std::vector<Pieces> all(ranks);
  for (std::size_t i = 0; i < owners.size(); ++i) {
    auto& pieces = all[owners[i]];
    const auto count = cuts[i + 1] - cuts[i];
    if (count == 0) continue;
    if (!pieces.empty() && pieces.back().first + pieces.back().count == cuts[i]) pieces.back().count += count;
    else pieces.push_back({cuts[i], count});
  }
  return all;
}

std::vector<double> work_of(const Owners& owners, const std::vector<double>& visible, std::int64_t ranks) {
  std::vector<double> work(ranks);
  for (std::size_t i = 0; i < owners.size(); ++i) work[owners[i]] += visible[i];
  return work;
}

/// What a deal of the blocks costs: the work of the busiest process, and the keys that one receives.
class Costs {
 public:
  Costs(const std::vector<double>& visible, const std::vector<std::uint8_t>& seen,
        const std::vector<std::int64_t>& k_cuts, std::int64_t inner, std::int64_t ranks)
      : visible_(visible), seen_(seen), k_cuts_(k_cuts), inner_(inner), ranks_(ranks) {}

  double of(const Owners& owners, const Owners& of_keys) const {
    const auto columns = k_cuts_.size() - 1;
    std::vector<std::uint8_t> sees(ranks_ * columns);
    for (std::size_t i = 0; i < owners.size(); ++i)
      for (std::size_t j = 0; j < columns; ++j) sees[owners[i] * columns + j] |= seen_[i * columns + j];
    std::int64_t most = 0;
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      std::int64_t received = 0;
      for (std::size_t j = 0; j < columns; ++j)
        if (sees[rank * columns + j] && of_keys[j] != rank) received += k_cuts_[j + 1] - k_cuts_[j];
      most = std::max(most, received * inner_);
    }
    const auto work = work_of(owners, visible_, ranks_);
    return *std::max_element(work.begin(), work.end()) + pairs_of_a_key * double(most);
  }

 private:
  const std::vector<double>& visible_;
  const std::vector<std::uint8_t>& seen_;
  const std::vector<std::int64_t>& k_cuts_;
  std::int64_t inner_, ranks_;
};

std::int64_t count_of(const Pieces& pieces) {
  std::int64_t count = 0;
  for (const auto& piece : pieces) count += piece.count;
  return count;
}

/// How many of the first pieces' entries are not in the second.
std::int64_t lacking(const Pieces& wanted, const Pieces& own) {
  std::int64_t both = 0;
  for (const auto& a : wanted)
    for (const auto& b : own)
      both += std::max<std::int64_t>(0, std::min(a.first + a.count, b.first + b.count) - std::max(a.first, b.first));
  return count_of(wanted) - both;
}

}  // namespace

SequenceSplit split_sequence(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                             std::int64_t ranks) {
  constexpr std::int64_t most_ranks = 1 << 14;  // their blocks make a matrix of a gigabyte
  if (ranks > most_ranks)
    throw Error(Error::Kind::value,
                "ranks: " + std::to_string(ranks) + ", expected at most " + std::to_string(most_ranks));
  if (ranks < 1) throw Error(Error::Kind::value, "ranks: " + std::to_string(ranks) + ", expected at least 1");
  part(rule, q_shape, k_shape, {}, {});  // checks the sizes
  const auto cuts = block_cuts(q_shape, ranks), k_cuts = block_cuts(k_shape, ranks);
  const auto visible = visible_by_block(rule, q_shape, k_shape, align, cuts, 4);
  const auto seen = seen_blocks(rule, q_shape, k_shape, align, cuts, k_cuts);
  const auto blocks = std::int64_t(visible.size());
  const auto own_keys = contiguous(std::int64_t(k_cuts.size()) - 1, ranks);
  const bool same = q_shape == k_shape;
  const Costs costs(visible, seen, k_cuts, inner_of(k_shape), ranks);
  auto best = contiguous(blocks, ranks);
  auto least = std::numeric_limits<double>::infinity();
  const auto offer = [&](Owners owners) {
    const auto cost = costs.of(owners, same ? owners : own_keys);
    if (cost >= 0.99 * least) return;  // of nearly equal ones the first, which has the fewest pieces
    least = cost, best = std::move(owners);
  };
  offer(best);
  if (ranks > 1) offer(zigzag(blocks, ranks));
  for (std::int64_t each = 2; ranks > 1 && each * ranks <= blocks; each *= 2)
    offer(dealt(visible, each * ranks, ranks));
  auto queries = pieces_of(best, cuts, ranks);
  auto keys = same ? queries : pieces_of(own_keys, k_cuts, ranks);
  return {std::move(queries), std::move(keys), work_of(best, visible, ranks)};
}

std::int64_t exchange_unit(const SequenceShape& k_shape) {
  return k_shape.size() > 1 ? 1 : std::max<std::int64_t>(1, std::min<std::int64_t>(64, k_shape[0] / 1024));
}

std::vector<std::int64_t> received_keys(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                        Align align, const SequenceSplit& split, std::int64_t unit) {
  const auto seen = seen_keys(rule, q_shape, k_shape, align, split.queries, unit);
  std::vector<std::int64_t> counts;
  for (std::size_t rank = 0; rank < seen.size(); ++rank)
    counts.push_back(lacking(seen[rank], split.keys[rank]) * inner_of(k_shape));
  return counts;
}

}  // namespace anyflash
