// What anyflash/torch/distributed asks of a rule. Its Python side has checked the numbers.
#include <anyflash/sharding.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "options.h"
#include "rule_object.h"
#include "without_gil.h"

namespace anyflash::python {
namespace {

using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;

Pieces pieces_of(const Pairs& pairs) {
  Pieces pieces;
  for (const auto& [first, count] : pairs) pieces.push_back({first, count});
  return pieces;
}

Pairs pairs_of(const Pieces& pieces) {
  Pairs pairs;
  for (const auto& piece : pieces) pairs.emplace_back(piece.first, piece.count);
  return pairs;
}

RuleObject rule_part(nb::handle rule, const SequenceShape& q_shape, const SequenceShape& k_shape, const Pairs& queries,
                     const Pairs& keys, nb::handle key_lengths) {
  const auto& whole = rule_of(rule);
  auto tables = whole.tables;
  TensorView lengths;
  if (!key_lengths.is_none()) {
    lengths = tables.emplace_back(std::make_shared<Arrays>())->input(key_lengths, "key_lengths", Elements::indices);
  }
  return {part(whole.rule, q_shape, k_shape, pieces_of(queries), pieces_of(keys), lengths), std::move(tables)};
}

std::vector<Pairs> seen(nb::handle rule, const SequenceShape& q_shape, const SequenceShape& k_shape, nb::handle align,
                        const std::vector<Pairs>& queries, std::int64_t unit,
                        const std::vector<std::int64_t>& key_lengths) {
  const auto& whole = rule_of(rule).rule;
  const auto aligned = align_of(align);
  std::vector<Pieces> asked;
  for (const auto& pairs : queries) asked.push_back(pieces_of(pairs));
  const WithoutGil without_gil;
  std::vector<Pairs> found;
  for (const auto& pieces : seen_keys(whole, q_shape, k_shape, aligned, asked, unit, key_lengths)) {
    found.push_back(pairs_of(pieces));
  }
  return found;
}

/// The pieces of queries and keys of each process, and its visible pairs.
nb::tuple split(nb::handle rule, const SequenceShape& q_shape, const SequenceShape& k_shape, nb::handle align,
                std::int64_t ranks) {
  const auto& whole = rule_of(rule).rule;
  const auto aligned = align_of(align);
  std::vector<Pairs> sides[2];
  SequenceSplit made;
  {
    const WithoutGil without_gil;
    made = split_sequence(whole, q_shape, k_shape, aligned, ranks);
    for (const auto& pieces : made.queries) sides[0].push_back(pairs_of(pieces));
    for (const auto& pieces : made.keys) sides[1].push_back(pairs_of(pieces));
  }
  return nb::make_tuple(sides[0], sides[1], made.visible_pairs);
}

}  // namespace

void add_sharding(nb::module_& module) {
  module.def("rule_part", &rule_part, nb::arg("rule").none(), nb::arg("q_shape"), nb::arg("k_shape"),
             nb::arg("queries"), nb::arg("keys"), nb::arg("key_lengths") = nb::none());
  module.def("seen_keys", &seen, nb::arg("rule").none(), nb::arg("q_shape"), nb::arg("k_shape"),
             nb::arg("align").none(), nb::arg("queries"), nb::arg("unit"),
             nb::arg("key_lengths") = std::vector<std::int64_t>());
  module.def(
      "visible_by_block",
      [](nb::handle rule, const SequenceShape& q_shape, const SequenceShape& k_shape, nb::handle align,
         const std::vector<std::int64_t>& cuts, std::int64_t samples, const std::vector<std::int64_t>& key_lengths) {
        const auto& whole = rule_of(rule).rule;
        const auto aligned = align_of(align);
        const WithoutGil without_gil;
        return visible_by_block(whole, q_shape, k_shape, aligned, cuts, samples, key_lengths);
      },
      nb::arg("rule").none(), nb::arg("q_shape"), nb::arg("k_shape"), nb::arg("align").none(), nb::arg("cuts"),
      nb::arg("samples"), nb::arg("key_lengths") = std::vector<std::int64_t>());
  module.def(
      "seen_blocks",
      [](nb::handle rule, const SequenceShape& q_shape, const SequenceShape& k_shape, nb::handle align,
         const std::vector<std::int64_t>& q_cuts, const std::vector<std::int64_t>& k_cuts,
         const std::vector<std::int64_t>& key_lengths) {
        const auto found =
            seen_blocks(rule_of(rule).rule, q_shape, k_shape, align_of(align), q_cuts, k_cuts, key_lengths);
        return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size());
      },
      nb::arg("rule").none(), nb::arg("q_shape"), nb::arg("k_shape"), nb::arg("align").none(), nb::arg("q_cuts"),
      nb::arg("k_cuts"), nb::arg("key_lengths") = std::vector<std::int64_t>());
  module.def("split_sequence", &split, nb::arg("rule").none(), nb::arg("q_shape"), nb::arg("k_shape"),
             nb::arg("align").none(), nb::arg("ranks"));
  module.def("rule_hash", [](nb::handle rule) { return rule_hash(rule_of(rule).rule); }, nb::arg("rule").none());
}

}  // namespace anyflash::python
