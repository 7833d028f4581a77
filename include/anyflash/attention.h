// The calls: forward, backward, plan.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <anyflash/rule.h>
#include <anyflash/tensor.h>

namespace anyflash {

/// The aligned coordinate of entry c of a sequence, in each dimension. Rules compare these coordinates.
/// R = max(queries, keys) in that dimension, and step = R / size of the sequence, an integer division.
enum class Align : std::uint8_t {
  none_front,   ///< c
  none_end,     ///< c + (R - size): the last query sits at the last key, as in decoding with a cache
  scale_front,  ///< c * step
  scale_end     ///< (c + 1) * step - 1
};
/// The alignments' names as text, by number.
inline constexpr const char* align_names[] = {"none_front", "none_end", "scale_front", "scale_end"};

/// The order of the axes of q, k, v, out and their gradients. A sequence has 1, 2 or 3 axes, outermost first. Strides
/// are free in all layouts.
enum class Layout : std::uint8_t {
  bhsd,  ///< (batch, heads, sequence..., channels)
  bshd,  ///< (batch, sequence..., heads, channels)
  bhds,  ///< (batch, heads, channels, sequence...)
  qkv,   ///< q is (3, heads, tokens, channels) and holds k and v, which are not given; out is (heads, tokens, channels)
  thd    ///< (tokens, heads, channels): documents end to end, with cu_seqlens_q and cu_seqlens_k
};
/// The layouts' names as text, by number.
inline constexpr const char* layout_names[] = {"bhsd", "bshd", "bhds", "qkv", "thd"};

class Plan;

/// For tensors in mapped files, larger than memory. memory_budget then covers the pages of the tensors that a chunk
/// touches too, and the call says when they can go.
struct OutOfCore {
  std::function<void(std::int64_t done, std::int64_t total)> after_chunk;  ///< called by the calling thread
};

/// What to compute, apart from q, k and v. The call rounds bias, slopes and sink to the type that it computes in:
/// float64 for float64, else float32. Values too large for float32 become infinite.
///
/// cu_seqlens_q, cu_seqlens_k, key_lengths, page_table and a rule's tables are all on the CPU or all on the tensors'
/// GPU. On a GPU their values are not checked. Documents beside key_lengths need both on the CPU.
struct Options {
  Rule rule;                        ///< which keys a query sees; all of them if not given
  Align align = Align::none_front;  ///< which coordinates the entries of the shorter sequence have
  Layout layout = Layout::bhsd;     ///< the order of the tensors' axes
  std::optional<double> scale;      ///< factor of q k^T; 1 / sqrt(d_qk) if not given
  double softcap = 0.0;             ///< S = softcap * tanh(S / softcap) where softcap > 0; 0: no cap
  TensorView bias;          ///< (batch or 1, heads or 1, queries or 1, keys or 1), any floating-point type: added to S
  TensorView alibi_slopes;  ///< (heads) or (batch, heads), float32 or float64: S -= slope * sum_i |x_i - y_i| (ALiBi)
  TensorView sink;          ///< (heads): one more logit in each row's softmax, without a value
  TensorView cu_seqlens_q;  ///< (documents + 1), int32 or int64: for thd, where each document begins, then the end
  TensorView cu_seqlens_k;  ///< (documents + 1), int32 or int64: the same for the keys
  TensorView key_lengths;   ///< (batch), int32 or int64: how many keys exist, in sequences of one dimension
  TensorView page_table;    ///< (batch, pages of an entry), int32: k and v are (pages, page size, heads_kv, channels)
  /// Gives the same bits in every run and in any batch. Only some calls on Hopper GPUs need it, and they then take
  /// longer: see the guide, Determinism.
  bool deterministic = false;
  /// For float32 on a GPU: products may use fewer significant bits where that is faster: 11 (TF32), or 16 on Hopper.
  /// Without it, and on the CPU, products are as exact as float32.
  bool allow_tf32 = false;
  /// The most bytes of workspace that the call may use on the tensors' device; not given: no bound. The call is then
  /// computed in chunks where that needs less, with the same results. Error, with the least that works, if it is less.
  /// On the tile machine: the most bytes that are live on any tile, tensors included.
  std::optional<std::int64_t> memory_budget;
  /// How many chunks the queries, and the keys, are computed in. Each divides the number of those. Not given: chosen
  /// so that the call fits memory_budget. A chunk is a range of blocks, so boundaries are those of blocks. On a GPU
  /// only the product of the two counts, as a bound of the workspace. On the tile machine: the chunks of each head.
  std::optional<std::int64_t> num_chunks_q;
  std::optional<std::int64_t> num_chunks_kv;
  /// For tensors on a GPU: the cudaStream_t that the call's work is queued on; null for CUDA's default stream. The call
  /// returns before the work is done.
  void* stream = nullptr;
  /// Workspace on the tensors' device, of the size that the given plan states. Any shape and element type without gaps;
  /// it begins on a multiple of 256 bytes. No other call may use it at the same time. Not given: the library allocates
  /// it.
  TensorView workspace;
  const OutOfCore* out_of_core = nullptr;  ///< on the CPU: the tensors lie in mapped files; null: in memory
  std::int64_t threads = 0;    ///< threads on the CPU; 0: as many as OpenMP gives; with a plan, at most the plan's
  const Plan* plan = nullptr;  ///< made by plan() for the same shapes and options; null: from a cache, or made
};

/// Where the result goes. Only `out` must be given.
struct ForwardOutputs {
  TensorView out;  ///< as q, with d_v channels, in the inputs' type
  /// (batch, heads, queries), for qkv and thd (heads, tokens); float32, or float64 for float64. The log-sum-exp of a
  /// row's scores, row_max + log(row_sum); -inf where a query sees no key.
  TensorView lse;
  TensorView row_sum;  ///< the sum of exp(S - row_max), shape and type of lse
  TensorView row_max;  ///< the greatest visible score, shape and type of lse
  /// row_max may be any number near the greatest score, with row_sum to it. join() needs no more, and a GPU saves time.
  bool near_maxima = false;
};

/// Where the gradients go. Only the gradients that are given are computed. Each has the shape and type of its tensor.
struct Gradients {
  TensorView dq;     ///< for qkv the packed gradient of q, k and v
  TensorView dk;     ///< not given for qkv
  TensorView dv;     ///< not given for qkv
  TensorView dbias;  ///< summed over the axes along which bias is broadcast
  TensorView dsink;  ///< the gradient of sink
};

/// What backward reads apart from q, k and v.
struct BackwardInputs {
  TensorView dout;  ///< the gradient of out, of its shape and type
  TensorView out;   ///< what forward wrote
  TensorView lse;   ///< what forward wrote
  TensorView dlse;  ///< the gradient of lse, of its shape and type; need not be given
};

/// What a call has beside q, k, v and its options, where only shapes are known: whether these members of ForwardOutputs
/// and BackwardInputs are given. They change how the tile machine computes.
struct CallTensors {
  bool row_sum = false, row_max = false;  ///< forward
  bool dlse = false;                      ///< backward
  /// Backward: lse has a finite number of 32 or more, or -32 or less. Only its values tell: it depends on q and k.
  bool large_lse = false;
};

/// The shapes of a forward call's results.
struct ResultShapes {
  std::vector<std::int64_t> out;
  std::vector<std::int64_t> lse;  ///< the shape of row_sum and row_max too
};

/// The shapes of the results of a forward call with these arguments. Data pointers may be null.
/// Throws Error as forward would, except for errors that only the data or a given plan reveals.
ResultShapes result_shapes(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {});

/// Exact attention: FlashAttention-2 (Dao 2023), algorithm 1, with rule, bias, soft cap and sink.
///
///     S   = scale * q k^T, then the soft cap, then the bias and ALiBi
///     P   = softmax of S over the visible keys, and the sink logit
///     out = P v
///     lse = log-sum-exp of S over the same
///
/// q and k have the layout's shape with d_qk channels, 1 to 256. v has d_v channels, 1 to 512. The heads of k and v
/// divide those of q. All three have one type: float16, bfloat16, float32 or float64; 16-bit types are computed in
/// float32. A query that sees no key gives out 0 and lse -inf.
/// Throws Error; then nothing has been written.
void forward(const TensorView& q, const TensorView& k, const TensorView& v, const ForwardOutputs& outputs,
             const Options& options = {});

/// The exact derivative of forward: FlashAttention-2 (Dao 2023), algorithm 2. It computes the gradients that are given,
/// from dout and, if given, dlse. The options must be those of the forward call. If no gradient is given, the call is
/// only checked (except for a given plan).
/// Throws Error; then nothing has been written.
void backward(const BackwardInputs& inputs, const TensorView& q, const TensorView& k, const TensorView& v,
              const Gradients& gradients, const Options& options = {});

/// Bytes of workspace that backward needs for the gradients that are given. It reads the shapes, types and strides of
/// q, k and v, whose data pointers may be null. Throws Error as plan() would.
std::int64_t backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                const Gradients& gradients, const Options& options = {});

