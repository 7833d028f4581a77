#include "problem/join.h"

#include <algorithm>

#include "plan/threads.h"
#include "problem/layout.h"

namespace anyflash {
namespace {

Operand operand_of(const TensorView& view) {
  Operand operand{static_cast<char*>(view.data), view.strides[0], view.strides[1], view.strides[view.rank - 1], {}};
  for (int axis = view.rank - 2, i = 2; axis >= 2; --axis, --i) operand.sequence[i] = view.strides[axis];
  return operand;
}

RowStatistic statistic_of(const TensorView& view) {
  return {static_cast<char*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

PartialResult result_of(const ForwardOutputs& given) {
  return {given.out.type, operand_of(given.out), statistic_of(given.row_sum), statistic_of(given.row_max)};
}

void check(const char* what, const ForwardOutputs& given, const JoinProblem& problem, const TensorView& like) {
  using namespace problem;
  check_given({"out", given.out}), check_given({"row_sum", given.row_sum}), check_given({"row_max", given.row_max});
  if (given.out.rank != like.rank) fail_value(what, "other axes of out, expected those of part");
  check_memory({"out", given.out}, problem.device);
  check_shape({"out", given.out}, {like.shape.data(), std::size_t(like.rank)});
  const std::int64_t rows[] = {problem.batch, problem.heads, problem.queries};
  for (const Argument one : {Argument{"row_sum", given.row_sum}, Argument{"row_max", given.row_max}}) {
    check_memory(one, problem.device);
    if (one.view.rank != 3) fail_value(one.name, "expected (batch, heads, queries)");
    check_shape(one, rows);
    check_type(one, problem.is_float64() ? ElementType::float64 : ElementType::float32);
  }
}

}  // namespace

JoinProblem join_problem(const ForwardOutputs& into, const ForwardOutputs& part, void* stream, std::int64_t threads) {
  using namespace problem;
  const auto& out = part.out;
  check_given({"out", out});
  const auto axes = axes_of(Layout::bhsd, {"out", out});
  check_floating({"out", out});
  JoinProblem made{};
  made.device = out.device, made.stream = stream, made.threads = planning::plan_threads(int(threads));
  made.batch = out.shape[0], made.heads = out.shape[1], made.channels = out.shape[axes.channel];
  std::fill(made.size, made.size + 3, 1);
  for (int axis = out.rank - 2, i = 2; axis >= 2; --axis, --i) made.size[i] = out.shape[axis];
  made.queries = made.size[0] * made.size[1] * made.size[2];
  made.part.type = out.type;
  check("part", part, made, out), check("into", into, made, out);
  check_writable({"out", into.out}), check_writable({"row_sum", into.row_sum}),
      check_writable({"row_max", into.row_max});
  if (into.out.type != ElementType::float32 || made.is_float64())
    check_type({"out", into.out}, out.type, " as in part");
  made.into = result_of(into), made.part = result_of(part);
  return made;
}

}  // namespace anyflash
