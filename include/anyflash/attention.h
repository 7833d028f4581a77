// The calls: forward, backward, plan.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <anyflash/rule.h>
#include <anyflash/tensor.h>

namespace anyflash {

/// Where entry c of a dimension with q_i queries and k_i keys sits, R_i = max(q_i, k_i):
///   none_front   c                      none_end   c + (R_i - size)
///   scale_front  c * step               scale_end  (c + 1) * step - 1        step = R_i / size, integer division
enum class Align : std::uint8_t { none_front, none_end, scale_front, scale_end };
inline constexpr const char* align_names[] = {"none_front", "none_end", "scale_front", "scale_end"};

/// How q, k, v, out and their gradients are laid out; strides are free in all of them.
///   bhsd  (batch, heads, sequence..., channels)       sequence: 1, 2 or 3 axes
///   bshd  (batch, sequence..., heads, channels)
///   bhds  (batch, heads, channels, sequence...)
///   qkv   q is the packed (3, N, L, D), k and v are not given, out is (N, L, D), lse (N, L)
///   thd   (tokens, heads, channels) with cu_seqlens_q and cu_seqlens_k, lse (heads, tokens)
enum class Layout : std::uint8_t { bhsd, bshd, bhds, qkv, thd };
inline constexpr const char* layout_names[] = {"bhsd", "bshd", "bhds", "qkv", "thd"};

class Plan;

/// What to compute, beside q, k and v. Bias, slopes and sink are rounded to the type that the call computes in
/// (float32, or float64 for float64) before they are used: a float64 number beyond float32's range is an infinity in
/// other calls.
struct Options {
  Rule rule;
  Align align = Align::none_front;
  Layout layout = Layout::bhsd;
  std::optional<double> scale;   ///< default 1 / sqrt(d_qk)
  double softcap = 0.0;          ///< S = softcap * tanh(S / softcap) where > 0
  TensorView bias;               ///< (b or 1, h or 1, queries or 1, keys or 1), added to S; any floating-point type
  TensorView alibi_slopes;       ///< (h) or (b, h), float32 or float64: S -= slope * sum_i |x_i - y_i|
  TensorView sink;               ///< (h): one more logit in each row's softmax, without a value
  // These four, and a rule's tables, are on the cpu, or all on the tensors' GPU: then nobody checks what they hold.
  TensorView cu_seqlens_q;       ///< thd: (documents + 1), int32 or int64
  TensorView cu_seqlens_k;
  TensorView key_lengths;        ///< (b), int32 or int64: keys from this length on do not exist (1-D sequences)
  TensorView page_table;         ///< (b, pages of an entry), int32: k and v are (pages, page size, heads_kv, channels)
  /// Bitwise repeatable, and the same in any batch; else, on Hopper, dq and sums of dbias of 16-bit types are not, nor in
  /// another batch calls of few queries of 16-bit types, and what is made again (guide, limits).
  bool deterministic = false;
  /// float32 on a GPU: products may keep 11 bits of each number (TF32), on Hopper 16, where that is faster. Else, and
  /// on the CPU, they are as exact as float32.
  bool allow_tf32 = false;
  /// Tensors on cuda: the cudaStream_t that the call's work is queued on, null for CUDA's default one; the call returns
  /// before it is done.
  void* stream = nullptr;
  /// Memory of the tensors' device to work in, any shape and element type without gaps, beginning on a multiple of 256
  /// bytes: as much as the given plan says. No other call may work in it meanwhile. Not given: the library's own.
  TensorView workspace;
  std::int64_t threads = 0;      ///< 0: all that OpenMP gives; with a plan at most what it was made with
  const Plan* plan = nullptr;    ///< one made by plan() for the same shapes and options; not given: looked up or made
};

/// Where the result goes. Only `out` must be given.
struct ForwardOutputs {
  TensorView out;      ///< as q, with d_v channels, in the inputs' type
  TensorView lse;      ///< (b, h, queries), float32 (float64 for float64): m + log(l); -inf where a query sees no key
  TensorView row_sum;  ///< l, shape and type of lse
  TensorView row_max;  ///< m, shape and type of lse
};

/// Which gradients to compute: those that are given. Shapes and types as the tensor they belong to; dbias is summed
/// over the axes along which bias is broadcast.
struct Gradients {
  TensorView dq, dk, dv, dbias, dsink;
};

/// What the forward call saw and gave, for backward.
struct BackwardInputs {
  TensorView dout;  ///< as out
  TensorView out;   ///< of forward
  TensorView lse;   ///< of forward
  TensorView dlse;  ///< the gradient of lse, shape and type of lse; may be absent
};

/// The shapes of out and of lse (row_sum, row_max) in a call of forward, which is checked first: throws Error as
/// forward would for these arguments, except for what only their data or a given plan shows (their data pointers may be
/// null).
struct ResultShapes {
  std::vector<std::int64_t> out, lse;
};
ResultShapes result_shapes(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {});

/// Exact attention (FlashAttention-2, Dao 2023, algorithm 1, with rule, bias, cap and sink):
///   S = scale q k^T, capped, biased;  P = softmax of S over the visible keys;  out = P v;  lse = log-sum-exp of S.
/// q, k: the layout's shape with d_qk channels (1 to 256); v with d_v channels (1 to 512); heads_kv divides heads_q.
/// Types: float16 and bfloat16 (computed in float32), float32, float64; all three alike.
/// Throws Error; then nothing has been written.
void forward(const TensorView& q, const TensorView& k, const TensorView& v, const ForwardOutputs& outputs,
             const Options& options = {});

/// The exact derivative of forward: dq, dk, dv, dbias, dsink, whichever are given, from dout (and dlse). If none is,
/// the call is only checked (a given plan apart).
/// Throws Error; then nothing has been written.
void backward(const BackwardInputs& inputs, const TensorView& q, const TensorView& k, const TensorView& v,
              const Gradients& gradients, const Options& options = {});

/// Bytes of memory that backward works in, beside its tensors, for those gradients that are given. It looks at the
/// shapes, types and strides of q, k and v, whose data pointers may be null; throws Error as plan() would.
std::int64_t backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                const Gradients& gradients, const Options& options = {});

