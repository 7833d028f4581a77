/* Malformed calls of the C API: each gives its status and one clear line, and writes nothing. */
#include <anyflash/c_api.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BATCH = 1, HEADS = 2, QUERIES = 4, KEYS = 6, CHANNELS = 8 };
enum {
  Q_SIZE = BATCH * HEADS * QUERIES * CHANNELS,
  K_SIZE = BATCH * HEADS * KEYS * CHANNELS,
  ROWS = BATCH * HEADS * QUERIES
};

static struct {
  float q[Q_SIZE], k[K_SIZE], v[K_SIZE], dout[Q_SIZE], slopes[ROWS];
  int32_t numbers[16];
  float outputs[2 * Q_SIZE + 2 * K_SIZE + 3 * ROWS];
} memory;
static float* const out = memory.outputs;
static float* const dq = memory.outputs + Q_SIZE;
static float* const dk = memory.outputs + 2 * Q_SIZE;
static float* const dv = memory.outputs + 2 * Q_SIZE + K_SIZE;
static float* const statistics = memory.outputs + 2 * Q_SIZE + 2 * K_SIZE;

/* A call that is right until a case spoils it. */
static struct {
  anyflash_tensor q, k, v, out, lse, row_sum, row_max, dout, forward_out, forward_lse, dq, dk, dv, extra;
  const anyflash_tensor *q_given, *k_given, *v_given;
  anyflash_outputs outputs;
  anyflash_backward_inputs inputs;
  anyflash_gradients gradients;
  anyflash_options options;
} call;

static int failures = 0, cases = 0;

static void tensor(anyflash_tensor* made, void* data, int32_t type, int32_t rank, int64_t a, int64_t b, int64_t c,
                   int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  if (anyflash_tensor_init(made, data, type, rank, shape) != ANYFLASH_OK) {
    printf("tensor: %s\n", anyflash_last_error());
    ++failures;
  }
}

static void reset(void) {
  memset(&memory, 0, sizeof(memory));
  memset(memory.outputs, 0xA5, sizeof(memory.outputs));
  memset(&call, 0, sizeof(call));
  tensor(&call.q, memory.q, ANYFLASH_FLOAT32, 4, BATCH, HEADS, QUERIES, CHANNELS);
  tensor(&call.k, memory.k, ANYFLASH_FLOAT32, 4, BATCH, HEADS, KEYS, CHANNELS);
  tensor(&call.v, memory.v, ANYFLASH_FLOAT32, 4, BATCH, HEADS, KEYS, CHANNELS);
  tensor(&call.out, out, ANYFLASH_FLOAT32, 4, BATCH, HEADS, QUERIES, CHANNELS);
  tensor(&call.lse, statistics, ANYFLASH_FLOAT32, 3, BATCH, HEADS, QUERIES, 0);
  tensor(&call.row_sum, statistics + ROWS, ANYFLASH_FLOAT32, 3, BATCH, HEADS, QUERIES, 0);
  tensor(&call.row_max, statistics + 2 * ROWS, ANYFLASH_FLOAT32, 3, BATCH, HEADS, QUERIES, 0);
  tensor(&call.dout, memory.dout, ANYFLASH_FLOAT32, 4, BATCH, HEADS, QUERIES, CHANNELS);
  tensor(&call.dq, dq, ANYFLASH_FLOAT32, 4, BATCH, HEADS, QUERIES, CHANNELS);
  tensor(&call.dk, dk, ANYFLASH_FLOAT32, 4, BATCH, HEADS, KEYS, CHANNELS);
  tensor(&call.dv, dv, ANYFLASH_FLOAT32, 4, BATCH, HEADS, KEYS, CHANNELS);
  call.q_given = &call.q;
  call.k_given = &call.k;
  call.v_given = &call.v;
  call.outputs.out = &call.out;
  call.outputs.lse = &call.lse;
  call.outputs.row_sum = &call.row_sum;
  call.outputs.row_max = &call.row_max;
  call.forward_out = call.out;
  call.forward_lse = call.lse;
  call.inputs.dout = &call.dout;
  call.inputs.out = &call.forward_out;
  call.inputs.lse = &call.forward_lse;
  call.gradients.dq = &call.dq;
  call.gradients.dk = &call.dk;
  call.gradients.dv = &call.dv;
  anyflash_options_init(&call.options, sizeof(call.options));
}

