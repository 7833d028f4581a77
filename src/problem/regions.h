// The memory that a call reads and writes: what is written must not overlap anything else.
#pragma once

#include <array>

#include <anyflash/rule.h>

#include "problem/checks.h"

namespace anyflash::problem {

/// The tensors of one call. They must outlive it.
class Regions {
 public:
  void add_input(Argument argument) { add(argument, false); }
  void add_output(Argument argument) { add(argument, true); }

  /// Throws Error if an output overlaps another tensor, including those in the rule. The rule's tables are on the CPU,
  /// or on the call's device.
  void check(const Rule& rule, Device device) const;

 private:
  struct Region {
    const char* name;
    const TensorView* view;
    Extent extent;
    bool written;
  };
  void add(Argument argument, bool written);
  void check_against_outputs(const Region& region, int outputs_from) const;

  static constexpr int most = 21;  // backward: q, k, v, 7 extras, dout, out, lse, dlse, 5 gradients, the workspace
  std::array<Region, most> regions_;
  int count_ = 0;
};

}  // namespace anyflash::problem
