// anyflash explain: the figures of a rule and its plan, and a picture of its pattern.

#include <anyflash/explain.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "call.h"
#include "commands.h"
#include "explain_arguments.h"
#include "layouts.h"
#include "numbers.h"
#include "picture_file.h"
#include "progress.h"
#include "shapes.h"
#include "tensor_file.h"
#include "tiles.h"

namespace anyflash::cli {

namespace {

constexpr std::int64_t terminal_side = 64, file_side = 512;

double share(std::int64_t part, std::int64_t whole) { return whole > 0 ? double(part) / double(whole) : 0; }

void print_text(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                const SequenceShape& keys, const Explanation& e) {
  const auto block = [](const std::int64_t* size, const std::int64_t* step) {
    std::string text;
    for (int i = 0; i < 3; ++i) text += (i ? " x " : "") + std::to_string(size[i]);
    if (step[0] > 1 || step[1] > 1 || step[2] > 1)
      text += ", every " + std::to_string(step[0]) + ", " + std::to_string(step[1]) + ", " + std::to_string(step[2]);
    return text;
  };
  const auto tiles = e.tiles_skipped + e.tiles_partial + e.tiles_full;
  std::printf("rule            %s\n", rule.text().c_str());
  std::printf("queries, keys   %s, %s (%s)\n", text_of(queries).c_str(), text_of(keys).c_str(),
              name_of(arguments.options.align).c_str());
  std::printf("visible pairs   %lld of %lld (%.3g %%)\n", static_cast<long long>(e.visible_pairs),
              static_cast<long long>(e.queries * e.keys), 100 * share(e.visible_pairs, e.queries * e.keys));
  std::printf("visited pairs   %lld, %.2f for each visible one\n", static_cast<long long>(e.visited_pairs),
              share(e.visited_pairs, e.visible_pairs));
  std::printf("query block     %s\n", block(e.query_block, e.query_step).c_str());
  std::printf("key block       %s\n", block(e.key_block, e.key_step).c_str());
  std::printf("tiles           %lld: %lld skipped, %lld partial, %lld full\n", static_cast<long long>(tiles),
              static_cast<long long>(e.tiles_skipped), static_cast<long long>(e.tiles_partial),
              static_cast<long long>(e.tiles_full));
  std::printf("useful flops    %.4g forward, %.4g backward, one head\n", e.forward_flops, e.backward_flops);
  std::printf("bytes           %s of q, k, v, out and lse, one head\n", bytes_text(e.bytes).c_str());
  std::printf("dense mask      %s, not needed\n", bytes_text(e.dense_mask_bytes).c_str());
  std::printf("workspace       %s, %d threads\n", bytes_text(double(e.workspace_bytes)).c_str(), e.threads);
}

void print_json(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                const SequenceShape& keys, const Explanation& e, const std::optional<TileReport>& tiles) {
  const auto three = [](const std::int64_t* values) { return std::vector<std::int64_t>(values, values + 3); };
  nlohmann::ordered_json json = {{"rule", rule.text()},
                                 {"query_shape", queries},
                                 {"key_shape", keys},
                                 {"align", name_of(arguments.options.align)},
                                 {"type", arguments.type},
                                 {"head_size", arguments.options.d_qk},
                                 {"value_size", arguments.options.d_v},
                                 {"direction", arguments.options.backward ? "backward" : "forward"},
                                 {"queries", e.queries},
                                 {"keys", e.keys},
                                 {"visible_pairs", e.visible_pairs},
                                 {"visited_pairs", e.visited_pairs},
                                 {"tiles_skipped", e.tiles_skipped},
                                 {"tiles_partial", e.tiles_partial},
                                 {"tiles_full", e.tiles_full},
                                 {"query_block", three(e.query_block)},
                                 {"query_step", three(e.query_step)},
                                 {"key_block", three(e.key_block)},
                                 {"key_step", three(e.key_step)},
                                 {"forward_flops", e.forward_flops},
                                 {"backward_flops", e.backward_flops},
                                 {"bytes", e.bytes},
                                 {"dense_mask_bytes", e.dense_mask_bytes},
                                 {"threads", e.threads},
                                 {"workspace_bytes", e.workspace_bytes}};
  if (tiles) json["tiles"] = tiles_json(*tiles);
  std::printf("%s\n", json.dump(2).c_str());
}

void print_picture(const Picture& drawn) {
  if (drawn.grey.empty()) {
    std::printf("picture         none: the pattern is empty\n");
    return;
  }
  if (drawn.densest < 1)
    std::printf("picture         full block: %.2g %% of its pairs visible, the densest\n", 100 * drawn.densest);
  std::printf("\n%s", picture_text(drawn).c_str());
}

enum class PictureKind : std::uint8_t { none, terminal, png, svg };

PictureKind picture_kind(const ExplainArguments& arguments) {
  const auto& path = arguments.picture;
  if (path.empty()) return arguments.json ? PictureKind::none : PictureKind::terminal;
  if (path == "none") return PictureKind::none;
  if (path == "-" && arguments.json) fail("--picture: - and --json both print to the terminal");
  if (path == "-") return PictureKind::terminal;
  if (path.size() > 4 && path.ends_with(".png")) return PictureKind::png;
  if (path.size() > 4 && path.ends_with(".svg")) return PictureKind::svg;
  fail("--picture: '" + path + "', expected a .png or .svg file, - or none");
}

/// What the tile machine would do with the call.
TileReport predicted(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                     const SequenceShape& keys) {
  const ExplainedCall call(arguments, rule, queries, keys);
  if (picture_kind(arguments) == PictureKind::svg) use_tile_machine(used_tile_machine(), {.trace = true});
  return predict_tiles(call.q, call.k, call.v, call.options, arguments.options.backward, call.tensors);
}

/// Throws Error for an option that would do nothing.
void refuse_unused(const CLI::App& command, const ExplainArguments& arguments) {
  const auto kind = arguments.device.kind;
  if (!arguments.plan && command.count("--threads") > 0) fail("--threads: expected only with --plan");
  for (const auto* option :
       {"--memory-budget", "--num-chunks-q", "--num-chunks-kv", "--deterministic", "--allow-tf32", "--softcap"})
    if (!arguments.plan && kind != DeviceKind::tiles && command.count(option) > 0)
      fail(std::string(option) + ": expected only with --plan or --device tiles");
  for (const auto* option : {"--lm", "--dlse", "--large-lse"})
    if (kind != DeviceKind::tiles && command.count(option) > 0)
      fail(std::string(option) + ": expected only with --device tiles");
  for (const auto* option : {"--batch", "--heads", "--kv-heads"})
    if (!arguments.plan && !arguments.ranks && kind != DeviceKind::tiles && command.count(option) > 0)
      fail(std::string(option) + ": expected only with --plan, --ranks or --device tiles");
  for (const auto* option : {"--plan", "--backward", "--device", "--picture", "--side"})
    if (arguments.ranks && command.count(option) > 0) fail(std::string(option) + ": not with --ranks");
  if (kind != DeviceKind::cpu && command.count("--threads") > 0) fail("--threads: expected only with --device cpu");
}

/// The call's own tensors, by the names that they have in run.
void find_tensors(Inputs& inputs, ExplainArguments& arguments, std::vector<OwnedTensor>& tensors) {
  auto& call = arguments.call;
  for (const auto& [name, place] : {std::pair{"bias", &call.bias},
                                    {"sink", &call.sink},
                                    {"alibi", &call.alibi_slopes},
                                    {"key_lengths", &call.key_lengths}}) {
    const auto tensor = inputs.find(name);
    if (!tensor) continue;
    tensors.push_back(*tensor);
    *place = tensors.back().view();
    if (place != &call.key_lengths) place->device = arguments.device;
  }
}

void explain_command(ExplainArguments arguments) {
  const auto kind = arguments.plan || arguments.ranks ? PictureKind::none : picture_kind(arguments);
  if (arguments.plan && !arguments.picture.empty() && arguments.picture != "none") check_target(arguments.picture);
  if (kind == PictureKind::png || kind == PictureKind::svg) check_target(arguments.picture);
  const auto queries = parse_shape("--shape", arguments.shape);
  const auto keys = parse_keys(arguments.keys, queries);
  Inputs inputs(arguments.files, false);
  for (const auto& assignment : arguments.tensors) inputs.assign(assignment);
  std::vector<OwnedTensor> tables;  // must outlive the rule and the call's options
  const auto rule = parse_rule(arguments.rule, [&](const std::string& name) {
    tables.push_back(inputs.get(name));
    return tables.back().view();
  });
  if (arguments.plan || arguments.device.kind == DeviceKind::tiles) find_tensors(inputs, arguments, tables);
  inputs.refuse_unused();
  auto& options = arguments.options;
  options.type = *float_type(arguments.type);
  if (options.d_v == 0) options.d_v = options.d_qk;
  if (arguments.ranks) return explain_ranks_command(arguments, rule, queries, keys);
  if (arguments.plan) return explain_plan_command(arguments, rule, queries, keys);
  Progress progress(kind == PictureKind::none ? 1 : 2);
  progress.step("counting");
  const auto explanation = explain(rule, queries, keys, options);
  std::optional<TileReport> tiles;
  if (arguments.device.kind == DeviceKind::tiles) tiles = predicted(arguments, rule, queries, keys);

  Picture drawn;
  if (kind != PictureKind::none) {
    progress.step("drawing");
    const auto side = arguments.side.value_or(kind == PictureKind::terminal ? terminal_side : file_side);
    drawn = picture(rule, queries, keys, options.align, side);
  }
  progress.clear();
  const auto title =
      rule.text() + ", " + text_of(queries) + " queries, " + text_of(keys) + " keys, " + name_of(options.align);
  if (kind == PictureKind::png)
    write_file_whole(arguments.picture, [&](const std::string& path) { write_png(path, picture_image(drawn, title)); });
  if (kind == PictureKind::svg)
    write_file_whole(arguments.picture, [&](const std::string& path) {
      std::ofstream file(path);
      file << (tiles ? tile_picture_svg(*tiles) : picture_svg(drawn, title));
      file.close();
      if (!file) fail("cannot be written");
    });
  if (arguments.json) print_json(arguments, rule, queries, keys, explanation, tiles);
  else print_text(arguments, rule, queries, keys, explanation);
  if (tiles && !arguments.json) print_mapping(*tiles);
  if (kind == PictureKind::terminal) print_picture(drawn);
  else if (kind != PictureKind::none && !arguments.json) std::printf("picture         %s\n", arguments.picture.c_str());
}

}  // namespace

ExplainedCall::ExplainedCall(const ExplainArguments& arguments, const Rule& rule, const SequenceShape& queries,
                             const SequenceShape& keys)
    : options(arguments.call) {
  const auto& explained = arguments.options;
  const auto view = [&](std::int64_t heads, const SequenceShape& sequence, std::int64_t channels) {
    TensorView view;
    view.type = explained.type, view.device = arguments.device;
    const auto shape = shape_in(Layout::bhsd, arguments.batch, heads, sequence, channels);
    view.rank = int(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape.begin());
    view.set_row_major_strides();
    return view;
  };
  const auto kv_heads = arguments.kv_heads > 0 ? arguments.kv_heads : arguments.heads;
  q = view(arguments.heads, queries, explained.d_qk);
  k = view(kv_heads, keys, explained.d_qk), v = view(kv_heads, keys, explained.d_v);
  options.rule = rule, options.align = explained.align, options.threads = arguments.threads;
  tensors = {
      .row_sum = arguments.lm, .row_max = arguments.lm, .dlse = arguments.dlse, .large_lse = arguments.large_lse};
}

void add_explain(CLI::App& app) {
  auto* command =
      app.add_subcommand("explain", "Show what a rule looks like, how it is cut into tiles, and what it costs.");
  const auto arguments = std::make_shared<ExplainArguments>();
  auto& options = arguments->options;
  options.d_v = 0;
  command->add_option("-r,--rule", arguments->rule, "mask rule; tables by their tensors' names")->capture_default_str();
  command->add_option("--shape", arguments->shape, "the sequence: 4096, 512x512 or 16x64x64")
      ->required()
      ->type_name("SIZES");
  command->add_option("--keys", arguments->keys, "the keys' sequence, if it is another")->type_name("SIZES");
  add_align(*command, options.align);
  command->add_option("--head-size", options.d_qk, "channels of queries and keys")
      ->check(CLI::Range(1, 256).description(""))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--value-size", options.d_v, "channels of values, as --head-size if 0")
      ->check(CLI::Range(0, 512).description(""))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--type", arguments->type, "element type")
      ->check(one_of(float_type_names()))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_flag("--backward", options.backward, "describe the backward plan");
  auto* a = arguments.get();
  command->add_flag("--plan", a->plan, "show the ways to run a call: their memory and predicted times");
  const auto count = [&](const char* name, auto& value, const char* help, int least) {
    command->add_option(name, value, help)->check(CLI::Range(least, 1 << 20).description(""))->type_name("N");
  };
  count("--ranks", a->ranks, "show how the sequence is split over N processes, and the bytes that move", 1);
  count("--batch", a->batch, "with --plan, --ranks and --device tiles: batch entries", 1);
  count("--heads", a->heads, "with --plan, --ranks and --device tiles: query heads", 1);
  count("--kv-heads", a->kv_heads, "with --plan, --ranks and --device tiles: key and value heads, as --heads if 0", 0);
  count("--threads", a->threads, "with --plan on the CPU: threads, all if 0", 0);
  const auto number = [&](const char* name, std::optional<std::int64_t>& value, const char* help, bool bytes) {
    const std::string option = name;
    command
        ->add_option_function<std::string>(
            name,
            [&value, option, bytes](const std::string& text) {
              value = bytes ? bytes_of(option, text) : whole_number(option, text);
            },
            help)
        ->type_name(bytes ? "BYTES" : "N");
  };
  auto& call = a->call;
  number("--memory-budget", call.memory_budget,
         "with --plan and --device tiles: most bytes of workspace, such as 64MiB", true);
  number("--num-chunks-q", call.num_chunks_q, "with --plan and --device tiles: chunks of the queries", false);
  number("--num-chunks-kv", call.num_chunks_kv, "with --plan and --device tiles: chunks of the keys", false);
  command->add_option("--softcap", call.softcap, "with --plan and --device tiles: as in run")->type_name("NUMBER");
  add_switches(*command, call);
  command->add_flag("--lm", a->lm, "with --device tiles: the call returns row_max and row_sum");
  command->add_flag("--dlse", a->dlse, "with --device tiles and --backward: the call is given the gradient of lse");
  command->add_flag("--large-lse", a->large_lse,
                    "with --device tiles and --backward: lse has a number of 32 or more, or -32 or less");
  command
      ->add_option("--picture", arguments->picture,
                   "a .png or .svg file, - for the terminal (default), or none; with --device tiles a .svg file shows "
                   "the machine: "
                   "memory, phases, transfers")
      ->type_name("FILE");
  command
      ->add_option("--side", arguments->side,
                   "longest side of the picture in pixels (64 in the terminal, 512 in files)")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N");
  command->add_option("-i,--input", arguments->files, "file with such tables (may be repeated)")->type_name("FILE");
  command
      ->add_option(
          "--tensor", arguments->tensors,
          "a table of the rule; with --plan and --device tiles also bias, sink, alibi, key_lengths (may be repeated)")
      ->type_name("NAME=WHERE");
  add_device(*command, arguments->device);
  command->add_flag("--json", arguments->json, "print the figures as JSON");
  command->footer(
      "Examples:\n"
      "  anyflash explain --rule \"causal() & local(256)\" --shape 4096\n"
      "  anyflash explain --rule \"local(8)\" --shape 512x512 --picture local.png\n"
      "  anyflash explain --rule \"causal()\" --shape 6 --keys 3 --align scale_end\n"
      "  anyflash explain --rule \"documents(ids, ids)\" --tensor ids=ids.npy --shape 1000 --json\n"
      "  anyflash explain --rule \"causal()\" --shape 65536 --heads 8 --backward --plan --memory-budget 64MiB\n"
      "  anyflash explain --rule \"causal()\" --shape 65536 --ranks 8 --heads 16 --head-size 128 --type bfloat16\n"
      "  anyflash explain --rule \"causal()\" --shape 16384 --type float16 --device tiles --heads 16 --picture none");
  command->callback([arguments, command] {
    refuse_unused(*command, *arguments);
    explain_command(*arguments);
  });
}

}  // namespace anyflash::cli