static anyflash_status forward(void) {
  return anyflash_forward(call.q_given, call.k_given, call.v_given, &call.outputs, &call.options);
}

static anyflash_status backward(void) {
  return anyflash_backward(&call.inputs, call.q_given, call.k_given, call.v_given, &call.gradients, &call.options);
}

static void expect(anyflash_status status, anyflash_status expected, const char* line) {
  ++cases;
  if (status == expected && strcmp(anyflash_last_error(), line) == 0) return;
  printf("expected status %d: %s\n  it gave status %d: %s\n", (int)expected, line, (int)status, anyflash_last_error());
  ++failures;
}

static char before[sizeof(memory)];

/* Spoils the call, runs it, compares status, line and memory. */
#define EXPECT_FAILURE(run, spoil, expected, line)      \
  do {                                                  \
    reset();                                            \
    spoil;                                              \
    memcpy(before, &memory, sizeof(memory));            \
    expect(run, expected, line);                        \
    if (memcmp(before, &memory, sizeof(memory)) != 0) { \
      printf("memory was written: %s\n", line);         \
      ++failures;                                       \
    }                                                   \
  } while (0)

/* The two lines that name the size of the options hold where pointers have 8 bytes. */
typedef char pointers_of_8_bytes[sizeof(void*) == 8 ? 1 : -1];

static void right_calls(void) {
  reset();
  if (forward() != ANYFLASH_OK || backward() != ANYFLASH_OK) {
    printf("the unspoilt call: %s\n", anyflash_last_error());
    ++failures;
  }
}

static void wrong_forward(void) {
  EXPECT_FAILURE(forward(), call.q_given = NULL, ANYFLASH_ERROR_VALUE, "query: not given");
  EXPECT_FAILURE(forward(), call.k_given = NULL, ANYFLASH_ERROR_VALUE, "key: not given");
  EXPECT_FAILURE(forward(), call.v_given = NULL, ANYFLASH_ERROR_VALUE, "value: not given");
  EXPECT_FAILURE(forward(), call.outputs.out = NULL, ANYFLASH_ERROR_VALUE, "out: not given");
  EXPECT_FAILURE(anyflash_forward(&call.q, &call.k, &call.v, NULL, NULL), (void)0, ANYFLASH_ERROR_VALUE,
                 "outputs: null pointer");
  EXPECT_FAILURE(forward(), call.q.rank = 9, ANYFLASH_ERROR_VALUE, "query: rank 9, expected 0 to 8");
  EXPECT_FAILURE(forward(), call.k.rank = -1, ANYFLASH_ERROR_VALUE, "key: rank -1, expected 0 to 8");
  EXPECT_FAILURE(forward(), call.v.type = 8, ANYFLASH_ERROR_VALUE, "value: type: 8, expected 0 to 7");
  EXPECT_FAILURE(forward(), call.v.device = 3, ANYFLASH_ERROR_VALUE, "value: device: 3, expected 0 to 2");
  EXPECT_FAILURE(forward(), call.v.device = ANYFLASH_TILES, ANYFLASH_ERROR_DEVICE, "value: on tiles:0, expected cpu");
#if defined(ANYFLASH_HAS_CUDA)
  EXPECT_FAILURE(forward(), call.q.device = ANYFLASH_CUDA, ANYFLASH_ERROR_DEVICE, "key: on cpu, expected cuda:0");
#else
  EXPECT_FAILURE(forward(), call.q.device = ANYFLASH_CUDA, ANYFLASH_ERROR_DEVICE,
                 "query: on cuda:0, expected cpu, the only device of this build");
#endif
  EXPECT_FAILURE(forward(), call.k.type = ANYFLASH_FLOAT16, ANYFLASH_ERROR_TYPE,
                 "key: type float16, expected float32 as in query");
  EXPECT_FAILURE(forward(), call.k.shape[3] = 4, ANYFLASH_ERROR_VALUE, "key: head size 4, expected 8 as in query");
  EXPECT_FAILURE(forward(), call.k.data = NULL, ANYFLASH_ERROR_VALUE, "key: data pointer null, expected 96 elements");
  EXPECT_FAILURE(forward(), call.out.strides[2] = 0, ANYFLASH_ERROR_VALUE,
                 "out: strides (64, 32, 0, 1) for shape (1, 2, 4, 8), expected a place of its own for each element");
  EXPECT_FAILURE(forward(), call.out.data = memory.q, ANYFLASH_ERROR_VALUE,
                 "out: shares memory with query, expected memory of its own");
  EXPECT_FAILURE(forward(), call.lse.shape[2] = 3, ANYFLASH_ERROR_VALUE, "lse: shape (1, 2, 3), expected (1, 2, 4)");
  EXPECT_FAILURE(forward(), call.row_max.type = ANYFLASH_INT32, ANYFLASH_ERROR_TYPE,
                 "row_max: type int32, expected float32");
}

