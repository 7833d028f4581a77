// Running a Call: the results are in tensors of their own.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "call.h"

namespace anyflash::cli {

struct Results {
  OwnedTensor out, lse;
  std::optional<OwnedTensor> row_max, row_sum;
};

/// lm: with row_max and row_sum.
Results run_forward(const Call& call, bool lm = false);

/// dq, dk, dv (or dqkv of a packed call), dbias and dsink where bias and sink are given.
NamedTensors run_backward(const Call& call, const Results& results, const OwnedTensor& dout, const OwnedTensor* dlse);

/// A call whose tensors are on its device, which can be run any number of times.
class PlacedCall {
 public:
  PlacedCall(const Call& call, const Results& results);
  void add_backward(const OwnedTensor& dout, const OwnedTensor* dlse, const NamedTensors& gradients);

  /// Both wait until the results are complete.
  void forward() const;
  void backward() const;
  /// Copies the results back to the tensors that it was made of.
  void fetch() const;

 private:
  TensorView place(const OwnedTensor& tensor, bool result);

  Device device_;
  bool packed_;
  Options options_;
  TensorView q_, k_, v_;
  ForwardOutputs outputs_;
  BackwardInputs inputs_;
  Gradients gradients_;
  struct Copy {
    std::shared_ptr<void> memory;
    OwnedTensor tensor;
    bool result;
  };
  std::vector<Copy> copies_;
};

}  // namespace anyflash::cli
