// The arguments of anyflash explain, and its ways to answer.
#pragma once

#include <anyflash/attention.h>
#include <anyflash/explain.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "numbers.h"

namespace anyflash::cli {

struct ExplainArguments {
  std::vector<std::string> files, tensors;
  std::string rule = "full()", shape, keys, type = "float32", picture;
  ExplainOptions options;
  std::optional<std::int64_t> side;
  bool json = false;
  Device device;
  std::int64_t batch = 1, heads = 1, kv_heads = 0;  // for --plan, --ranks and the tile machine
  bool plan = false;
  std::optional<std::int64_t> ranks;
  std::int64_t threads = 0;  // for --plan
  Options call;              // for --plan and the tile machine: what changes how a call runs, beside its shapes
  bool lm = false, dlse = false, large_lse = false;  // for the tile machine
};

/// The call that --plan and the tile machine explain: its tensors, without data.
struct ExplainedCall {
  ExplainedCall(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                const SequenceShape& keys);
  TensorView q, k, v;
  Options options;
  CallTensors tensors;
};

/// explain --plan: the ways to run the call, as a table, as JSON, or as bars.
void explain_plan_command(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                          const SequenceShape& keys);

/// explain --ranks: the sequence split over processes, as text or JSON.
void explain_ranks_command(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                           const SequenceShape& keys);

}  // namespace anyflash::cli
