// anyflash explain --plan: the ways to run a call.
#include <anyflash/explain.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "call.h"
#include "explain_arguments.h"
#include "numbers.h"
#include "picture_file.h"
#include "shapes.h"
#include "tensor_file.h"

namespace anyflash::cli {
namespace {

/// The call's tensors without data.
TensorView shapes_of(const ExplainArguments& arguments, std::int64_t heads, const SequenceShape& sequence,
                     std::int64_t channels) {
  TensorView view;
  view.type = *float_type(arguments.type);
  view.device = arguments.device;
  view.rank = 0;
  const auto append = [&](std::int64_t size) { view.shape[view.rank++] = size; };
  append(arguments.batch), append(heads);
  for (const auto size : sequence) append(size);
  append(channels);
  view.set_row_major_strides();
  return view;
}

void print_plan_json(const PlanExplanation& plan) {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& one : plan.candidates) {
    rows.push_back({{"groups", one.groups},
                    {"chunks_q", one.chunks_q},
                    {"chunks_kv", one.chunks_kv},
                    {"threads", one.threads},
                    {"kept", one.kept},
                    {"bytes", one.bytes},
                    {"fits", one.fits},
                    {"chosen", one.chosen}});
    if (one.timed) {
      rows.back().update({{"compute_seconds", one.cost.compute},
                          {"memory_seconds", one.cost.memory},
                          {"exchange_seconds", one.cost.exchange},
                          {"total_seconds", one.cost.total()}});
    } else {
      rows.back()["portable"] = one.portable;
    }
    if (one.grid_rows == 0) continue;  // not on the tile machine
    rows.back().update(
        {{"grid_rows", one.grid_rows}, {"grid_columns", one.grid_columns}, {"chunks_in_flight", one.in_flight}});
  }
  const nlohmann::ordered_json all = {
      {"least_bytes", plan.least_bytes}, {"calibration", plan.calibration}, {"candidates", rows}};
  std::printf("%s\n", all.dump(2).c_str());
}

}  // namespace

void explain_plan_command(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                          const SequenceShape& keys) {
  const auto& path = arguments.picture;
  const bool drawn = !path.empty() && path != "none";
  if (drawn && (path.size() < 5 || !path.ends_with(".svg"))) fail("--picture: '" + path + "', expected a .svg file");
  const auto& explained = arguments.options;
  Options options;
  options.rule = rule, options.align = explained.align, options.threads = arguments.threads;
  options.memory_budget = arguments.budget;
  options.num_chunks_q = arguments.chunks_q, options.num_chunks_kv = arguments.chunks_kv;
  const auto kv_heads = arguments.kv_heads > 0 ? arguments.kv_heads : arguments.heads;
  const auto plan = explain_plan(shapes_of(arguments, arguments.heads, queries, explained.d_qk),
                                 shapes_of(arguments, kv_heads, keys, explained.d_qk),
                                 shapes_of(arguments, kv_heads, keys, explained.d_v), options, explained.backward);
  if (drawn)
    write_file_whole(path, [&](const std::string& place) {
      std::ofstream file(place);
      file << plan_svg(plan, rule.text() + ", " + text_of(queries) + " queries, " + text_of(keys) + " keys");
      file.close();
      if (!file) fail("cannot be written");
    });
  if (arguments.json) return print_plan_json(plan);
  std::printf("constants       %s\nleast           %lld bytes\n\n%s", one_line(plan.calibration).c_str(),
              static_cast<long long>(plan.least_bytes), plan_text(plan).c_str());
  if (drawn) std::printf("\npicture         %s\n", path.c_str());
}

}  // namespace anyflash::cli
