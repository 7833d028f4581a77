/* The C API gives what the formula gives: every rule, every option, checked against loops that share nothing with the
 * library. */
#define _POSIX_C_SOURCE 200112L /* setenv, posix_memalign */
#include <anyflash/c_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 24, H = 2, D = 6 };

static double q[H][N][D], k[H][N][D], v[H][N][D], out[H][N][D], lse[H][N], row_sum[H][N], row_max[H][N];
static double bias[N][N], slopes[H], sink[H];
static anyflash_tensor tq, tk, tv, tout, tlse, tsum, tmax, tbias, tslopes, tsink;
static int failures = 0;

static void must(anyflash_status status, const char* what) {
  if (status == ANYFLASH_OK) return;
  printf("%s: status %d: %s\n", what, (int)status, anyflash_last_error());
  ++failures;
}

static void tensor(anyflash_tensor* made, void* data, int32_t type, int32_t rank, int64_t a, int64_t b, int64_t c,
                   int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  must(anyflash_tensor_init(made, data, type, rank, shape), "tensor");
}

static void set_up(void) {
  for (int h = 0; h < H; ++h) {
    slopes[h] = 0.125 * (h + 1);
    sink[h] = 0.5 - h;
    for (int i = 0; i < N; ++i) {
      for (int c = 0; c < D; ++c) {
        const int at = (h * N + i) * D + c;
        q[h][i][c] = sin(0.7 * at), k[h][i][c] = cos(1.9 * at), v[h][i][c] = sin(2.3 * at + 1);
      }
    }
  }
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) bias[i][j] = sin(i - 0.4 * j);
  }
  tensor(&tq, q, ANYFLASH_FLOAT64, 4, 1, H, N, D);
  tensor(&tk, k, ANYFLASH_FLOAT64, 4, 1, H, N, D);
  tensor(&tv, v, ANYFLASH_FLOAT64, 4, 1, H, N, D);
  tensor(&tout, out, ANYFLASH_FLOAT64, 4, 1, H, N, D);
  tensor(&tlse, lse, ANYFLASH_FLOAT64, 3, 1, H, N, 0);
  tensor(&tsum, row_sum, ANYFLASH_FLOAT64, 3, 1, H, N, 0);
  tensor(&tmax, row_max, ANYFLASH_FLOAT64, 3, 1, H, N, 0);
  tensor(&tbias, bias, ANYFLASH_FLOAT64, 4, 1, 1, N, N);
  tensor(&tslopes, slopes, ANYFLASH_FLOAT64, 1, H, 0, 0, 0);
  tensor(&tsink, sink, ANYFLASH_FLOAT64, 1, H, 0, 0, 0);
}

typedef int (*sees_function)(int i, int j);

static void near(double found, double expected, const char* what, const char* where) {
  if (found == expected || fabs(found - expected) <= 1e-12 * (1 + fabs(expected))) return;
  printf("%s: %s %.17g, expected %.17g\n", where, what, found, expected);
  ++failures;
}

/* Compares the last forward with the formula. */
static void compare(sees_function sees, const anyflash_options* options, const char* name) {
  const double scale = options->has_scale ? options->scale : 1 / sqrt((double)D);
  for (int h = 0; h < H; ++h) {
    for (int i = 0; i < N; ++i) {
      double score[N], m = -INFINITY, l = 0, sum[D] = {0};
      int visible = 0;
      for (int j = 0; j < N; ++j) {
        if (!sees(i, j)) continue;
        score[j] = 0;
        for (int c = 0; c < D; ++c) score[j] += scale * q[h][i][c] * k[h][j][c];
        if (options->softcap > 0) score[j] = options->softcap * tanh(score[j] / options->softcap);
        if (options->bias) score[j] += bias[i][j];
        if (options->alibi_slopes) score[j] -= slopes[h] * abs(i - j);
        m = fmax(m, score[j]);
        ++visible;
      }
      if (visible && options->sink) m = fmax(m, sink[h]), l = exp(sink[h] - m);
      for (int j = 0; j < N; ++j) {
        if (!sees(i, j)) continue;
        l += exp(score[j] - m);
        for (int c = 0; c < D; ++c) sum[c] += exp(score[j] - m) * v[h][j][c];
      }
      for (int c = 0; c < D; ++c) near(out[h][i][c], visible ? sum[c] / l : 0, "out", name);
      near(row_max[h][i], m, "row_max", name);
      near(row_sum[h][i], l, "row_sum", name);
      near(lse[h][i], visible ? m + log(l) : -INFINITY, "lse", name);
    }
  }
}

