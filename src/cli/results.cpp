#include "results.h"

#include <anyflash/anyflash.h>

#include "layouts.h"
#include "numbers.h"

namespace anyflash::cli {

PlacedCall::PlacedCall(const Call& call, const Results& results)
    : device_(call.device), packed_(call.packed()), options_(call.options) {
  q_ = place(call.q, false);
  if (!packed_) k_ = place(call.k, false), v_ = place(call.v, false);
  const auto extra = [&](const char* name, TensorView& view) {
    if (const auto* tensor = call.find(name); tensor && view.given()) view = place(*tensor, false);
  };
  extra("bias", options_.bias);
  extra("sink", options_.sink);
  extra("alibi", options_.alibi_slopes);
  outputs_.out = place(results.out, true), outputs_.lse = place(results.lse, true);
  if (results.row_sum) outputs_.row_sum = place(*results.row_sum, true);
  if (results.row_max) outputs_.row_max = place(*results.row_max, true);
}

void PlacedCall::add_backward(const OwnedTensor& dout, const OwnedTensor* dlse, const NamedTensors& gradients) {
  inputs_ = {place(dout, false), outputs_.out, outputs_.lse, dlse ? place(*dlse, false) : TensorView()};
  for (const auto& [name, tensor] : gradients) {
    auto& view = name == "dk"      ? gradients_.dk
                 : name == "dv"    ? gradients_.dv
                 : name == "dbias" ? gradients_.dbias
                 : name == "dsink" ? gradients_.dsink
                                   : gradients_.dq;  // dq or dqkv
    view = place(tensor, true);
  }
}

void PlacedCall::forward() const {
  anyflash::forward(q_, k_, v_, outputs_, options_);
  synchronize(device_);
}

void PlacedCall::backward() const {
  anyflash::backward(inputs_, q_, k_, v_, gradients_, options_);
  synchronize(device_);
}

void PlacedCall::fetch() const {
  for (const auto& [memory, tensor, result] : copies_)
    if (result) copy_memory(tensor.data.get(), memory.get(), tensor.bytes(), device_);
}

/// On the CPU the tensor itself. A tensor's elements are contiguous, in whatever order.
TensorView PlacedCall::place(const OwnedTensor& tensor, bool result) {
  auto view = tensor.view();
  if (device_.kind == DeviceKind::cpu) return view;
  copies_.push_back({device_memory(device_, tensor.bytes()), tensor, result});
  view.device = device_;
  view.data = copies_.back().memory.get();
  copy_memory(view.data, tensor.data.get(), tensor.bytes(), device_);
  return view;
}

Results run_forward(const Call& call, bool lm) {
  const auto statistic = statistic_type(call.q.type);
  const auto [out, rows] = call.result_shapes();
  Results results{OwnedTensor::zeros(call.q.type, out), OwnedTensor::zeros(statistic, rows), {}, {}};
  if (lm) results.row_max = OwnedTensor::zeros(statistic, rows), results.row_sum = OwnedTensor::zeros(statistic, rows);
  const PlacedCall placed(call, results);
  placed.forward();
  placed.fetch();
  return results;
}

NamedTensors run_backward(const Call& call, const Results& results, const OwnedTensor& dout, const OwnedTensor* dlse) {
  NamedTensors gradients;
  const auto add = [&](const std::string& name, const OwnedTensor& like) {
    gradients.emplace_back(name, OwnedTensor::zeros(like.type, like.shape));
  };
  add(call.packed() ? "dqkv" : "dq", call.q);
  if (!call.packed()) {
    add("dk", call.k);
    add("dv", call.v);
  }
  if (const auto* bias = call.find("bias")) add("dbias", *bias);
  if (const auto* sink = call.find("sink")) add("dsink", *sink);
  PlacedCall placed(call, results);
  placed.add_backward(dout, dlse, gradients);
  placed.backward();
  placed.fetch();
  return gradients;
}

}  // namespace anyflash::cli