static void wrong_options(void) {
  EXPECT_FAILURE(forward(), call.options.struct_size = 12, ANYFLASH_ERROR_VALUE,
                 "options: struct_size 12, expected 160 as anyflash_options_init sets it");
  EXPECT_FAILURE(forward(), call.options.align = 4, ANYFLASH_ERROR_VALUE, "align: 4, expected 0 to 3");
  EXPECT_FAILURE(forward(), call.options.layout = -1, ANYFLASH_ERROR_VALUE, "layout: -1, expected 0 to 4");
  EXPECT_FAILURE(forward(), (call.options.has_scale = 1, call.options.scale = NAN), ANYFLASH_ERROR_VALUE,
                 "scale: nan, expected a finite float32");
  EXPECT_FAILURE(forward(), call.options.softcap = -2, ANYFLASH_ERROR_VALUE,
                 "softcap: -2, expected 0 (none) or a positive float32");
  EXPECT_FAILURE(forward(), call.options.memory_budget = -1, ANYFLASH_ERROR_VALUE,
                 "memory_budget: -1, expected a number of bytes");
  EXPECT_FAILURE(forward(), call.options.num_chunks_q = -2, ANYFLASH_ERROR_VALUE,
                 "num_chunks_q: -2, expected a divisor of 4 queries: 1, 2, 4");
  EXPECT_FAILURE(forward(), call.options.num_chunks_kv = -2, ANYFLASH_ERROR_VALUE,
                 "num_chunks_kv: -2, expected a divisor of 6 keys: 1, 2, 3, 6");
  EXPECT_FAILURE(forward(), call.options.threads = -1, ANYFLASH_ERROR_VALUE, "threads: -1, expected 0 (all) to 65536");
  EXPECT_FAILURE(forward(),
                 (tensor(&call.extra, memory.slopes, ANYFLASH_FLOAT32, 1, 3, 0, 0, 0), call.options.sink = &call.extra),
                 ANYFLASH_ERROR_VALUE, "sink: shape (3), expected (2)");
  EXPECT_FAILURE(forward(),
                 (tensor(&call.extra, memory.numbers, ANYFLASH_INT32, 1, 1, 0, 0, 0), memory.numbers[0] = 7,
                  call.options.key_lengths = &call.extra),
                 ANYFLASH_ERROR_VALUE, "key_lengths: 7 for batch entry 0, expected 0 to 6");
  EXPECT_FAILURE(
      forward(),
      (tensor(&call.extra, memory.numbers, ANYFLASH_INT32, 1, 2, 0, 0, 0), call.options.cu_seqlens_q = &call.extra),
      ANYFLASH_ERROR_VALUE, "cu_seqlens_q: given with layout bhsd, expected only with thd");
  EXPECT_FAILURE(anyflash_options_init(NULL, sizeof(anyflash_options)), (void)0, ANYFLASH_ERROR_VALUE,
                 "options: null pointer");
  EXPECT_FAILURE(anyflash_options_init(&call.options, 3), (void)0, ANYFLASH_ERROR_VALUE,
                 "struct_size: 3, expected 160");
}

