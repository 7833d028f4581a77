#include "results.h"

#include <anyflash/anyflash.h>

#include "layouts.h"
#include "numbers.h"

namespace anyflash::cli {

Results run_forward(const Call& call) {
  const auto& options = call.options;
  const auto statistic = statistic_type(call.q.type);
  const auto [out, rows] = call.result_shapes();
  Results results{OwnedTensor::zeros(call.q.type, out), OwnedTensor::zeros(statistic, rows),
                  OwnedTensor::zeros(statistic, rows), OwnedTensor::zeros(statistic, rows)};
  forward(call.q.view(), call.k_view(), call.v_view(),
          {results.out.view(), results.lse.view(), results.row_sum.view(), results.row_max.view()}, options);
  return results;
}

NamedTensors run_backward(const Call& call, const Results& results, const OwnedTensor& dout, const OwnedTensor* dlse) {
  NamedTensors gradients;
  Gradients views;
  const auto add = [&](const std::string& name, const OwnedTensor& like, TensorView& view) {
    gradients.emplace_back(name, OwnedTensor::zeros(like.type, like.shape));
    view = gradients.back().second.view();
  };
  add(call.packed() ? "dqkv" : "dq", call.q, views.dq);
  if (!call.packed()) {
    add("dk", call.k, views.dk);
    add("dv", call.v, views.dv);
  }
  if (const auto* bias = call.find("bias")) add("dbias", *bias, views.dbias);
  if (const auto* sink = call.find("sink")) add("dsink", *sink, views.dsink);
  backward({dout.view(), results.out.view(), results.lse.view(), dlse ? dlse->view() : TensorView()}, call.q.view(),
           call.k_view(), call.v_view(), views, call.options);
  return gradients;
}

}  // namespace anyflash::cli