static void check(const anyflash_options* options, sees_function sees, const char* name) {
  const anyflash_outputs outputs = {&tout, &tlse, &tsum, &tmax};
  memset(out, 0xA5, sizeof(out));
  must(anyflash_forward(&tq, &tk, &tv, &outputs, options), name);
  compare(sees, options, name);
}

/* Checks a rule, its text read back if it has no tables, and frees it. */
static void check_rule(anyflash_status made, anyflash_rule* const* made_rule, sees_function sees, const char* text) {
  anyflash_options options = ANYFLASH_OPTIONS_INIT;
  char found[200];
  size_t needed = 0;
  anyflash_rule* const rule = *made_rule;
  must(made, text);
  options.rule = rule;
  check(&options, sees, text);
  must(anyflash_rule_text(rule, found, sizeof(found), &needed), text);
  if (strcmp(found, text) != 0 || needed != strlen(text) + 1) {
    printf("text %s of %d, expected %s\n", found, (int)needed, text);
    ++failures;
  }
  anyflash_rule_free(rule);
}

static int sees_all(int i, int j) { return i >= 0 && j >= 0; }
static int sees_causal(int i, int j) { return i >= j; }
static int sees_local(int i, int j) { return i >= j && (i - j) % 2 == 0 && (i - j) / 2 < 3; }
static int sees_window(int i, int j) { return j - i >= -4 && j - i <= 2; }
static int sees_prefix(int i, int j) { return i >= 0 && j < 5; }
static int sees_prefix_queries(int i, int j) { return i < 5 && j >= 0; }
static int sees_tiles(int i, int j) {
  int centre = i / 4;
  if (centre < 1) centre = 1;
  if (centre > 4) centre = 4;
  return abs(j / 4 - centre) <= 1;
}
static int sees_neighbourhood(int i, int j) { return i % 2 == j % 2 && j / 2 <= i / 2 && j / 2 > i / 2 - 3; }
static int sees_blocks(int i, int j) { return (i / 8 + j / 8) % 2 == 0; }
static int sees_mask(int i, int j) { return (i * 7 + j * 3) % 5 < 2; }
static int sees_document(int i, int j) { return (i < 10) == (j < 10); }
static int sees_both(int i, int j) { return (sees_causal(i, j) && sees_window(i, j)) || !sees_prefix(i, j); }

static void check_rules(void) {
  const int64_t left[1] = {4}, right[1] = {2}, tile[1] = {4}, kernel[1] = {3}, dilation[1] = {2}, causal[1] = {1};
  anyflash_rule *rule = NULL, *a = NULL, *b = NULL, *c = NULL;
  check_rule(anyflash_rule_full(&rule), &rule, sees_all, "full()");
  check_rule(anyflash_rule_causal(&rule), &rule, sees_causal, "causal()");
  check_rule(anyflash_rule_local(3, 1, 1, &rule), &rule, sees_local, "local(3, log2_stride=1, causal=true)");
  check_rule(anyflash_rule_window(1, left, right, &rule), &rule, sees_window, "window(4, 2)");
  check_rule(anyflash_rule_prefix(5, &rule), &rule, sees_prefix, "prefix(5)");
  check_rule(anyflash_rule_prefix_queries(5, &rule), &rule, sees_prefix_queries, "prefix_queries(5)");
  check_rule(anyflash_rule_sink(5, &rule), &rule, sees_prefix, "sink(5)");
  check_rule(anyflash_rule_tiles(1, tile, kernel, &rule), &rule, sees_tiles, "tiles(4, 3)");
  check_rule(anyflash_rule_neighbourhood(1, kernel, dilation, causal, &rule), &rule, sees_neighbourhood,
             "neighbourhood(3, dilation=2, causal=1)");
  check_rule(anyflash_rule_parse("causal() & window(4, 2) | ~prefix(5)", &rule), &rule, sees_both,
             "causal() & window(4, 2) | ~prefix(5)");

  must(anyflash_rule_causal(&a), "causal");
  must(anyflash_rule_window(1, left, right, &b), "window");
  must(anyflash_rule_and(a, b, &c), "and");
  anyflash_rule_free(a), anyflash_rule_free(b);
  must(anyflash_rule_prefix(5, &b), "prefix");
  must(anyflash_rule_not(b, &a), "not");
  check_rule(anyflash_rule_or(c, a, &rule), &rule, sees_both, "causal() & window(4, 2) | ~prefix(5)");
  anyflash_rule_free(a), anyflash_rule_free(b), anyflash_rule_free(c);
}