static void wrong_workspace(void) {
  int64_t bytes = -1;
  EXPECT_FAILURE(forward(),
                 (tensor(&call.extra, memory.q, ANYFLASH_FLOAT32, 1, 1, 0, 0, 0), call.extra.device = ANYFLASH_CUDA,
                  call.options.workspace = &call.extra),
                 ANYFLASH_ERROR_DEVICE, "workspace: on cuda:0, expected cpu");
  EXPECT_FAILURE(anyflash_plan_workspace(NULL, &bytes, NULL), (void)0, ANYFLASH_ERROR_VALUE, "plan: null pointer");
}

static void wrong_backward(void) {
  EXPECT_FAILURE(backward(), call.inputs.dout = NULL, ANYFLASH_ERROR_VALUE, "dout: not given");
  EXPECT_FAILURE(backward(), call.inputs.lse = NULL, ANYFLASH_ERROR_VALUE, "lse: not given");
  EXPECT_FAILURE(backward(), call.dq.shape[1] = 1, ANYFLASH_ERROR_VALUE,
                 "dq: shape (1, 1, 4, 8), expected (1, 2, 4, 8)");
  EXPECT_FAILURE(backward(), call.dv.data = dk, ANYFLASH_ERROR_VALUE,
                 "dv: shares memory with dk, expected memory of its own");
  EXPECT_FAILURE(backward(), call.gradients.dsink = &call.dq, ANYFLASH_ERROR_VALUE, "dsink: given without sink");
  EXPECT_FAILURE(anyflash_backward(NULL, &call.q, &call.k, &call.v, &call.gradients, NULL), (void)0,
                 ANYFLASH_ERROR_VALUE, "inputs: null pointer");
  EXPECT_FAILURE(anyflash_backward(&call.inputs, &call.q, &call.k, &call.v, NULL, NULL), (void)0, ANYFLASH_ERROR_VALUE,
                 "gradients: null pointer");
}

static void wrong_rules(void) {
  const int64_t even[2] = {8, 4};
  anyflash_rule* rule = NULL;
  EXPECT_FAILURE(anyflash_rule_full(NULL), (void)0, ANYFLASH_ERROR_VALUE, "rule: null pointer");
  EXPECT_FAILURE(anyflash_rule_local(0, 0, 0, &rule), (void)0, ANYFLASH_ERROR_VALUE,
                 "rule local: window 0, expected at least 1");
  EXPECT_FAILURE(anyflash_rule_window(0, even, even, &rule), (void)0, ANYFLASH_ERROR_VALUE,
                 "dimensions: 0, expected 1 to 3");
  EXPECT_FAILURE(anyflash_rule_window(1, NULL, even, &rule), (void)0, ANYFLASH_ERROR_VALUE, "left: null pointer");
  EXPECT_FAILURE(anyflash_rule_tiles(2, even, even, &rule), (void)0, ANYFLASH_ERROR_VALUE,
                 "rule tiles: kernel 8, expected an odd number");
  EXPECT_FAILURE(anyflash_rule_neighbourhood(2, NULL, NULL, NULL, &rule), (void)0, ANYFLASH_ERROR_VALUE,
                 "kernel: null pointer");
  EXPECT_FAILURE(anyflash_rule_dense(NULL, &rule), (void)0, ANYFLASH_ERROR_VALUE, "rule dense: mask not given");
  EXPECT_FAILURE(anyflash_rule_blocks(&call.q, 1, 1, &rule), (void)0, ANYFLASH_ERROR_TYPE,
                 "rule blocks: bitmap type float32, expected boolean or uint8");
  EXPECT_FAILURE(anyflash_rule_and(NULL, NULL, &rule), (void)0, ANYFLASH_ERROR_VALUE, "a: null pointer");
  EXPECT_FAILURE(anyflash_rule_not(NULL, &rule), (void)0, ANYFLASH_ERROR_VALUE, "a: null pointer");
  EXPECT_FAILURE(anyflash_rule_parse(NULL, &rule), (void)0, ANYFLASH_ERROR_VALUE, "text: null pointer");
  EXPECT_FAILURE(anyflash_rule_text(NULL, NULL, 0, NULL), (void)0, ANYFLASH_ERROR_VALUE, "rule: null pointer");
  if (rule != NULL) {
    printf("a rule that failed was stored\n");
    ++failures;
  }
}

