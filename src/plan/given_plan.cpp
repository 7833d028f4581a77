#include "plan/given_plan.h"

#include <optional>
#include <string>

#include "plan/facts.h"
#include "problem/checks.h"
#include "rules/compile.h"

namespace anyflash {
namespace {

std::vector<std::int64_t> numbers_of(const TensorView& view) {
  std::vector<std::int64_t> numbers;
  if (!view.given() || view.device.kind != DeviceKind::cpu) return numbers;
  numbers.reserve(view.shape[0]);
  for (std::int64_t i = 0; i < view.shape[0]; ++i) numbers.push_back(integer_at(view, i));
  return numbers;
}

std::int64_t lengths_of(const TensorView& view) { return view.given() ? view.shape[0] : 0; }

[[noreturn]] void fail(const std::string& made_for, const std::string& has) {
  problem::fail_value("plan", "made for " + made_for + ", the call has " + has);
}

void check_count(const char* what, std::int64_t made_for, std::int64_t has) {
  if (made_for != has) fail(std::to_string(made_for) + " " + what, std::to_string(has));
}

void check_given(const char* what, const std::optional<std::int64_t>& made_for,
                 const std::optional<std::int64_t>& has) {
  const auto text = [&](const std::optional<std::int64_t>& value) {
    return value ? std::string(what) + "=" + std::to_string(*value) : std::string("no ") + what;
  };
  if (made_for != has) fail(text(made_for), has ? std::to_string(*has) : "none");
}

void check_sizes(const char* what, const Int3& made_for, const Int3& has, int dimensions) {
  if (made_for == has) return;
  if (dimensions == 1) check_count(what, made_for[2], has[2]);
  const auto text = [&](const Int3& size) {
    std::string joined;
    for (int i = 3 - dimensions; i < 3; ++i) joined += (joined.empty() ? "" : " x ") + std::to_string(size[i]);
    return joined;
  };
  fail(text(made_for) + " " + what, text(has));
}

void check_numbers(const char* what, const std::vector<std::int64_t>& made_for, const TensorView& has) {
  if (has.given() && has.device.kind != DeviceKind::cpu) return;  // their values are not part of the plan
  bool same = made_for.size() == std::size_t(has.given() ? has.shape[0] : 0);
  for (std::size_t i = 0; same && i < made_for.size(); ++i) same = made_for[i] == integer_at(has, i);
  if (!same) problem::fail_value("plan", std::string("made for other ") + what + " than the call has");
}

/// The facts of the rule only: cumulative lengths, which the kept problem no longer has, are compared as numbers.
rules::Facts facts_of_rule(const Problem& problem) {
  auto shapes = planning::shapes_of(problem);
  shapes.cu_seqlens_q = shapes.cu_seqlens_k = {};
  return rules::facts(problem.rule, shapes);
}

/// The rule must be the same object or have the same meaning; a rule with tables must be the same object.
void check_rule(const Problem& made_for, const Problem& has) {
  if (&made_for.rule.node() == &has.rule.node()) return;
  const auto one = facts_of_rule(made_for), other = facts_of_rule(has);
  if (!one.tables && !other.tables && one.key == other.key) return;
  const auto text = made_for.rule.text();
  if (text != has.rule.text()) fail("rule " + text, has.rule.text());
  problem::fail_value("plan", "made for another rule " + text + ", expected the rule object that it was made with");
}

}  // namespace

void keep(const Problem& problem, detail::PlanPair& pair) {
  pair.cu_seqlens_q = numbers_of(problem.cu_seqlens_q);
  pair.cu_seqlens_k = numbers_of(problem.cu_seqlens_k);
  pair.key_lengths = numbers_of(problem.key_lengths);
  pair.cu_seqlens_size = lengths_of(problem.cu_seqlens_q);
  pair.key_lengths_size = lengths_of(problem.key_lengths);
  pair.tables_hash = rules::tables_hash(problem.rule);
  pair.made_for = problem;
  // Whatever belongs to the caller may be gone when the plan is used.
  auto& kept = pair.made_for;
  kept.q = kept.k = kept.v = {};
  kept.after_chunk = nullptr;
  kept.bias = {};
  kept.alibi = kept.sink = {};
  kept.cu_seqlens_q = kept.cu_seqlens_k = kept.key_lengths = {};
  kept.pages.table = nullptr;
}

void check_same(const detail::PlanPair& pair, const Problem& problem) {
  const auto& kept = pair.made_for;
  if (!(kept.device == problem.device)) fail(device_name(kept.device), device_name(problem.device));
  if (kept.type != problem.type) fail(element_name(kept.type), element_name(problem.type));
  check_count("sequence dimensions", kept.dimensions, problem.dimensions);
  check_count("batch entries", kept.batch, problem.batch);
  check_count("query heads", kept.heads_q, problem.heads_q);
  check_count("key heads", kept.heads_kv, problem.heads_kv);
  check_sizes("queries", kept.q_size, problem.q_size, kept.dimensions);
  check_sizes("keys", kept.k_size, problem.k_size, kept.dimensions);
  check_count("channels of query and key", kept.d_qk, problem.d_qk);
  check_count("channels of value", kept.d_v, problem.d_v);
  check_given("memory_budget", kept.memory_budget, problem.memory_budget);
  check_given("num_chunks_q", kept.num_chunks_q, problem.num_chunks_q);
  check_given("num_chunks_kv", kept.num_chunks_kv, problem.num_chunks_kv);
  if (kept.align != problem.align) problem::fail_value("plan", "made for another alignment than the call has");
  check_count("keys in a page", kept.pages.page_size, problem.pages.page_size);
  if (kept.tables_on_device != problem.tables_on_device)
    fail(kept.tables_on_device ? "lengths or tables on a GPU" : "no lengths or tables on a GPU",
         kept.tables_on_device ? "none there" : "some there");
  if (problem.tables_on_device)
    check_count("cumulative lengths", pair.cu_seqlens_size, lengths_of(problem.cu_seqlens_q));
  if (problem.tables_on_device) check_count("key lengths", pair.key_lengths_size, lengths_of(problem.key_lengths));
  check_numbers("cu_seqlens_q", pair.cu_seqlens_q, problem.cu_seqlens_q);
  check_numbers("cu_seqlens_k", pair.cu_seqlens_k, problem.cu_seqlens_k);
  check_numbers("key_lengths", pair.key_lengths, problem.key_lengths);
  check_rule(kept, problem);
  if (pair.tables_hash != rules::tables_hash(problem.rule)) {
    problem::fail_value("plan", "made before a table of rule " + problem.rule.text() + " was changed");
  }
}

}  // namespace anyflash
