// The arguments of anyflash explain, and its ways to answer.
#pragma once

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
  std::optional<std::int64_t> budget, chunks_q, chunks_kv;
};

/// explain --plan: the ways to run the call, as a table, as JSON, or as bars.
void explain_plan_command(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                          const SequenceShape& keys);

/// explain --ranks: the sequence split over processes, as text or JSON.
void explain_ranks_command(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                           const SequenceShape& keys);

}  // namespace anyflash::cli
