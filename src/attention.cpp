// The public calls: a checked Problem, its Plan, the backend that runs it.
#include <anyflash/attention.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "backends.h"
#include "plan/chunks.h"
#include "plan/facts.h"
#include "plan/given_plan.h"
#include "plan/plan.h"
#include "problem/layout.h"
#include "problem/problem.h"
#include "rules/compile.h"
#include "rules/part.h"

namespace anyflash {
namespace {

/// Runs a call; a failed allocation becomes an Error.
template <typename Call>
auto with_memory_errors(const char* name, Call&& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    throw Error(Error::Kind::memory, std::string(name) + ": not enough memory");
  } catch (const std::length_error&) {  // a vector larger than any memory
    throw Error(Error::Kind::memory, std::string(name) + ": not enough memory");
  }
}

/// The rule's errors, too, come before anything is written.
void check_rule(const Problem& problem) {
  rules::check(problem.rule, planning::shapes_of(problem));
  if (rules::part_has_lengths(problem.rule) && !problem.key_lengths.given()) {
    throw Error(Error::Kind::value, "key_lengths: not given, expected those of the rule's part");
  }
}

std::shared_ptr<const ExecutionPlan> plan_of(const Problem& problem, bool keep = false) {
  return make_plan(problem, backend_of(problem.device).menu(problem), keep);
}

/// The caller's plan if there is one, else a cached or new one.
std::shared_ptr<const ExecutionPlan> plan_for(const Problem& problem, const Plan* given) {
  if (!given) return plan_of(problem);
  check_same(given->pair(), problem);
  return problem.direction == Direction::forward ? given->pair().forward : given->pair().backward;
}

/// Divides the call as its plan says, or so that it fits its budget.
void divide(Problem& problem, const ExecutionPlan& plan, const Plan* given) {
  if (!planning::bounded(problem) && !problem.tensors_in_budget) return;
  if (problem.device.kind == DeviceKind::tiles) return;  // these bound its mapping, which each call finds
  if (given) {
    const auto& pair = given->pair();
    problem.chunks = problem.direction == Direction::forward ? pair.forward_chunks : pair.backward_chunks;
  } else {
    problem.chunks = planning::chosen_chunks(problem, plan);
  }
}

/// Divides both passes of a public plan. A budget that is too small for either is an Error that names what both
/// need. of_backward: null if there is none.
void divide_both(Problem& forward, const ExecutionPlan& of_forward, Problem& backward,
                 const ExecutionPlan* of_backward) {
  try {
    divide(forward, of_forward, nullptr);
    if (of_backward) divide(backward, *of_backward, nullptr);
  } catch (const Error&) {
    if (!forward.memory_budget || forward.device.kind == DeviceKind::tiles) throw;
    const auto least = planning::least_bytes(forward, of_forward);
    planning::fail_budget(forward,
                          of_backward ? std::max(least, planning::least_bytes(backward, *of_backward)) : least);
  }
}

/// A call's workspace: the caller's memory if it is given.
Workspace workspace_of(const Problem& problem, const ExecutionPlan& plan) {
  const auto& backend = backend_of(problem.device);
  if (problem.workspace_bytes < 0) return backend.allocate(problem, plan);
  if (const auto needed = backend.workspace(problem, plan); problem.workspace_bytes < needed) {
    throw Error(Error::Kind::value, "workspace: " + std::to_string(problem.workspace_bytes) +
                                        " bytes, expected at least " + std::to_string(needed));
  }
  return {problem.workspace, [](char*) {}};
}

void run(Problem& problem, const ExecutionPlan& plan, const Plan* given) {
  divide(problem, plan, given);
  const auto& backend = backend_of(problem.device);
  const auto workspace = workspace_of(problem, plan);
  (problem.direction == Direction::forward ? backend.forward : backend.backward)(problem, plan, workspace.get());
}

struct Result {
  const char* name;
  const TensorView& view;
  double value = 0;

  bool wanted() const { return view.given() && view.elements() > 0; }
};

/// Fills the results of a call without pairs.
void fill(const Problem& problem, std::initializer_list<Result> results) {
  const auto& backend = backend_of(problem.device);
  for (const auto& result : results)
    if (result.wanted()) backend.check(result.name, result.view.data, problem.device);
  for (const auto& result : results)
    if (result.wanted()) backend.fill(problem, result.view, result.value);
}

}  // namespace

