// Running a Call: the results in tensors of their own.
#pragma once

#include "call.h"

namespace anyflash::cli {

struct Results {
  OwnedTensor out, lse, row_max, row_sum;
};

Results run_forward(const Call& call);

/// dq, dk, dv (or dqkv of a packed call), dbias and dsink where bias and sink are given.
NamedTensors run_backward(const Call& call, const Results& results, const OwnedTensor& dout, const OwnedTensor* dlse);

}  // namespace anyflash::cli