/// The smallest memory_budget that works for the forward pass and, if asked for, for all gradients; on the tile machine
/// the smallest that its search finds. Shapes, types and strides as for backward_workspace. Throws Error as plan() would.
std::int64_t least_workspace(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {},
                             bool backward = true);

namespace detail {
struct PlanPair;
}

/// How a call will run: which tiles are visited, on how many threads. Immutable, cheap to copy, safe to share between
/// threads.
///
/// A plan is valid for the values that a rule's tables had when it was made. `blocks` and `dense` tables must outlive
/// it. A call throws Error where document ids, cumulative lengths or a blocks bitmap have changed since. A dense mask
/// is not compared, since that could cost as much as the call: it must not change. Lengths and tables on a GPU are read
/// by each call and may change.
class Plan {
 public:
  explicit Plan(std::shared_ptr<const detail::PlanPair> pair);  ///< throws Error if it is null
  Plan(const Plan&) = default;                                  // moving copies, so that a moved-from plan stays valid
  Plan& operator=(const Plan&) = default;
  const detail::PlanPair& pair() const { return *pair_; }
  /// Bytes of workspace that a forward call needs with the plan's threads. 0 where there is nothing to compute. On a
  /// GPU the figure is valid for tensors with the same strides and alignment as those that the plan was made with.
  std::int64_t forward_workspace() const;
  /// The same for a backward call with all the gradients it can have; 0 with pages, which have no backward. On a GPU it
  /// is valid for gradients that have the strides of their tensors.
  std::int64_t backward_workspace() const;

 private:
  std::shared_ptr<const detail::PlanPair> pair_;
};

/// Makes the plan of a call. It reads only the shapes and types of q, k and v. It reads the data of a rule's tables,
/// cu_seqlens and key_lengths that are on the CPU. Throws Error as forward would.
Plan plan(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {});

}  // namespace anyflash
