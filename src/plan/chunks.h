// The choice of chunks: the candidates of a call, what they need and what they cost.
#pragma once

#include <vector>

#include <anyflash/explain.h>

#include "plan/plan.h"

namespace anyflash {
struct Backend;
}

namespace anyflash::planning {

/// Was a budget or a number of chunks asked for?
inline bool bounded(const Problem& problem) {
  return problem.memory_budget || problem.num_chunks_q || problem.num_chunks_kv;
}

/// A candidate, as a backend reads it and as a user does.
struct Candidate {
  Chunks chunks;
  PlanCandidate shown;
};

/// All candidates, unsorted; the chosen one is marked. The problem has pairs.
std::vector<Candidate> candidates_of(const Problem& problem, const ExecutionPlan& plan,
                                     const Calibration& machine = calibration());

/// The same for a backend, not the tile machine's; tests have their own.
std::vector<Candidate> candidates_on(const Backend& backend, const Problem& problem, const ExecutionPlan& plan,
                                     const Calibration& machine = calibration());

/// The bytes of the smallest one of a call with a budget.
std::int64_t least_bytes(const Problem& problem, const ExecutionPlan& plan);

/// The fastest candidate that fits the budget. Without a budget, and with no numbers of chunks, nothing is divided.
/// Throws Error, which names the least budget that works, if none fits.
Chunks chosen_chunks(const Problem& problem, const ExecutionPlan& plan);
/// The same for a backend, not the tile machine's.
Chunks chosen_on(const Backend& backend, const Problem& problem, const ExecutionPlan& plan);

/// Throws the Error of a budget that is too small; `least` works.
[[noreturn]] void fail_budget(const Problem& problem, std::int64_t least);

}  // namespace anyflash::planning
