/* anyflash in C (C99 and later): the functions of anyflash/anyflash.h, for other languages.
 *
 * Every call that can fail returns a status: ANYFLASH_OK or the kind of error. anyflash_last_error() then gives one
 * line of text: which argument, what was expected, what was passed. A call that fails has written nothing to its
 * outputs. Calls are safe from any number of threads. anyflash/attention.h and anyflash/rule.h document, at the
 * functions of the same names, what a call computes and which shapes and types it accepts.
 */
#ifndef ANYFLASH_C_API_H
#define ANYFLASH_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum anyflash_status {
  ANYFLASH_OK = 0,
  ANYFLASH_ERROR_VALUE = 1,       /* a shape, stride, size or number is wrong */
  ANYFLASH_ERROR_TYPE = 2,        /* an element type is wrong */
  ANYFLASH_ERROR_DEVICE = 3,      /* a tensor lives on another device, or the device cannot run this */
  ANYFLASH_ERROR_UNSUPPORTED = 4, /* correct, but not supported */
  ANYFLASH_ERROR_MEMORY = 5,      /* an allocation failed */
  ANYFLASH_ERROR_INTERNAL = 6     /* a defect of the library */
} anyflash_status;

/* The error line of this thread's last failed call; "" before any. Valid until this thread's next failed call. */
const char* anyflash_last_error(void);

const char* anyflash_version(void); /* the library's version, "0.1.0" */
/* The instruction set of the CPU kernels on this machine, e.g. "AVX2". NULL, with an error, if the one that
 * ANYFLASH_ISA names does not run here. */
const char* anyflash_instruction_set(void);

/* --- tensors ------------------------------------------------------------------------------------------------------ */

typedef enum anyflash_type {
  ANYFLASH_FLOAT16 = 0,
  ANYFLASH_BFLOAT16 = 1,
  ANYFLASH_FLOAT32 = 2,
  ANYFLASH_FLOAT64 = 3,
  ANYFLASH_BOOLEAN = 4,
  ANYFLASH_UINT8 = 5,
  ANYFLASH_INT32 = 6,
  ANYFLASH_INT64 = 7
} anyflash_type;

/* ANYFLASH_TILES: the simulated tile machine; its tensors are in the CPU's memory, its index is 0. */
typedef enum anyflash_device { ANYFLASH_CPU = 0, ANYFLASH_CUDA = 1, ANYFLASH_TILES = 2 } anyflash_device;

#define ANYFLASH_MAX_RANK 8

/* A tensor that the caller owns. Wherever a pointer to one may be NULL, NULL means that it is not given. */
typedef struct anyflash_tensor {
  void* data;
  int32_t type;   /* anyflash_type */
  int32_t device; /* anyflash_device */
  int32_t device_index;
  int32_t rank; /* 0 to ANYFLASH_MAX_RANK */
  int64_t shape[ANYFLASH_MAX_RANK];
  int64_t strides[ANYFLASH_MAX_RANK]; /* in elements */
} anyflash_tensor;

/* Describes row-major memory on the CPU. shape holds `rank` numbers. */
anyflash_status anyflash_tensor_init(anyflash_tensor* tensor, void* data, int32_t type, int32_t rank,
                                     const int64_t* shape);

/* --- rules -------------------------------------------------------------------------------------------------------- */

/* Which keys a query sees. Made by the functions below, which store it in *rule (NULL if they fail), freed by
 * anyflash_rule_free. Tables (ids, cu_seqlens, bitmap, mask) are not copied and must outlive the rule. Arguments "per
 * dimension" hold `dimensions` numbers, 1 to 3, outermost first; one number stands for all dimensions of the sequence.
 */
typedef struct anyflash_rule anyflash_rule;

anyflash_status anyflash_rule_full(anyflash_rule** rule);
anyflash_status anyflash_rule_causal(anyflash_rule** rule);
anyflash_status anyflash_rule_local(int64_t window, int32_t log2_stride, int32_t causal, anyflash_rule** rule);
anyflash_status anyflash_rule_window(int32_t dimensions, const int64_t* left, const int64_t* right,
                                     anyflash_rule** rule);
anyflash_status anyflash_rule_prefix(int64_t n, anyflash_rule** rule);
anyflash_status anyflash_rule_prefix_queries(int64_t n, anyflash_rule** rule);
anyflash_status anyflash_rule_sink(int64_t n, anyflash_rule** rule);
anyflash_status anyflash_rule_documents(const anyflash_tensor* ids_q, const anyflash_tensor* ids_k,
                                        anyflash_rule** rule);
anyflash_status anyflash_rule_documents_packed(const anyflash_tensor* cu_seqlens_q, const anyflash_tensor* cu_seqlens_k,
                                               anyflash_rule** rule);
