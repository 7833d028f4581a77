// A checked call: what to compute, as plain numbers and pointers; nothing has to be checked again.
#pragma once

#include <cstdint>
#include <functional>

#include <anyflash/attention.h>

#include "rules/box.h"

namespace anyflash {

using rules::Int3;

constexpr std::int64_t largest_d_qk = 256, largest_d_v = 512;
constexpr int workspace_alignment = 256;  // in bytes

/// One of q, k, v, out or a gradient of them. Strides in elements.
struct Operand {
  char* data = nullptr;
  std::int64_t batch = 0, head = 0, channel = 0;
  std::int64_t sequence[3] = {0, 0, 0};

  bool given() const { return data != nullptr; }
};

/// Keys and values in `pages` pages; page_size 0 if they are not paged. Row j of entry b is in page table[b *
/// table_batch + (j / page_size) * table_page]. k and v are then Operands with batch = page stride, sequence[2] =
/// stride of a row inside its page.
struct Pages {
  const std::int32_t* table = nullptr;
  std::int64_t table_batch = 0, table_page = 0, page_size = 0, pages = 0;
};

/// (b, h, flat query): lse, row_sum, row_max, dlse. In float32, or float64 for float64.
struct RowStatistic {
  char* data = nullptr;
  std::int64_t batch = 0, head = 0, query = 0;
  bool given() const { return data != nullptr; }
};

/// (b, h, flat query, flat key), stride 0 where broadcast. Size 1 or the full size in each axis.
struct Bias {
  char* data = nullptr;
  ElementType type = ElementType::float32;
  std::int64_t size[4] = {1, 1, 1, 1};
  std::int64_t stride[4] = {0, 0, 0, 0};
  bool given() const { return data != nullptr; }
};

/// One number per head, or per (batch, head): sink logits (batch = 0), ALiBi slopes.
struct HeadNumbers {
  char* data = nullptr;
  ElementType type = ElementType::float32;
  std::int64_t batch = 0, head = 0;
  bool given() const { return data != nullptr; }
};

enum class Direction : std::uint8_t { forward, backward };

/// How a call is divided so that its workspace fits: chosen from the plan (plan/chunks.h). A number of 0 bounds nothing.
struct Chunks {
  std::int64_t groups = 0;     ///< groups computed at once; a group: a key/value head of a batch entry
  std::int64_t q = 0, kv = 0;  ///< into how many ranges the query blocks and the key blocks are divided
  std::int64_t kept = 0;       ///< at most so many blocks stay packed in a thread's memory
  int threads = 0;             ///< at most
  bool portable = false;       ///< on a GPU: the portable kernels without split-KV, which need the least workspace

  bool any() const { return groups > 0 || q > 0 || kv > 0 || kept > 0 || threads > 0 || portable; }
  friend bool operator==(const Chunks&, const Chunks&) = default;
};

struct Problem {
  Direction direction = Direction::forward;
  Device device;
  ElementType type = ElementType::float32;
  std::int64_t batch = 0, heads_q = 0, heads_kv = 0, d_qk = 0, d_v = 0;
  int dimensions = 1;       // of the sequence
  Int3 q_size{}, k_size{};  // (1, 1, n), (1, y, x) or (z, y, x)
  Align align = Align::none_front;
  double scale = 1.0, softcap = 0.0;
  Rule rule;
  int threads = 0;
  bool deterministic = false;
  bool allow_tf32 = false;  // for float32
  std::optional<std::int64_t> memory_budget, num_chunks_q, num_chunks_kv;
  Chunks chunks;
  const std::function<void(std::int64_t done, std::int64_t total)>* after_chunk = nullptr;  ///< called between chunks
  bool tensors_in_budget = false;  ///< the budget covers the chunk's parts of the tensors too
  void* stream = nullptr;          // cuda
  char* workspace = nullptr;
  std::int64_t workspace_bytes = -1;  // -1: not given

  Operand q, k, v, out;
  Pages pages;
  RowStatistic lse, row_sum, row_max;
  bool near_maxima = false;  // row_max need not be the maximum
  Bias bias;
  HeadNumbers alibi, sink;

  // As the caller gave them, int32 or int64: packed documents (thd), and key lengths (batch), which are in 0 .. keys().
  // On the CPU this has been checked; kernels clamp other values.
  TensorView cu_seqlens_q, cu_seqlens_k;
  TensorView key_lengths;
  /// These lengths, the page table and the rule's tables are in device memory, not on the CPU: only kernels read them.
  bool tables_on_device = false;

  // backward only
  Operand dout, dq, dk, dv;
  RowStatistic dlse;
  bool large_lse = false;  // of a problem of shapes: lse would have a number of 32 or more
  Bias dbias;
  HeadNumbers dsink;

  std::int64_t queries() const { return rules::volume(q_size); }
  std::int64_t keys() const { return rules::volume(k_size); }
  /// Are there a query and a key? If not, no result needs arithmetic. (A page table may have entries without any page.)
  bool has_pairs() const {
    return batch > 0 && heads_q > 0 && queries() > 0 && keys() > 0 && (pages.page_size == 0 || pages.pages > 0);
  }
};

/// Checks a call and describes it; the rule is left to rules::check. Throws Error with one line. The layout qkv gives a
/// batch of 1 with N heads, thd one with a single sequence; pages give a sequence as long as all pages of an entry.
Problem forward_problem(const TensorView& q, const TensorView& k, const TensorView& v, const ForwardOutputs& outputs,
                        const Options& options);
Problem backward_problem(const BackwardInputs& inputs, const TensorView& q, const TensorView& k, const TensorView& v,
                         const Gradients& gradients, const Options& options);
/// For shapes only: data pointers of q, k and v may be null, there are no outputs. A backward problem asks for every
/// possible gradient, at a dummy address. There are the given ones of `tensors` too. Throws Error for those of the other
/// direction.
Problem shape_problem(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options,
                      Direction direction = Direction::forward, const CallTensors& tensors = {});

}  // namespace anyflash
