/* The gradient of causal attention by an installed anyflash, in C, next to the formula written out in loops. */
#include <anyflash/c_api.h>
#include <math.h>
#include <stdio.h>

enum { N = 19, D = 5 };

static double q[N][D], k[N][D], v[N][D], out[N][D], lse[N], dout[N][D], dq[N][D], dk[N][D], dv[N][D];
static double expected_dq[N][D], expected_dk[N][D], expected_dv[N][D];

static double dot(const double* a, const double* b) {
  double sum = 0;
  for (int c = 0; c < D; ++c) sum += a[c] * b[c];
  return sum;
}

/* dV = P^T dO, dS = P (dO V^T - rowsum(P dO V^T)), dQ = scale dS K, dK = scale dS^T Q. */
static void loops(void) {
  const double scale = 1 / sqrt((double)D);
  for (int i = 0; i < N; ++i) {
    double p[N], dp[N], sum = 0, mean = 0;
    for (int j = 0; j <= i; ++j) sum += p[j] = exp(scale * dot(q[i], k[j]));
    for (int j = 0; j <= i; ++j) {
      p[j] /= sum;
      dp[j] = dot(dout[i], v[j]);
      mean += p[j] * dp[j];
    }
    for (int j = 0; j <= i; ++j) {
      for (int c = 0; c < D; ++c) {
        expected_dv[j][c] += p[j] * dout[i][c];
        expected_dq[i][c] += scale * p[j] * (dp[j] - mean) * k[j][c];
        expected_dk[j][c] += scale * p[j] * (dp[j] - mean) * q[i][c];
      }
    }
  }
}

static double difference(double a[N][D], double b[N][D]) {
  double largest = 0;
  for (int i = 0; i < N; ++i) {
    for (int c = 0; c < D; ++c) largest = fmax(largest, fabs(a[i][c] - b[i][c]));
  }
  return largest;
}

static int must(anyflash_status status) {
  if (status != ANYFLASH_OK) printf("%s\n", anyflash_last_error());
  return status != ANYFLASH_OK;
}

int main(void) {
  const int64_t shape[4] = {1, 1, N, D};
  anyflash_tensor tq, tk, tv, to, tl, tdo, tdq, tdk, tdv;
  anyflash_options options = ANYFLASH_OPTIONS_INIT;
  anyflash_rule* causal = NULL;
  for (int i = 0; i < N; ++i) {
    for (int c = 0; c < D; ++c) {
      q[i][c] = sin(1.7 * (i * D + c)), k[i][c] = cos(0.9 * (i * D + c)), v[i][c] = sin(0.3 * i + c),
      dout[i][c] = cos(2.2 * i - c);
    }
  }
  loops();

  int failed = 0;
  failed |= must(anyflash_tensor_init(&tq, q, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&tk, k, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&tv, v, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&to, out, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&tl, lse, ANYFLASH_FLOAT64, 3, shape));
  failed |= must(anyflash_tensor_init(&tdo, dout, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&tdq, dq, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&tdk, dk, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_tensor_init(&tdv, dv, ANYFLASH_FLOAT64, 4, shape));
  failed |= must(anyflash_rule_causal(&causal));
  options.rule = causal;
  const anyflash_outputs outputs = {&to, &tl, NULL, NULL};
  const anyflash_backward_inputs inputs = {&tdo, &to, &tl, NULL};
  const anyflash_gradients gradients = {&tdq, &tdk, &tdv, NULL, NULL};
  failed |= must(anyflash_forward(&tq, &tk, &tv, &outputs, &options));
  failed |= must(anyflash_backward(&inputs, &tq, &tk, &tv, &gradients, &options));
  anyflash_rule_free(causal);

  const double largest =
      fmax(difference(dq, expected_dq), fmax(difference(dk, expected_dk), difference(dv, expected_dv)));
  printf("anyflash %s on %s: largest error %g\n", anyflash_version(), anyflash_instruction_set(), largest);
  return failed || !(largest < 1e-12);
}