anyflash_status anyflash_rule_tiles(int32_t dimensions, const int64_t* shape, const int64_t* kernel,
                                    anyflash_rule** rule);
/* dilation and causal may be NULL: 1 and 0 in every dimension. */
anyflash_status anyflash_rule_neighbourhood(int32_t dimensions, const int64_t* kernel, const int64_t* dilation,
                                            const int64_t* causal, anyflash_rule** rule);
anyflash_status anyflash_rule_blocks(const anyflash_tensor* bitmap, int64_t block_q, int64_t block_k,
                                     anyflash_rule** rule);
anyflash_status anyflash_rule_dense(const anyflash_tensor* mask, anyflash_rule** rule);

/* a & b: visible where both are. The caller still owns the operands and may free them before the result. */
anyflash_status anyflash_rule_and(const anyflash_rule* a, const anyflash_rule* b, anyflash_rule** rule);
/* a | b: visible where either is. The caller still owns the operands. */
anyflash_status anyflash_rule_or(const anyflash_rule* a, const anyflash_rule* b, anyflash_rule** rule);
/* ~a: visible where a is not. The caller still owns the operand. */
anyflash_status anyflash_rule_not(const anyflash_rule* a, anyflash_rule** rule);

/* From text, such as "causal() & local(256)". */
anyflash_status anyflash_rule_parse(const char* text, anyflash_rule** rule);
/* The rule as text, for at most `size` bytes with the closing 0; what does not fit is cut off. *needed, if not NULL,
 * becomes the size that holds all of it. */
anyflash_status anyflash_rule_text(const anyflash_rule* rule, char* text, size_t size, size_t* needed);
void anyflash_rule_free(anyflash_rule* rule); /* NULL is fine */

/* --- calls -------------------------------------------------------------------------------------------------------- */

typedef enum anyflash_align {
  ANYFLASH_NONE_FRONT = 0,
  ANYFLASH_NONE_END = 1,
  ANYFLASH_SCALE_FRONT = 2,
  ANYFLASH_SCALE_END = 3
} anyflash_align;

typedef enum anyflash_layout {
  ANYFLASH_BHSD = 0,
  ANYFLASH_BSHD = 1,
  ANYFLASH_BHDS = 2,
  ANYFLASH_QKV = 3,
  ANYFLASH_THD = 4
} anyflash_layout;

/* How a call will run; made once by anyflash_plan_create, used by any number of calls and threads. */
typedef struct anyflash_plan anyflash_plan;

/* What to compute, apart from q, k and v. Start from ANYFLASH_OPTIONS_INIT or anyflash_options_init: zero is the
 * default of every member except struct_size. */
typedef struct anyflash_options {
  size_t struct_size;        /* sizeof(anyflash_options) */
  const anyflash_rule* rule; /* NULL: every query sees every key */
  int32_t align;             /* anyflash_align */
  int32_t layout;            /* anyflash_layout */
  int32_t has_scale;         /* 0: scale is 1 / sqrt(d_qk) */
  int32_t deterministic;
  double scale;
  double softcap; /* 0: none */
  const anyflash_tensor* bias;
  const anyflash_tensor* alibi_slopes;
  const anyflash_tensor* sink;
  /* These four and a rule's tables are all on the CPU or all on the tensors' GPU, where their values are not checked. */
  const anyflash_tensor* cu_seqlens_q;
  const anyflash_tensor* cu_seqlens_k;
  const anyflash_tensor* key_lengths;
  const anyflash_tensor* page_table;
  const anyflash_plan* plan;
  int32_t threads;    /* 0: all */
  int32_t allow_tf32; /* float32 on a GPU: products may be as exact as TF32 only, where that is faster */
  void* stream; /* tensors on cuda: the cudaStream_t that the call's work is queued on; NULL: the default stream */
  const anyflash_tensor* workspace; /* see anyflash_plan_workspace; NULL: the library allocates it */
  int64_t memory_budget;            /* most bytes of workspace; 0: no bound */
  int64_t num_chunks_q;             /* chunks of the queries, a divisor of their number; 0: chosen */
  int64_t num_chunks_kv;            /* the same of the keys */
} anyflash_options;

/* clang-format off */
#define ANYFLASH_OPTIONS_INIT \
  { sizeof(anyflash_options), NULL, 0, 0, 0, 0, 0.0, 0.0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, 0, 0, 0 }
/* clang-format on */

/* Sets all options to their defaults. struct_size is sizeof(anyflash_options). */
anyflash_status anyflash_options_init(anyflash_options* options, size_t struct_size);

