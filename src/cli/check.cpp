// anyflash check: the library compared with the reference, on random shapes or on the user's own tensors.

#include <anyflash/anyflash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "check_cases.h"
#include "commands.h"
#include "compare.h"
#include "numbers.h"
#include "progress.h"

namespace anyflash::cli {

namespace {

struct CheckArguments {
  CallArguments call;
  std::uint64_t seed = 1;
  bool quick = false;
};

// The textbook formula's largest error on one small call is a matter of luck. Over all calls in a type, each relative
// to the number of terms that its result sums, it is not. So the bound of a result is 2 * terms * (the largest textbook
// error / terms over those calls) + one unit in the last place. Where products use TF32, 2^-9 * terms more.
class Bar {
 public:
  Bar(const CallArguments& call, ElementType type) {
    if (call.options.allow_tf32 && call.device.kind == DeviceKind::cuda && type == ElementType::float32)
      allowed_ = 0x1p-9;
  }
  void learn(const Measured& one) {
    auto& ratio = textbook_ratio_[one.tensor];
    if (one.terms > 0) ratio = std::max(ratio, one.textbook_error / one.terms);
  }
  double of(const Measured& one) const {
    return (2 * textbook_ratio_.at(one.tensor) + allowed_) * one.terms + one.unit;
  }

 private:
  double allowed_ = 0;
  std::map<std::string, double> textbook_ratio_;
};

// The results in one line of the table: calls of one rule and type.
class Line {
 public:
  explicit Line(std::string rule) : rule_(std::move(rule)) {}
  void add(const std::vector<Measured>& measured, const std::string& description, Bar& bar) {
    for (const auto& one : measured) {
      bar.learn(one);
      all_.push_back({one, description});
    }
  }
  void add_failure(const std::string& complaint) { complaints_.push_back(complaint); }

  /// Prints the line with its failures.
  void print(const std::string& type, const Bar& bar) {
    const Checked* worst = nullptr;
    double worst_share = 0;
    for (const auto& one : all_) {
      const double share = one.measured.error / bar.of(one.measured);
      if (worst == nullptr || share > worst_share) {
        worst = &one;
        worst_share = share;
      }
      if (share <= 1) continue;
      char figures[80];
      std::snprintf(figures, sizeof figures, ": error %.3g over the bar %.3g: ", one.measured.error,
                    bar.of(one.measured));
      complaints_.push_back(one.measured.tensor + figures + one.description);
    }
    if (worst)
      std::printf("%-48s %-9s %6d  %-22s %10.3g %10.3g %6.2f%s\n", rule_.c_str(), type.c_str(), checks(),
                  worst->measured.tensor.c_str(), worst->measured.error, bar.of(worst->measured), worst_share,
                  complaints_.empty() ? "" : "  FAILED");
    else std::printf("%-48s %-9s %6d  FAILED\n", rule_.c_str(), type.c_str(), checks());
    for (const auto& complaint : complaints_) std::printf("    %s\n", complaint.c_str());
  }
  int checks() const { return int(all_.size()); }
  int failures() const { return int(complaints_.size()); }

 private:
  struct Checked {
    Measured measured;
    std::string description;
  };