static void check_tables(void) {
  static uint8_t bitmap[3][3], mask[N][N];
  static int32_t ids[N], lengths[3] = {0, 10, N};
  anyflash_tensor table;
  anyflash_rule* rule = NULL;
  for (int i = 0; i < N; ++i) {
    ids[i] = i < 10 ? 70 : -3;
    for (int j = 0; j < N; ++j)
      mask[i][j] = (uint8_t)sees_mask(i, j), bitmap[i / 8][j / 8] = (uint8_t)sees_blocks(i, j);
  }
  tensor(&table, bitmap, ANYFLASH_BOOLEAN, 2, 3, 3, 0, 0);
  check_rule(anyflash_rule_blocks(&table, 8, 8, &rule), &rule, sees_blocks, "blocks((3, 3), 8, 8)");
  tensor(&table, mask, ANYFLASH_UINT8, 2, N, N, 0, 0);
  check_rule(anyflash_rule_dense(&table, &rule), &rule, sees_mask, "dense((24, 24))");
  tensor(&table, ids, ANYFLASH_INT32, 1, N, 0, 0, 0);
  check_rule(anyflash_rule_documents(&table, &table, &rule), &rule, sees_document, "documents((24), (24))");
  tensor(&table, lengths, ANYFLASH_INT32, 1, 3, 0, 0, 0);
  check_rule(anyflash_rule_documents_packed(&table, &table, &rule), &rule, sees_document, "documents_packed((3), (3))");
}

static int sees_nine(int i, int j) { return i >= 0 && j < 9; }

/* A call in memory of the caller's, as much as the plan says. */
static void check_workspace(anyflash_options* options, const anyflash_plan* plan) {
  anyflash_tensor workspace;
  int64_t forward = 0, backward = 0;
  void* memory = NULL;
  must(anyflash_plan_workspace(plan, &forward, &backward), "plan_workspace");
  must(anyflash_plan_workspace(plan, NULL, NULL), "plan_workspace of nothing");
  if (forward <= 0 || backward <= 0 || posix_memalign(&memory, 256, (size_t)forward) != 0) {
    printf("workspace: %d and %d bytes\n", (int)forward, (int)backward);
    ++failures;
    return;
  }
  tensor(&workspace, memory, ANYFLASH_UINT8, 1, forward, 0, 0, 0);
  options->workspace = &workspace;
  check(options, sees_causal, "workspace");
  options->workspace = NULL;
  free(memory);
}

/* A budget that is too small: the error names the least that works, and that works. */
static void check_budget(anyflash_options* options) {
  const anyflash_outputs outputs = {&tout, &tlse, &tsum, &tmax};
  const char* const expected = "memory_budget: 1 bytes, expected at least ";
  options->memory_budget = 1;
  const anyflash_status status = anyflash_forward(&tq, &tk, &tv, &outputs, options);
  const char* const line = anyflash_last_error();
  if (status != ANYFLASH_ERROR_VALUE || strncmp(line, expected, strlen(expected)) != 0) {
    printf("budget of one byte: status %d: %s\n", (int)status, line);
    ++failures;
    return;
  }
  options->memory_budget = strtoll(line + strlen(expected), NULL, 10);
  check(options, sees_all, "the least budget");
}

