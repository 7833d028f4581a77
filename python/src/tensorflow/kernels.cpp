// The kernels: the same code for CPUs and GPUs, which differ in where the tensors are and in what a call waits for.
#include <algorithm>

#include "call.h"
#include "definitions.h"
#include "gpu.h"

namespace anyflash::tensorflow {
namespace {

ElementType statistic_type(const TensorView& q) {
  return q.type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
}

/// The same memory in another shape; throws Error if that has another size.
TensorView reshaped(TensorView view, const std::vector<std::int64_t>& shape, const char* name) {
  const auto elements = view.elements();
  view.rank = int(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  view.set_row_major_strides();
  if (view.elements() != elements) {
    throw Error(Error::Kind::value, std::string(name) + ": " + std::to_string(elements) + " numbers, expected " +
                                        std::to_string(view.elements()));
  }
  return view;
}

/// out and statistics: nothing, lse, or l and m.
void run_forward(const Text& text, Context& context) {
  const Call call(text, context);
  const auto shapes = result_shapes(call.q, call.k, call.v, call.options);  // checks the call
  ForwardOutputs outputs;
  outputs.out = call.like_out(context.make(call.shape_of_out(shapes), call.q.type, "out"), "out");
  const auto rows = [&](const char* name) {
    return reshaped(context.make(call.shape_of_rows(shapes), statistic_type(call.q), name).view, shapes.lse, name);
  };
  const int statistics = context.outputs() - 1;
  if (statistics == 1) outputs.lse = rows("lse");
  if (statistics == 2) {
    outputs.row_sum = rows("l");
    outputs.row_max = rows("m");
  }
  const GpuTurn turn(call.q.device);
  forward(call.q, call.k, call.v, outputs, call.options);
  turn.finish();
}

/// A new output for the gradient of a tensor, and the library's view of it.
TensorView gradient(Context& context, const std::vector<std::int64_t>& shape, const TensorView& as_seen,
                    const char* name) {
  auto view = as_seen;
  view.data = context.make(shape, as_seen.type, name).view.data;
  return view;
}

void run_backward(const Text& text, Context& context) {
  const Call call(text, context);
  const auto shapes = result_shapes(call.q, call.k, call.v, call.options);
  BackwardInputs inputs;
  inputs.dout = call.like_out(context.next_shaped("dout"), "dout");
  inputs.out = call.like_out(context.next_shaped("out"), "out");
  inputs.lse = reshaped(context.next_shaped("lse").view, shapes.lse, "lse");
  if (context.has_more()) inputs.dlse = reshaped(context.next_shaped("dlse").view, shapes.lse, "dlse");
  backward(inputs, call.q, call.k, call.v, {}, call.options);  // no gradient is wanted: this only checks the call

  Gradients gradients;
  gradients.dq = gradient(context, call.given[0].shape, call.q, "dq");
  gradients.dk = gradient(context, call.given[1].shape, call.k, "dk");
  gradients.dv = gradient(context, call.given[2].shape, call.v, "dv");
  for (const auto& term : call.terms) {
    (term.name == "bias" ? gradients.dbias : gradients.dsink) = gradient(
        context, {term.view.shape.begin(), term.view.shape.begin() + term.view.rank}, term.view, term.name.c_str());
  }
  const GpuTurn turn(call.q.device);
  backward(inputs, call.q, call.k, call.v, gradients, call.options);
  turn.finish();
}

void* create(TF_OpKernelConstruction* construction) {
  Status status;
  try {
    std::int32_t list_size = 0, size = 0;
    TF_OpKernelConstruction_GetAttrSize(construction, "call", &list_size, &size, status);
    status.check("call");
    std::string text(std::size_t(size), '\0');
    TF_OpKernelConstruction_GetAttrString(construction, "call", text.data(), text.size(), status);
    status.check("call");
    return new Text(text);
  } catch (...) {
    status.set_to_what_was_thrown();
    TF_OpKernelConstruction_Failure(construction, status);
    return nullptr;
  }
}

void destroy(void* text) { delete static_cast<Text*>(text); }

template <DeviceKind kind, void run(const Text&, Context&)>
void compute(void* text, TF_OpKernelContext* of_tensorflow) {
  try {
    Context context(of_tensorflow, kind);
    run(*static_cast<const Text*>(text), context);
  } catch (...) {
    Status status;
    status.set_to_what_was_thrown();
    TF_OpKernelContext_Failure(of_tensorflow, status);
  }
}

template <DeviceKind kind, void run(const Text&, Context&)>
void add_kernel(const char* op, bool has_tables) {
  auto* builder =
      TF_NewKernelBuilder(op, kind == DeviceKind::cpu ? "CPU" : "GPU", &create, &compute<kind, run>, &destroy);
  if (kind == DeviceKind::cuda && has_tables) TF_KernelBuilder_HostMemory(builder, "tables");
  Status status;
  TF_RegisterKernelBuilder(op, builder, status);
  status.check("registering a kernel");
}

template <DeviceKind kind>
void add_kernels() {
  for (const auto& op : forward_ops) add_kernel<kind, run_forward>(op.name, op.has_extras);
  add_kernel<kind, run_backward>(backward_op, true);
}

}  // namespace

void register_kernels() {
  add_kernels<DeviceKind::cpu>();
  if (gpus_are_built) add_kernels<DeviceKind::cuda>();
}

}  // namespace anyflash::tensorflow
