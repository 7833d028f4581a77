// anyflash run on .npy files that are larger than memory.
#pragma once

#include <string>

#include "call.h"

namespace anyflash::cli {

struct OutOfCoreResults {
  std::string output;  ///< a .npy file
  bool lse = false, backward = false, quiet = false;
};

/// Maps q, k, v and dout, computes in chunks that the budget covers, and writes the results through mappings: OUT.npy,
/// and beside it OUT.lse.npy, OUT.dq.npy and so on.
void run_out_of_core(const CallArguments& arguments, const OutOfCoreResults& wanted);

}  // namespace anyflash::cli
