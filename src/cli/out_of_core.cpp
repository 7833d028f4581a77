#include "out_of_core.h"

#include <anyflash/anyflash.h>

#include <chrono>
#include <cstdio>
#include <list>
#include <utility>

#include "mapping.h"
#include "numbers.h"
#include "progress.h"
#include "tensor_file.h"

namespace anyflash::cli {

namespace {

/// The results' files, all named at the end.
class Results {
 public:
  Results(const Inputs& inputs, std::string output) : inputs_(inputs), output_(std::move(output)) {}

  TensorView add(const std::string& name, ElementType type, const Shape& shape) {
    const auto path = name.empty() ? output_ : output_.substr(0, output_.size() - 3) + name + ".npy";
    if (inputs_.names_file(path)) fail("--output: " + path + " is an input file too");
    const auto& made = files_.emplace_back(path, type, shape);
    described_.push_back(describe(name.empty() ? "out" : name, made.tensor()) + ", " + path);
    return made.tensor().view();
  }
  void finish() {
    for (auto& file : files_) file.finish();
  }
  const std::vector<std::string>& described() const { return described_; }

 private:
  const Inputs& inputs_;
  const std::string output_;
  std::list<MappedResult> files_;
  std::vector<std::string> described_;
};

/// The files of all gradients.
Gradients gradients_of(const Call& call, Results& results) {
  Gradients gradients;
  const auto like = [&](const char* name, const OwnedTensor& tensor) {
    return results.add(name, tensor.type, tensor.shape);
  };
  gradients.dq = like(call.packed() ? "dqkv" : "dq", call.q);
  if (!call.packed()) gradients.dk = like("dk", call.k), gradients.dv = like("dv", call.v);
  if (const auto* bias = call.find("bias")) gradients.dbias = like("dbias", *bias);
  if (const auto* sink = call.find("sink")) gradients.dsink = like("dsink", *sink);
  return gradients;
}

}  // namespace

void run_out_of_core(const CallArguments& arguments, const OutOfCoreResults& wanted) {
  check_target(wanted.output);
  auto inputs = arguments.inputs();
  inputs.map({"q", "k", "v", "qkv", "dout"});
  ChunkProgress progress(wanted.quiet);
  const OutOfCore out_of_core{[&](std::int64_t done, std::int64_t total) {
    progress.show(done, total);
    release_mapped_pages();
  }};
  auto of_files = arguments;
  of_files.options.out_of_core = &out_of_core;
  const auto call = make_call(of_files, inputs, wanted.backward);
  OwnedTensor dout;
  std::optional<OwnedTensor> dlse;
  if (wanted.backward) dout = inputs.get("dout", "--dout"), dlse = inputs.find("dlse");
  inputs.refuse_unused({"dout", "dlse"});
  const auto q = call.q.view();
  const auto k = call.packed() ? TensorView() : call.k.view(), v = call.packed() ? TensorView() : call.v.view();
  const auto [out_shape, lse_shape] = call.result_shapes();

  Results results(inputs, wanted.output);
  ForwardOutputs outputs;
  outputs.out = results.add("", q.type, out_shape);
  if (wanted.lse || wanted.backward) outputs.lse = results.add("lse", statistic_type(q.type), lse_shape);
  Gradients gradients;
  BackwardInputs given;
  if (wanted.backward) {  // its errors come before the work, too
    given = {dout.view(), outputs.out, outputs.lse, dlse ? dlse->view() : TensorView()};
    backward(given, q, k, v, {}, call.options);
    gradients = gradients_of(call, results);
  }
  const auto start = std::chrono::steady_clock::now();
  progress.begin("forward");
  forward(q, k, v, outputs, call.options);
  release_mapped_pages();
  if (wanted.backward) {
    progress.begin("backward");
    backward(given, q, k, v, gradients, call.options);
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  results.finish();
  progress.clear();
  if (wanted.quiet) return;
  std::printf("rule %s\n", call.options.rule.text().c_str());
  for (const auto& line : results.described()) std::printf("%s\n", line.c_str());
  std::printf("%.3g ms\n", time.count());
}

}  // namespace anyflash::cli
