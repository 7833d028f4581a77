// The choice of boxes. Runs suit rules that follow memory order; boxes of 8 x 8 pixels or 4 x 4 x 4 voxels suit rules
// that are local in space; a step suits rules that see every s-th entry. The best choice also depends on the sizes (a
// run of 64 in an image 20 wide is mostly padding). So a sample of blocks decides, not the rule's name.
#include "plan/boxes.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "plan/runs.h"
#include "rules/documents.h"

namespace anyflash::planning {
namespace {

constexpr int sampled_blocks = 16;  // query blocks sampled for each cut; 64 changed none of 27 choices
constexpr int largest_step = 128;   // a block's search asks once for each residue class
constexpr int longest_aspect = 4;   // of a box's sides: 8 x 32, not 8 x 64

enum class Cell { row, square, cube };

/// Extents of `rows` entries made of whole cells. A cell's side is 64, 8 or 4, by its dimensions.
std::vector<Int3> shapes(int rows, Cell cell) {
  if (cell == Cell::row) return {{{1, 1, rows}}};
  const int side = cell == Cell::square ? 8 : 4;
  std::vector<Int3> found;
  for (int z = cell == Cell::square ? 1 : side; z <= (cell == Cell::square ? 1 : rows); z *= 2) {
    for (int y = side; y <= rows / z / side; y *= 2) {
      const int x = rows / z / y;
      const int longest = std::max({x, y, z}), shortest = std::min(x, cell == Cell::square ? y : std::min(y, z));
      const bool whole = z * y * x == rows && x % side == 0;
      if (whole && longest <= shortest * (cell == Cell::square ? longest_aspect : longest_aspect / 2)) {
        found.push_back({{z, y, x}});
      }
    }
  }
  return found;
}

/// The step, in entries, after which a side's aligned coordinates have advanced by a multiple of the stride. If its
/// residue classes are too short to fill half a block, the largest half, quarter ... of it for which they are not; else
/// 1.
std::int32_t fitting_step(std::int32_t stride, std::int32_t axis, std::int32_t size, std::int32_t extent) {
  std::int32_t step = stride / std::gcd(stride, axis);
  while (step > 1 && (step > largest_step || std::int64_t(step) * extent > 2 * std::int64_t(size))) {
    step = step % 2 == 0 ? step / 2 : 1;
  }
  return step;
}

/// Sample s of the blocks: one from each of `samples` equal strips, placed there by the golden ratio, so that not all
/// are in one column of an image.
std::int32_t sample(std::int64_t s, std::int64_t samples, std::int64_t blocks) {
  const double inside = std::uint32_t(s * 2654435769u) / 4294967296.0;
  return std::int32_t((double(s) + inside) * double(blocks) / double(samples));
}

}  // namespace

std::vector<Cut> candidate_cuts(const Problem& problem, const TileMenu& menu, Int3 stride) {
  std::vector<Cell> cells{Cell::row};
  if (problem.dimensions >= 2) cells.push_back(Cell::square);
  if (problem.dimensions >= 3) cells.push_back(Cell::cube);
  auto rows = menu.query_rows;
  std::sort(rows.rbegin(), rows.rend());

  std::vector<Cut> cuts;
  const Int3 ones{{1, 1, 1}};
  for (const auto query_rows : rows) {
    for (const auto cell : cells) {
      for (const auto& q_extent : shapes(query_rows, cell)) {
        for (const auto& k_extent : shapes(menu.key_rows, cell)) {
          cuts.push_back({Grid{problem.q_size, q_extent, ones}, Grid{problem.k_size, k_extent, ones}});
          Int3 q_step{}, k_step{};
          for (int i = 0; i < 3; ++i) {
            const auto q = problem.q_size[i], k = problem.k_size[i];
            const auto axis = rules::axis_of(q, k, problem.align);
            q_step[i] = fitting_step(stride[i], axis.q_step, q, q_extent[i]);
            k_step[i] = fitting_step(stride[i], axis.k_step, k, k_extent[i]);
          }
          if (q_step != ones || k_step != ones) {
            cuts.push_back({Grid{problem.q_size, q_extent, q_step}, Grid{problem.k_size, k_extent, k_step}});
          }
        }
      }
    }
  }
  return cuts;
}

Cut cheapest_cut(const std::vector<Cut>& cuts, const rules::Program& program, const TileMenu& menu, Int3 k_size) {
  const Cut* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  std::vector<Run> runs;
  for (const auto& cut : cuts) {
    const auto blocks = cut.queries.count();
    const auto samples = std::min<std::int64_t>(blocks, sampled_blocks);
    RunFinder finder(program, cut.queries, cut.keys, k_size, false);
    std::int64_t tiles = 0;
    for (std::int64_t s = 0; s < samples; ++s) {
      runs.clear();
      finder.find(sample(s, samples, blocks), runs);
      for (const auto& run : runs) tiles += run.count;
    }
    const double pairs = double(rules::volume(cut.queries.extent)) * double(rules::volume(cut.keys.extent));
    const double cost = double(tiles) * (pairs + menu.tile_cost) * double(blocks) / double(samples);
    if (cost < least) least = cost, best = &cut;
  }
  return best ? *best : cuts.front();
}

}  // namespace anyflash::planning
