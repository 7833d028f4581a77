// The last rung: the production library, forward and backward.
//
// What it adds to rungs 12 to 18: every element type, layout, rule, alignment and bias; few queries at once without
// copies (decode); tiles of the size that the rule and the caches want, words shared by tiles; the best code for the
// processor at run time; exact results beside NaN, infinity and overflow; backward on threads with the same bits.
// Measured: what the other rungs are shares of.
#include <anyflash/anyflash.h>

#include "../rung.h"

namespace {

using anyflash::ElementType;

// A view of a tensor of a rung: (1, heads, [height,] sequence or width, channels).
anyflash::TensorView view(const float* data, const Attention& p, int tokens) {
  auto* mutable_data = const_cast<float*>(data);
  if (p.width) return {mutable_data, ElementType::float32, {1, p.heads, tokens / p.width, p.width, p.d}};
  return {mutable_data, ElementType::float32, {1, p.heads, tokens, p.d}};
}

anyflash::Options options_of(const Attention& p) {
  anyflash::Options options;
  if (p.window) options.rule = anyflash::local(p.window, 0, !p.width);
  if (p.causal) options.rule = anyflash::causal();
  return options;
}

anyflash::TensorView lse_of(const Attention& p) { return {p.lse, ElementType::float32, {1, p.heads, p.queries}}; }

}  // namespace

extern "C" void rung(const Attention* p) {
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
