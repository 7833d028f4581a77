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
  const ExplainedCall call(arguments, rule, queries, keys);
  const auto plan =
      explain_plan(call.q, call.k, call.v, call.options, arguments.options.backward, calibration(), call.tensors);
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