ResultShapes result_shapes(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options) {
  return with_memory_errors("forward", [&] {
    backend_of(q.device);
    const auto problem = shape_problem(q, k, v, options);
    check_rule(problem);
    const auto axes = problem::axes_of(options.layout, {"query", q});
    const int parts = options.layout == Layout::qkv ? 1 : 0;  // an axis that the result does not have
    ResultShapes shapes;
    shapes.out.assign(q.shape.begin() + parts, q.shape.begin() + q.rank);
    shapes.out[axes.channel] = problem.d_v;
    if (axes.batch >= 0) shapes.lse.push_back(problem.batch);
    shapes.lse.insert(shapes.lse.end(), {problem.heads_q, problem.queries()});
    return shapes;
  });
}

void forward(const TensorView& q, const TensorView& k, const TensorView& v, const ForwardOutputs& outputs,
             const Options& options) {
  with_memory_errors("forward", [&] {
    backend_of(q.device);  // throws if there is no such backend
    auto problem = forward_problem(q, k, v, outputs, options);
    check_rule(problem);
    const auto plan = plan_for(problem, options.plan);
    if (problem.has_pairs()) return run(problem, *plan, options.plan);
    constexpr double infinity = std::numeric_limits<double>::infinity();
    fill(problem, {{"out", outputs.out},
                   {"lse", outputs.lse, -infinity},
                   {"row_max", outputs.row_max, -infinity},
                   {"row_sum", outputs.row_sum}});
  });
}

void backward(const BackwardInputs& inputs, const TensorView& q, const TensorView& k, const TensorView& v,
              const Gradients& gradients, const Options& options) {
  with_memory_errors("backward", [&] {
    backend_of(q.device);
    auto problem = backward_problem(inputs, q, k, v, gradients, options);
    check_rule(problem);
    const std::initializer_list<Result> all = {{"dq", gradients.dq},
                                               {"dk", gradients.dk},
                                               {"dv", gradients.dv},
                                               {"dbias", gradients.dbias},
                                               {"dsink", gradients.dsink}};
    if (std::none_of(all.begin(), all.end(), [](const Result& gradient) { return gradient.view.given(); })) return;
    const auto plan = plan_for(problem, options.plan);
    if (problem.has_pairs()) return run(problem, *plan, options.plan);
    fill(problem, all);
  });
}

std::int64_t backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                const Gradients& gradients, const Options& options) {
  return with_memory_errors("backward", [&] {
    backend_of(q.device);
    auto problem = shape_problem(q, k, v, options, Direction::backward);
    check_rule(problem);
    if (!gradients.dq.given()) problem.dq = {};
    const bool packed = options.layout == Layout::qkv;  // dq holds all three
    if (!(packed ? gradients.dq : gradients.dk).given()) problem.dk = {};
    if (!(packed ? gradients.dq : gradients.dv).given()) problem.dv = {};
    if (!gradients.dbias.given()) problem.dbias = {};
    if (!gradients.dsink.given()) problem.dsink = {};
    if (!problem.has_pairs()) return std::int64_t{0};
    const auto plan = plan_of(problem);
    divide(problem, *plan, nullptr);
    return workspace_bytes(problem, *plan);
  });
}

std::int64_t least_workspace(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options,
                             bool backward) {
  return with_memory_errors("plan", [&] {
    backend_of(q.device);
    std::int64_t most = 0;
    for (const auto direction : {Direction::forward, Direction::backward}) {
      if (direction == Direction::backward && !backward) continue;
      const auto problem = shape_problem(q, k, v, options, direction);
      check_rule(problem);
      if (problem.has_pairs()) most = std::max(most, planning::least_bytes(problem, *plan_of(problem)));
    }
    return most;
  });
}

Plan::Plan(std::shared_ptr<const detail::PlanPair> pair) : pair_(std::move(pair)) {
  if (!pair_) throw Error(Error::Kind::value, "plan: null");
}

Plan plan(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options) {
  return with_memory_errors("plan", [&] {
    backend_of(q.device);
    auto problem = shape_problem(q, k, v, options);
    check_rule(problem);
    auto pair = std::make_shared<detail::PlanPair>();
    pair->forward = plan_of(problem, true);
    auto backward = problem;
    const bool both = !options.page_table.given();  // paged keys and values have no backward
    if (both) {
      backward = shape_problem(q, k, v, options, Direction::backward);
      pair->backward = plan_of(backward, true);
    }
    if (problem.has_pairs()) divide_both(problem, *pair->forward, backward, pair->backward.get());
    pair->forward_chunks = problem.chunks;
    pair->forward_workspace = workspace_bytes(problem, *pair->forward);
    if (both) {
      pair->backward_chunks = backward.chunks;
      pair->backward_workspace = workspace_bytes(backward, *pair->backward);
    }
    keep(problem, *pair);
    return Plan(std::move(pair));
  });
}

std::int64_t Plan::forward_workspace() const { return pair_->forward_workspace; }
std::int64_t Plan::backward_workspace() const { return pair_->backward_workspace; }

}  // namespace anyflash
