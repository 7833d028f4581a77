// The last rung: the production library on the GPU, forward and backward.
//
// What it adds to rungs 18 to 25: every element type, layout, rule, alignment, bias and head size; masks on Hopper's
// kernels; persistent thread blocks that take tasks, the longest first; decode; and exact results beside NaN, infinity
// and overflow.
// Measured: what the other rungs are shares of.
#include <anyflash/anyflash.h>

#include "device.h"

namespace {

constexpr anyflash::Device kGpu = {anyflash::DeviceKind::cuda, 0};

// A view of a tensor in GPU memory: (1, heads, [height,] sequence or width, channels).
anyflash::TensorView view(const half* data, const AttentionOf<half>& p, int tokens) {
  const auto type = anyflash::ElementType::float16;
  if (p.width) return {const_cast<half*>(data), type, {1, p.heads, tokens / p.width, p.width, p.d}, kGpu};
  return {const_cast<half*>(data), type, {1, p.heads, tokens, p.d}, kGpu};
}

anyflash::Options options_of(const AttentionOf<half>& p) {
  anyflash::Options options;
  if (p.window) options.rule = anyflash::local(p.window, 0, !p.width);
  if (p.causal) options.rule = anyflash::causal();
  return options;
}

anyflash::TensorView lse_of(const AttentionOf<half>& p) {
  return {p.lse, anyflash::ElementType::float32, {1, p.heads, p.queries}, kGpu};
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) {
  const auto q = view(p->q, *p, p->queries), k = view(p->k, *p, p->keys), v = view(p->v, *p, p->keys);
  if (p->dout) {
    anyflash::BackwardInputs inputs;
    inputs.dout = view(p->dout, *p, p->queries), inputs.out = view(p->out, *p, p->queries), inputs.lse = lse_of(*p);
    anyflash::Gradients gradients;
    gradients.dq = view(p->dq, *p, p->queries);
    gradients.dk = view(p->dk, *p, p->keys), gradients.dv = view(p->dv, *p, p->keys);
    anyflash::backward(inputs, q, k, v, gradients, options_of(*p));
  } else {
    anyflash::ForwardOutputs outputs;
    outputs.out = view(p->out, *p, p->queries), outputs.lse = lse_of(*p);
    anyflash::forward(q, k, v, outputs, options_of(*p));
  }
}