/* out must be given; lse, row_sum and row_max may be NULL. */
typedef struct anyflash_outputs {
  const anyflash_tensor* out;
  const anyflash_tensor* lse;
  const anyflash_tensor* row_sum;
  const anyflash_tensor* row_max;
} anyflash_outputs;

/* options may be NULL. k and v are NULL with ANYFLASH_QKV. */
anyflash_status anyflash_forward(const anyflash_tensor* q, const anyflash_tensor* k, const anyflash_tensor* v,
                                 const anyflash_outputs* outputs, const anyflash_options* options);

/* dout, and out and lse of forward; dlse may be NULL. */
typedef struct anyflash_backward_inputs {
  const anyflash_tensor* dout;
  const anyflash_tensor* out;
  const anyflash_tensor* lse;
  const anyflash_tensor* dlse;
} anyflash_backward_inputs;

/* The gradients that are not NULL are computed. */
typedef struct anyflash_gradients {
  const anyflash_tensor* dq;
  const anyflash_tensor* dk;
  const anyflash_tensor* dv;
  const anyflash_tensor* dbias;
  const anyflash_tensor* dsink;
} anyflash_gradients;

anyflash_status anyflash_backward(const anyflash_backward_inputs* inputs, const anyflash_tensor* q,
                                  const anyflash_tensor* k, const anyflash_tensor* v,
                                  const anyflash_gradients* gradients, const anyflash_options* options);

/* Stores the plan in *plan (NULL if it fails). Tables of the rule must outlive it, the rule handle need not. A call
 * that uses the plan must have the same rule; where the rule has tables, the same handle. The tables' values must not
 * change: a call fails where document ids, lengths or a bitmap have changed. A dense mask is not compared. Lengths and
 * tables on a GPU are read by each call and may change. */
anyflash_status anyflash_plan_create(const anyflash_tensor* q, const anyflash_tensor* k, const anyflash_tensor* v,
                                     const anyflash_options* options, anyflash_plan** plan);
/* Bytes of workspace of a call with this plan; for backward with all possible gradients, 0 if there are none (pages).
 * On GPUs they are valid for tensors with the strides and the alignment of those that the plan was made with, and for
 * gradients with the strides of their tensors. Either pointer may be NULL. A caller may pass this memory in
 * anyflash_options: a tensor on the tensors' device, of any shape and type without gaps, that begins on a multiple of
 * 256 bytes. No other call may use it at the same time. */
anyflash_status anyflash_plan_workspace(const anyflash_plan* plan, int64_t* forward, int64_t* backward);
void anyflash_plan_free(anyflash_plan* plan); /* NULL is fine */

/* --- figures ------------------------------------------------------------------------------------------------------ */

typedef struct anyflash_explanation {
  int64_t queries, keys;
  int64_t visible_pairs; /* pairs of a query and a key that it sees */
  int64_t visited_pairs; /* pairs in the tiles that are computed */
  int64_t query_blocks, key_blocks;
  int64_t tiles_skipped, tiles_partial, tiles_full;
  double visited_per_visible; /* 0 if nothing is visible */
  double forward_flops, backward_flops;
  double bytes;            /* of q, k, v, out and lse, one head */
  double dense_mask_bytes; /* the size of the rule as a boolean matrix */
} anyflash_explanation;

/* The figures of a rule (NULL: full) on sequences of 1 to 3 dimensions, for one head of float32 with 64 channels. */
anyflash_status anyflash_explain(const anyflash_rule* rule, int32_t dimensions, const int64_t* q_shape,
                                 const int64_t* k_shape, int32_t align, anyflash_explanation* explanation);

/* --- the tile machine --------------------------------------------------------------------------------------------- */

/* Makes calls on ANYFLASH_TILES use a machine that comes with the library ("ipu-mk2", which is the default, "bow", ...),
 * or that of a file, from the next call on. No other thread may be in a call at the same time. */
anyflash_status anyflash_use_tile_machine(const char* name_or_path);

/* What a call did: TileReport of anyflash/tile_machine.h says what each member is. */
typedef struct anyflash_tile_report {
  int64_t num_chunks_q, num_chunks_kv, grid_rows, grid_columns, chunks_in_flight, head_groups_at_once, waves;
  double cycles, compute_cycles, exchange_cycles, sync_cycles;
  double seconds, predicted_cycles;
  int64_t exchanged_bytes, peak_bytes, peak_tile;
  double multiply_adds, utilisation, busy;
} anyflash_tile_report;

/* Of this thread's last forward or backward call on the tile machine. An error before the first. */
anyflash_status anyflash_last_tile_report(anyflash_tile_report* report);

#ifdef __cplusplus
}
#endif

#endif /* ANYFLASH_C_API_H */
