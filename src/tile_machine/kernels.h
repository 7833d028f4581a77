// The arithmetic that the simulator does for a tile. Operands come from the tile's arena and results go back into it. In
// between, float16 is widened to float32 in buffers of the host, as a matrix unit does when it loads its operands.
#pragma once

#include <cstdint>

namespace anyflash::simulator {

/// C (rows, n) = or += A (rows, k) B (k, n). A has any strides. b, c: whole aligned lines, n a multiple of 16.
void multiply(bool add, std::int64_t rows, std::int64_t k, std::int64_t n, const float* a, std::int64_t a_row,
              std::int64_t a_k, const float* b, std::int64_t b_line, float* c, std::int64_t c_line);

/// `count` numbers of float16 or float32 to float32. False if one is not finite.
bool widen(bool half, const char* from, std::int64_t count, float* to);
/// The reverse. In float16 finite numbers stay finite if `clamp`.
void narrow(bool half, const float* from, std::int64_t count, char* to, bool clamp);

/// The dot product of each row of a and b, which have lines of `line` numbers.
void row_dots(std::int64_t rows, std::int64_t channels, const float* a, const float* b, std::int64_t line, float* dots);

/// A step's matrices: rows of queries, columns of keys, lines of `line` numbers.
struct StepShape {
  std::int64_t rows = 0, columns = 0, line = 0;
  /// (rows, word_line): bit j of a row: it sees key j. Null: all are visible, and columns is the line.
  const std::uint64_t* words = nullptr;
  std::int64_t word_line = 0;
};

/// Products become scores: scale, soft cap, bias, ALiBi.
struct ScoreTerms {
  float scale = 1, cap = 0;
  const float* bias = nullptr;  ///< (rows, bias_line)
  std::int64_t bias_line = 0;
  float alibi = 0;                 ///< the head's slope, if there are coordinates
  int dimensions = 0;              ///< of the coordinates
  const float* queries = nullptr;  ///< (rows, 3) coordinates
  const float* keys = nullptr;     ///< (3, line)
  float* slopes = nullptr;         ///< (rows, line): becomes the soft cap's derivative
};
void finish_scores(const StepShape& shape, const ScoreTerms& terms, float* scores);

/// Online softmax: scores become exp(S - row_max), hidden ones 0; row_max, row_sum and the accumulators (rows, acc_line)
/// follow. half: the products' operand is rounded to float16.
void online_softmax(const StepShape& shape, bool half, float* scores, float* row_max, float* row_sum,
                    float* accumulators, std::int64_t acc_line);

/// Backward: adds the sum of P = exp(S - lse) of each row. scores become P.
void sum_probabilities(const StepShape& shape, const float* lse, float* scores, double* sums);

/// Backward: scores become P = exp(S - lse), and dP becomes dS, hidden ones 0. gradient: what dS is multiplied by.
struct GradientTerms {
  const float *lse = nullptr, *delta = nullptr;  ///< (rows)
  const float* dlse = nullptr;                   ///< (rows) or null
  const float* lse_remainders = nullptr;         ///< (rows): what lse lost to rounding
  const float* slopes = nullptr;                 ///< (rows, line) or null
  float gradient = 1;
  float* dbias = nullptr;  ///< (rows, dbias_line) or null: the gradient of the bias
  std::int64_t dbias_line = 0;
};
void differentiate(const StepShape& shape, bool half, const GradientTerms& terms, float* scores, float* dscores);

}  // namespace anyflash::simulator
