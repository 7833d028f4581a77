// anyflash run: attention on tensors from files, the result to a file.

#include <anyflash/anyflash.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "call.h"
#include "commands.h"
#include "out_of_core.h"
#include "progress.h"
#include "results.h"
#include "tensor_file.h"

namespace anyflash::cli {

namespace {

struct RunArguments {
  CallArguments call;
  std::string output;
  bool lse = false, lm = false, backward = false, quiet = false;
};

void run_command(const RunArguments& arguments) {
  if (arguments.call.options.memory_budget && file_format(arguments.output) == FileFormat::npy &&
      arguments.call.device.kind == DeviceKind::cpu) {
    if (arguments.lm) fail("--lm: expected without --memory-budget and a .npy output");
    return run_out_of_core(arguments.call, {arguments.output, arguments.lse, arguments.backward, arguments.quiet});
  }
  // Errors in the output's name are reported before the work.
  const bool one_tensor = file_format(arguments.output) == FileFormat::npy;
  if (one_tensor && (arguments.lse || arguments.lm || arguments.backward))
    fail(arguments.output + ": a .npy file holds one tensor; use .npz or .safetensors with --lse, --lm and --backward");
  check_target(arguments.output);
  Progress progress(arguments.backward ? 4 : 3, arguments.quiet);
  progress.step("reading");
  auto inputs = arguments.call.inputs();
  if (inputs.names_file(arguments.output)) fail("--output: " + arguments.output + " is an input file too");
  const auto call = make_call(arguments.call, inputs, arguments.backward);
  std::optional<OwnedTensor> dout, dlse;
  if (arguments.backward) {
    dout = inputs.get("dout", "--dout");
    dlse = inputs.find("dlse");
  }
  inputs.refuse_unused({"dout", "dlse"});

  progress.step("forward");
  const auto start = std::chrono::steady_clock::now();
  const auto results = run_forward(call, arguments.lm);
  NamedTensors written = {{"out", results.out}};
  if (arguments.lse) written.emplace_back("lse", results.lse);
  if (arguments.lm) {
    written.emplace_back("row_max", *results.row_max);
    written.emplace_back("row_sum", *results.row_sum);
  }
  if (arguments.backward) {
    progress.step("backward");
    for (auto& gradient : run_backward(call, results, *dout, dlse ? &*dlse : nullptr))
      written.push_back(std::move(gradient));
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  progress.step("writing");
  write_tensors(arguments.output, written);
  progress.clear();

  if (arguments.quiet) return;
  std::printf("rule %s\n", call.options.rule.text().c_str());
  for (const auto& [name, tensor] : call.extra) std::printf("with %s\n", describe(name, tensor).c_str());
  for (const auto& [name, tensor] : written) std::printf("%s\n", describe(name, tensor).c_str());
  std::printf("%.3g ms, written to %s\n", time.count(), arguments.output.c_str());
}

}  // namespace

void add_run(CLI::App& app) {
  auto* command = app.add_subcommand("run", "Compute attention on tensors from .npy, .npz or .safetensors files.");
  const auto arguments = std::make_shared<RunArguments>();
  arguments->call.add_to(*command);
  command
      ->add_option("--type", arguments->call.type,
                   "bfloat16: two-byte integers and voids in .npy and .npz files are that")
      ->check(one_of({"bfloat16"}))
      ->type_name("NAME");
  command->add_option("-o,--output", arguments->output, "where the results go: .npy, .npz or .safetensors")
      ->required()
      ->type_name("FILE");
  command->add_flag("--lse", arguments->lse, "also write lse, the log-sum-exp of the scores");
  command->add_flag("--lm", arguments->lm, "also write row_max and row_sum, the two parts of lse");
  command->add_flag("--backward", arguments->backward, "also write the gradients; dout must be given");
  command->add_flag("--quiet", arguments->quiet, "print nothing");
  command->footer(
      "A tensor is found by its name in the input files, or WHERE its option says:\n"
      "  FILE.npy   FILE.npz:ENTRY   FILE.safetensors:ENTRY   ENTRY of an input file\n"
      "With --memory-budget and a .npy output q, k, v and dout stay in their .npy files, which may be larger than "
      "memory.\n"
      "The budget then covers the parts of them that are in memory. Further results are OUT.lse.npy, OUT.dq.npy, "
      "...\n\n"
      "bias, sink, alibi, cu_seqlens_q, cu_seqlens_k, key_lengths and page_table are used if an input file has "
      "them.\n\n"
      "Examples:\n"
      "  anyflash run --input qkv.npz --rule \"causal() & local(256)\" --align none_end --output out.npz --lse\n"
      "  anyflash run --query q.npy --key k.npy --value v.npy --mask mask.npy --output out.npy\n"
      "  anyflash run --input layer.safetensors --query attn.q --key attn.k --value attn.v --output out.safetensors\n"
      "  anyflash run --input qkv.npz --tensor ids=documents.npy --rule \"documents(ids, ids) & causal()\" --output "
      "out.npz\n"
      "  anyflash run --input qkv.npz --dout dout.npy --backward --output gradients.npz\n"
      "  anyflash run --query q.npy --key k.npy --value v.npy --memory-budget 64MiB --output out.npy");
  command->callback([arguments] { run_command(*arguments); });
}

}  // namespace anyflash::cli