  std::string rule_;
  std::vector<Checked> all_;
  std::vector<std::string> complaints_;
};

void print_header() {
  std::printf("%-48s %-9s %6s  %-22s %10s %10s %6s\n", "rule", "type", "checks", "worst", "max error", "bar", "share");
}

void finish(int checks, int failures) {
  if (failures > 0) fail(std::to_string(failures) + " checks failed, " + std::to_string(checks) + " were made");
  std::printf("%d checks passed\n", checks);
}

// All rules, or the user's rule in every dimension it is meant for. (A rule with the user's own tables needs --input.)
std::vector<CheckedRule> rules_to_check(const std::string& text) {
  if (text.empty()) return checked_rules();
  std::vector<CheckedRule> rules;
  for (const auto& known : checked_rules())
    if (known.text == text) rules.push_back(known);
  if (!rules.empty()) return rules;
  const auto rule = parse_rule(text);
  for (int dimensions = 1; dimensions <= 3; ++dimensions) {
    const SequenceShape shape(std::size_t(dimensions), 4);
    try {
      pattern(rule, shape, shape);
      rules.push_back({text, dimensions});
    } catch (const Error&) {
      if (dimensions == 3 && rules.empty()) throw;
    }
  }
  return rules;
}

constexpr Align alignments[] = {Align::none_front, Align::none_end, Align::scale_front, Align::scale_end};

// Random calls of each rule, type and alignment; more of them if few rules give few calls to derive the bound from.
int rounds_of(const CheckArguments& arguments) {
  return (arguments.quick ? 1 : 3) * (arguments.call.rule.empty() ? 1 : 4);
}

Line check_rule(const CheckedRule& rule, ElementType type, const CheckArguments& arguments, Bar& bar,
                Progress& progress) {
  Line line(rule.text + (rule.dimensions > 1 ? "  " + std::to_string(rule.dimensions) + "-D" : ""));
  for (const auto align : alignments)
    for (int round = 0; round < rounds_of(arguments); ++round) {
      progress.step("checking");
      auto made = random_case(rule, type, align, arguments.seed * 12 + std::uint64_t(round));
      made.call.device = arguments.call.device;
      for_each_switch([&](const char*, auto member) { made.call.options.*member = arguments.call.options.*member; });
      try {
        line.add(compare(made.call, &made.dout, made.dlse ? &*made.dlse : nullptr), made.description, bar);
      } catch (const Error& error) {
        line.add_failure(std::string(error.what()) + ": " + made.description);
      }
    }
  return line;
}

void print_all(std::vector<Line>& lines, const std::string& type, const Bar& bar, int& checks, int& failures) {
  for (auto& line : lines) {
    line.print(type, bar);
    checks += line.checks();
    failures += line.failures();
  }
  std::fflush(stdout);
}

void check_random(const CheckArguments& arguments) {
  synchronize(arguments.call.device);  // throws if there is no such device
  const auto rules = rules_to_check(arguments.call.rule);
  auto types = arguments.call.type.empty() ? float_type_names() : std::vector{arguments.call.type};
  if (arguments.call.type.empty() && arguments.call.device.kind == DeviceKind::tiles) types = {"float16", "float32"};
  Progress progress(int(rules.size() * types.size() * std::size(alignments)) * rounds_of(arguments));
  int checks = 0, failures = 0;
  print_header();
  for (const auto& type : types) {
    Bar bar(arguments.call, *float_type(type));
    std::vector<Line> lines;
    for (const auto& rule : rules) lines.push_back(check_rule(rule, *float_type(type), arguments, bar, progress));
    progress.clear();
    print_all(lines, type, bar, checks, failures);
  }
  finish(checks, failures);
}

void check_input(const CheckArguments& arguments) {
  Progress progress(2);
  progress.step("reading");
  auto inputs = arguments.call.inputs();
  const auto call = make_call(arguments.call, inputs, true);
  auto dout = inputs.find("dout");
  const auto dlse = inputs.find("dlse");
  inputs.refuse_unused();
  const bool forward_only = call.options.page_table.given();
  for (const auto* gradient : {dout ? "dout" : nullptr, dlse ? "dlse" : nullptr})
    if (forward_only && gradient)
      fail(std::string(gradient) + ": given with page_table, which has no backward; leave it out, with --without " +
           gradient + " if it is in an input file");
  if (!dout && !forward_only) dout = random_dout(call, arguments.seed);
  Bar bar(arguments.call, call.q.type);
  std::vector<Line> lines;
  progress.step("comparing");
  for (const auto& one : compare(call, dout ? &*dout : nullptr, dlse ? &*dlse : nullptr)) {
    lines.emplace_back(call.rule);
    lines.back().add({one}, call.options.rule.text(), bar);
  }
  progress.clear();
  int checks = 0, failures = 0;
  print_header();
  print_all(lines, element_name(call.q.type), bar, checks, failures);
  finish(checks, failures);
}

void check_command(const CLI::App& command, CheckArguments& arguments) {
  const bool own = !arguments.call.files.empty() || !arguments.call.named.empty();
  if (!own) {
    for (const auto* option : {"--align", "--layout", "--scale", "--softcap", "--tensor", "--without", "--threads"})
      if (command.count(option) > 0) fail(std::string(option) + ": only with --input");
    return check_random(arguments);
  }
  if (arguments.quick) fail("--quick: not with --input");
  if (arguments.call.rule.empty()) arguments.call.rule = "full()";
  check_input(arguments);
}

}  // namespace

void add_check(CLI::App& app) {
  auto* command = app.add_subcommand("check", "Compare the library with a reference, forward and backward.");
  const auto arguments = std::make_shared<CheckArguments>();
  arguments->call.rule.clear();
  arguments->call.add_to(*command);
  command
      ->add_option("--type", arguments->call.type,
                   "check this type alone; with --input: two-byte elements are bfloat16")
      ->check(one_of(float_type_names()))
      ->type_name("NAME");
  command->add_option("--seed", arguments->seed, "of the random shapes and numbers")
      ->check(CLI::Range(0, INT32_MAX).description(""))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--quick", arguments->quick, "a third of the random calls");
  command->footer(
      "Each result's largest error is held against the bar of the specification: twice the largest error of the\n"
      "textbook formula in the inputs' type, plus one unit in the last place. Both errors are against the formula in\n"
      "long double; the textbook's is the largest over all calls in a type, in proportion to the terms summed.\n"
      "float32 on a GPU with --allow-tf32: 2^-9 of the terms summed more.\n\n"
      "Examples:\n"
      "  anyflash check\n"
      "  anyflash check --quick --type bfloat16 --seed 7\n"
      "  anyflash check --rule \"causal() & ~local(4)\"\n"
      "  anyflash check --input qkv.npz --rule \"documents(ids, ids)\"");
  command->callback([command, arguments] { check_command(*command, *arguments); });
}

}  // namespace anyflash::cli