static void check_options(void) {
  static int64_t length[1] = {9};
  anyflash_tensor lengths;
  anyflash_options options = ANYFLASH_OPTIONS_INIT;
  anyflash_plan* plan = NULL;
  anyflash_rule* causal = NULL;
  check(&options, sees_all, "defaults");
  options.has_scale = 1, options.scale = -0.7, options.softcap = 1.5;
  check(&options, sees_all, "scale, softcap");
  options.bias = &tbias, options.alibi_slopes = &tslopes, options.sink = &tsink, options.threads = 1,
  options.deterministic = 1, options.allow_tf32 = 1;
  options.num_chunks_q = 3, options.num_chunks_kv = 2;
  check_budget(&options);
  options.memory_budget = 0;
  check(&options, sees_all, "bias, slopes, sink");
  must(anyflash_rule_causal(&causal), "causal");
  options.rule = causal;
  must(anyflash_plan_create(&tq, &tk, &tv, &options, &plan), "plan");
  options.plan = plan;
  check(&options, sees_causal, "plan");
  check_workspace(&options, plan);
  anyflash_plan_free(plan);
  anyflash_rule_free(causal);
  must(anyflash_options_init(&options, sizeof(options)), "options");
  tensor(&lengths, length, ANYFLASH_INT64, 1, 1, 0, 0, 0);
  options.key_lengths = &lengths;
  check(&options, sees_nine, "key_lengths");
}

static int sees_shifted(int i, int j) { return i + 14 >= j; }

static void check_figures(void) {
  const int64_t queries[1] = {10}, keys[1] = {N};
  int64_t visible = 0;
  anyflash_explanation found;
  anyflash_rule* causal = NULL;
  for (int i = 0; i < 10; ++i) {
    for (int j = 0; j < N; ++j) visible += sees_shifted(i, j);
  }
  must(anyflash_rule_causal(&causal), "causal");
  must(anyflash_explain(causal, 1, queries, keys, ANYFLASH_NONE_END, &found), "explain");
  if (found.queries != 10 || found.keys != N || found.visible_pairs != visible || found.visited_pairs < visible ||
      found.tiles_partial != 1 || found.forward_flops != 256.0 * (double)visible ||
      found.dense_mask_bytes != 10.0 * N) {
    printf("explain: not the figures expected\n");
    ++failures;
  }
  anyflash_rule_free(causal);
}

/* The same call on the tile machine, in float32. */
static void check_tiles(void) {
  static float numbers[4][H][N][D];
  anyflash_tensor of[4];
  anyflash_tile_report report;
  if (anyflash_last_tile_report(&report) != ANYFLASH_ERROR_VALUE ||
      anyflash_use_tile_machine("nonsense") != ANYFLASH_ERROR_VALUE) {
    printf("a report before the first call, or an unknown machine: no error\n");
    ++failures;
  }
  must(anyflash_use_tile_machine("bow"), "tile machine");
  for (int n = 0; n < 4; ++n) {
    tensor(&of[n], numbers[n], ANYFLASH_FLOAT32, 4, 1, H, N, D);
    of[n].device = ANYFLASH_TILES;
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i)
      for (int c = 0; c < D; ++c) {
        numbers[0][h][i][c] = (float)q[h][i][c];
        numbers[1][h][i][c] = (float)k[h][i][c];
        numbers[2][h][i][c] = (float)v[h][i][c];
      }
  const anyflash_outputs outputs = {&of[3], NULL, NULL, NULL}, expected = {&tout, NULL, NULL, NULL};
  must(anyflash_forward(&of[0], &of[1], &of[2], &outputs, NULL), "tiles");
  must(anyflash_forward(&tq, &tk, &tv, &expected, NULL), "cpu");
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i)
      for (int c = 0; c < D; ++c)
        if (fabs(numbers[3][h][i][c] - out[h][i][c]) > 1e-5) ++failures;
  must(anyflash_last_tile_report(&report), "report");
  if (!(report.cycles > 0) || report.peak_bytes <= 0 || report.utilisation <= 0 || report.utilisation >= 1) {
    printf("tiles: not the figures expected\n");
    ++failures;
  }
}

/* The first question, since the choice is made once. */
static void check_instruction_set(void) {
  setenv("ANYFLASH_ISA", "nonsense", 1);
  if (anyflash_instruction_set() != NULL || strstr(anyflash_last_error(), "nonsense does not run here") == NULL) {
    printf("an unknown instruction set: %s\n", anyflash_last_error());
    ++failures;
  }
  unsetenv("ANYFLASH_ISA");
}

int main(void) {
  check_instruction_set();
  set_up();
  check_rules();
  check_tables();
  check_options();
  check_figures();
  check_tiles();
  printf("anyflash %s on %s: %d failures\n", anyflash_version(), anyflash_instruction_set(), failures);
  return failures != 0;
}
