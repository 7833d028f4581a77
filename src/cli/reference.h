// The textbook formula, forward and backward, pair by pair with the whole matrix in memory: the reference of `check`.
// It shares no code with the library's kernels, plans or words; masks come from the rules' definition, `pattern`.
#pragma once

#include <anyflash/explain.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "owned_tensor.h"

namespace anyflash::cli {

using Wide = long double;
using WideArray = std::vector<Wide>;

/// A call in plain arrays: tensors as (batch, heads, sequence, channels), row-major. Arrays not used are empty.
struct ReferenceCase {
  ElementType type = ElementType::float32;
  std::int64_t batch = 1, heads_q = 1, heads_kv = 1, queries = 0, keys = 0, d_qk = 0, d_v = 0;
  double scale = 1, softcap = 0;
  std::vector<double> q, k, v;
  std::vector<std::vector<std::uint8_t>> masks;  ///< (queries, keys), 1 where visible
  std::vector<std::vector<double>> distances;    ///< one per mask, for ALiBi: sum over the dimensions of |x_i - y_i|
  std::vector<int> mask_of;                      ///< (batch, heads_q): which of the masks
  std::vector<double> bias;                      ///< with the sizes below, each 1 or the full size
  std::int64_t bias_size[4] = {1, 1, 1, 1};
  std::vector<double> slopes;      ///< (batch, heads_q)
  std::vector<double> sink;        ///< (heads_q)
  std::vector<double> dout, dlse;  ///< backward; dlse may be empty
};

struct ReferenceResult {
  WideArray out, lse, row_max, row_sum;
  WideArray dq, dk, dv, dbias, dsink;  ///< empty if dout was not given
  /// By result, the largest sum of its terms' absolute values: rounding errors are in proportion to it, however the
  /// terms cancel. Only for the exact result.
  std::map<std::string, double> terms;
};

/// In long double throughout, which is at least float64.
ReferenceResult exact_result(const ReferenceCase& given);

/// As a textbook would in the inputs' type: scores, probabilities and results rounded to that type, sums in float32
/// (float64 for float64). There are four variants: sums run first to last or last to first, and the backward pass uses
/// P and sum(P dP) or, from forward's results, exp(S - lse) and sum(dO O). Which variant errs most is a matter of
/// chance, so all four are returned.
std::vector<ReferenceResult> textbook_results(const ReferenceCase& given);

/// Sum over the dimensions of |x_i - y_i| in aligned coordinates; ids (1-dimensional sequences) restart them inside
/// each document and may be empty.
std::vector<double> aligned_distances(const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                                      const std::vector<std::int64_t>& ids_q, const std::vector<std::int64_t>& ids_k);

}  // namespace anyflash::cli
