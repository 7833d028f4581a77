// anyflash explain --ranks: what splitting the sequence over processes gives each, and what moves.
#include <anyflash/sharding.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "explain_arguments.h"
#include "layouts.h"
#include "shapes.h"

namespace anyflash::cli {
namespace {

using Counts = std::vector<std::int64_t>;

/// The figures of a split. Bytes are those that a forward pass moves.
struct Figures {
  SequenceSplit split;
  Counts bytes, least, gathered, positions;
  double imbalance = 1, over_least = 1;
};

std::int64_t sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

std::int64_t entries(const Pieces& pieces, const SequenceShape& shape) {
  std::int64_t count = 0;
  for (const auto& piece : pieces) count += piece.count;
  return count * std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
}

Figures figures_of(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                   const SequenceShape& keys) {
  const auto& options = arguments.options;
  const auto ranks = *arguments.ranks;
  const auto heads = arguments.batch * (arguments.kv_heads > 0 ? arguments.kv_heads : arguments.heads);
  const auto key_bytes = heads * (options.d_qk + options.d_v) * std::int64_t(element_size(options.type));
  Figures made{split_sequence(rule, queries, keys, options.align, ranks), {}, {}, {}, {}};
  const auto all_keys = entries({{0, keys[0]}}, keys);
  made.bytes = received_keys(rule, queries, keys, options.align, made.split, exchange_unit(keys));
  made.least = received_keys(rule, queries, keys, options.align, made.split, 1);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    made.bytes[rank] *= key_bytes, made.least[rank] *= key_bytes;
    made.gathered.push_back((all_keys - entries(made.split.keys[rank], keys)) * key_bytes);
    made.positions.push_back(entries(made.split.queries[rank], queries));
  }
  const auto& pairs = made.split.visible_pairs;
  const auto all_pairs = std::accumulate(pairs.begin(), pairs.end(), 0.0);
  if (all_pairs > 0) made.imbalance = *std::max_element(pairs.begin(), pairs.end()) * double(ranks) / all_pairs;
  if (sum(made.least) > 0) made.over_least = double(sum(made.bytes)) / double(sum(made.least));
  return made;
}

std::string ranges_text(const Pieces& pieces) {
  constexpr std::size_t most = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(pieces.size(), most); ++i) {
    const auto& [first, count] = pieces[i];
    text += (i > 0 ? " " : "") + std::to_string(first) + "-" + std::to_string(first + count - 1);
  }
  if (pieces.size() > most) text += " and " + std::to_string(pieces.size() - most) + " more";
  return text.empty() ? "none" : text;
}

nlohmann::ordered_json json_of(const std::vector<Pieces>& all) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& pieces : all) {
    json.push_back(nlohmann::ordered_json::array());
    for (const auto& [first, count] : pieces) json.back().push_back({first, count});
  }
  return json;
}

}  // namespace

void explain_ranks_command(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                           const SequenceShape& keys) {
  const auto made = figures_of(arguments, rule, queries, keys);
  const auto align = name_of(arguments.options.align);
  if (arguments.json) {
    const nlohmann::ordered_json json = {{"rule", rule.text()},
                                         {"query_shape", queries},
                                         {"key_shape", keys},
                                         {"align", align},
                                         {"ranks", *arguments.ranks},
                                         {"visible_pairs", made.split.visible_pairs},
                                         {"imbalance", made.imbalance},
                                         {"positions", made.positions},
                                         {"pieces", json_of(made.split.queries)},
                                         {"key_pieces", json_of(made.split.keys)},
                                         {"bytes", made.bytes},
                                         {"least", made.least},
                                         {"over_least", made.over_least},
                                         {"gathered", made.gathered}};
    std::printf("%s\n", json.dump(2).c_str());
    return;
  }
  const auto number = [](std::int64_t n) { return static_cast<long long>(n); };
  std::printf("rule            %s\n", rule.text().c_str());
  std::printf("queries, keys   %s, %s (%s)\n", text_of(queries).c_str(), text_of(keys).c_str(), align.c_str());
  std::printf("balance         %.3f: visible pairs of the busiest rank over the mean (from samples)\n", made.imbalance);
  std::printf("moved           %lld bytes forward, %.3f of the least that the rule allows\n", number(sum(made.bytes)),
              made.over_least);
  std::printf("all gathered    %lld bytes\n", number(sum(made.gathered)));
  for (std::int64_t rank = 0; rank < *arguments.ranks; ++rank) {
    std::printf("rank %-10lld %lld queries (%s), %.4g pairs, receives %lld bytes\n", number(rank),
                number(made.positions[rank]), ranges_text(made.split.queries[rank]).c_str(),
                made.split.visible_pairs[rank], number(made.bytes[rank]));
  }
}

}  // namespace anyflash::cli