namespace detail {
struct PlanPair;
}

/// How a call will run: blocks, runs of visible tiles, threads. Immutable, cheap to copy, safe to share between
/// threads. A plan for a rule with tables reads blocks and dense when it runs, so they must outlive it, and it holds
/// what tables said when it was made, so they must keep saying it. A call throws Error where document ids, cumulative
/// lengths or a blocks bitmap have changed since; a dense mask is not looked at (that would cost as much as a whole
/// call may). Lengths and tables on a GPU are read by each call and may change.
class Plan {
 public:
  explicit Plan(std::shared_ptr<const detail::PlanPair> pair);  ///< throws Error if it is null
  Plan(const Plan&) = default;  // moving copies, so that a plan that was moved from is still one
  Plan& operator=(const Plan&) = default;
  const detail::PlanPair& pair() const { return *pair_; }
  /// Bytes of memory that a call works in, beside its tensors and the plan, with the plan's threads; backward with all
  /// gradients that the call can have. 0 where there is nothing to compute, or no backward (pages). On GPUs, of tensors
  /// with the strides of those that the plan was made with, as well aligned, and of gradients that lie as their tensors.
  std::int64_t forward_workspace() const;
  std::int64_t backward_workspace() const;

 private:
  std::shared_ptr<const detail::PlanPair> pair_;
};

/// Makes the plan of a call. The views give shapes and types; their data is not read (that of tables in the rule,
/// cu_seqlens and key_lengths is, if they are on the cpu). Throws Error.
Plan plan(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {});

}  // namespace anyflash