static void wrong_plans(void) {
  const int64_t shape[1] = {-4};
  anyflash_explanation explanation;
  anyflash_plan* plan = NULL;
  anyflash_rule* causal = NULL;
  EXPECT_FAILURE(anyflash_plan_create(&call.q, &call.k, &call.v, NULL, NULL), (void)0, ANYFLASH_ERROR_VALUE,
                 "plan: null pointer");
  EXPECT_FAILURE(anyflash_plan_create(&call.q, NULL, &call.v, NULL, &plan), (void)0, ANYFLASH_ERROR_VALUE,
                 "key: not given");
  EXPECT_FAILURE(anyflash_explain(NULL, 1, shape, NULL, 0, &explanation), (void)0, ANYFLASH_ERROR_VALUE,
                 "k_shape: null pointer");
  EXPECT_FAILURE(anyflash_explain(NULL, 4, shape, shape, 0, &explanation), (void)0, ANYFLASH_ERROR_VALUE,
                 "dimensions: 4, expected 1 to 3");
  EXPECT_FAILURE(anyflash_explain(NULL, 1, shape, shape, 0, NULL), (void)0, ANYFLASH_ERROR_VALUE,
                 "explanation: null pointer");
  EXPECT_FAILURE(anyflash_explain(NULL, 1, shape, shape, 0, &explanation), (void)0, ANYFLASH_ERROR_VALUE,
                 "q_shape: (-4), expected sizes from 0 to 2147483647");
  reset();
  anyflash_rule_causal(&causal);
  call.options.rule = causal;
  if (anyflash_plan_create(&call.q, &call.k, &call.v, &call.options, &plan) != ANYFLASH_OK) ++failures;
  EXPECT_FAILURE(forward(), call.options.plan = plan, ANYFLASH_ERROR_VALUE,
                 "plan: made for rule causal(), the call has full()");
  anyflash_plan_free(plan);
  anyflash_plan_free(NULL);
  anyflash_rule_free(causal);
  anyflash_rule_free(NULL);
}

static void wrong_tensors(void) {
  const int64_t shape[2] = {(int64_t)1 << 40, (int64_t)1 << 40};
  anyflash_tensor made;
  EXPECT_FAILURE(anyflash_tensor_init(NULL, memory.q, ANYFLASH_FLOAT32, 2, shape), (void)0, ANYFLASH_ERROR_VALUE,
                 "tensor: null pointer");
  EXPECT_FAILURE(anyflash_tensor_init(&made, memory.q, ANYFLASH_FLOAT32, 9, shape), (void)0, ANYFLASH_ERROR_VALUE,
                 "tensor: rank 9, expected 0 to 8");
  EXPECT_FAILURE(anyflash_tensor_init(&made, memory.q, 17, 2, shape), (void)0, ANYFLASH_ERROR_VALUE,
                 "type: 17, expected 0 to 7");
  EXPECT_FAILURE(anyflash_tensor_init(&made, memory.q, ANYFLASH_FLOAT32, 2, NULL), (void)0, ANYFLASH_ERROR_VALUE,
                 "shape: null pointer");
  EXPECT_FAILURE(anyflash_tensor_init(&made, memory.q, ANYFLASH_FLOAT32, 2, shape), (void)0, ANYFLASH_ERROR_VALUE,
                 "tensor: a shape of more than 2^63 elements");
}

int main(void) {
  if (strcmp(anyflash_last_error(), "") != 0) ++failures;
  right_calls();
  wrong_forward();
  wrong_options();
  wrong_workspace();
  wrong_backward();
  wrong_rules();
  wrong_plans();
  wrong_tensors();
  printf("%d malformed calls, %d failures\n", cases, failures);
  return failures != 0;
}
