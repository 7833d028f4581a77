// A call -> Problem: each argument is checked once, in the order in which a user reads them.
#include "problem/problem.h"

#include <cmath>
#include <cstdio>
#include <limits>

#include "problem/checks.h"
#include "problem/extras.h"
#include "problem/layout.h"
#include "problem/regions.h"

namespace anyflash {
namespace problem {
namespace {

constexpr int most_threads = 1 << 16;

/// A stride along an axis of size 1 is never used, whatever its value.
std::int64_t used_stride(const TensorView& view, int axis, std::int64_t of_one_entry = 0) {
  return axis >= 0 && view.shape[axis] > 1 ? view.strides[axis] : of_one_entry;
}

Operand operand(const TensorView& view, const Axes& axes) {
  Operand result;
  result.data = static_cast<char*>(view.data);
  result.batch = used_stride(view, axes.batch);
  result.head = used_stride(view, axes.head);
  result.channel = used_stride(view, axes.channel, 1);
  for (int i = 0; i < axes.dimensions; ++i) {
    result.sequence[3 - axes.dimensions + i] = used_stride(view, axes.sequence + i);
  }
  return result;
}

Int3 sequence_size(Argument argument, const Axes& axes) {
  Int3 size{{1, 1, 1}};
  std::int64_t entries = 1;
  for (int i = 0; i < axes.dimensions; ++i) {
    const auto n = argument.view.shape[axes.sequence + i];
    size[3 - axes.dimensions + i] = static_cast<std::int32_t>(n);
    entries *= std::max<std::int64_t>(n, 1);  // below 2^31 before each step
    if (entries > std::numeric_limits<std::int32_t>::max()) {
      fail_value(argument.name,
                 "shape " + shape_text(argument.view) + ", expected a sequence of at most 2147483647 entries");
    }
  }
  return size;
}

std::int64_t head_size(Argument argument, int axis, std::int64_t largest) {
  const auto size = argument.view.shape[axis];
  if (size < 1 || size > largest) {
    fail_value(argument.name, "head size " + std::to_string(size) + ", expected 1 to " + std::to_string(largest));
  }
  return size;
}

/// Collects a Problem from the arguments of one call.
class Reader {
 public:
  Reader(const Options& options, Direction direction, bool data) : options_(options), data_(data) {
    problem_.direction = direction;
    problem_.rule = options.rule;
    problem_.stream = options.stream;
    read_numbers();
  }

  void read_inputs(const TensorView& q, const TensorView& k, const TensorView& v) {
    const Argument query{"query", q};
    check_given(query);
    axes_ = axes_of(options_.layout, query);
    check_floating(query);
    problem_.device = q.device;
    check_memory(query, q.device, data_);
    problem_.type = q.type;
    check_scales();
    add_input(query);
    if (options_.layout == Layout::qkv) {
      read_packed(query, k, v);
    } else {
      read_query(query);
      read_keys({"key", k}, {"value", v});
    }
    problem_.num_chunks_q = chunks("num_chunks_q", options_.num_chunks_q, problem_.queries(), "queries");
    problem_.num_chunks_kv = chunks("num_chunks_kv", options_.num_chunks_kv, problem_.keys(), "keys");
    read_extras(options_, axes_, data_, problem_, regions_);
  }

  void read_outputs(const ForwardOutputs& outputs) {
    problem_.out = result({"out", outputs.out}, problem_.d_v, true);
    problem_.lse = statistic({"lse", outputs.lse}, true);
    problem_.row_sum = statistic({"row_sum", outputs.row_sum}, true);
    problem_.row_max = statistic({"row_max", outputs.row_max}, true);
    problem_.near_maxima = outputs.near_maxima;
  }

  void read_backward_inputs(const BackwardInputs& inputs) {
    problem_.dout = result({"dout", inputs.dout}, problem_.d_v, false);
    problem_.out = result({"out", inputs.out}, problem_.d_v, false);
    check_given({"lse", inputs.lse});
    problem_.lse = statistic({"lse", inputs.lse}, false);
    problem_.dlse = statistic({"dlse", inputs.dlse}, false);
  }

  void read_gradients(const Gradients& gradients, const TensorView& q, const TensorView& k, const TensorView& v) {
    gradient({"dq", gradients.dq}, q, "query");
    if (options_.layout == Layout::qkv) {
      check_absent({"dk", gradients.dk}, "with layout qkv, expected dq to hold all three");
      check_absent({"dv", gradients.dv}, "with layout qkv, expected dq to hold all three");
      if (gradients.dq.given()) {
        problem_.dq = operand(part(gradients.dq, 0), axes_);
        problem_.dk = operand(part(gradients.dq, 1), axes_);
        problem_.dv = operand(part(gradients.dq, 2), axes_);
      }
    } else {
      gradient({"dk", gradients.dk}, k, "key");
      gradient({"dv", gradients.dv}, v, "value");
      if (gradients.dq.given()) problem_.dq = operand(gradients.dq, axes_);
      if (gradients.dk.given()) problem_.dk = operand(gradients.dk, axes_);
      if (gradients.dv.given()) problem_.dv = operand(gradients.dv, axes_);
    }
    gradient({"dbias", gradients.dbias}, options_.bias, "bias");
    gradient({"dsink", gradients.dsink}, options_.sink, "sink");
    if (gradients.dbias.given()) problem_.dbias = bias_of(gradients.dbias);
    if (gradients.dsink.given()) problem_.dsink = head_numbers(gradients.dsink);
  }

  void read_workspace() {
    const Argument workspace{"workspace", options_.workspace};
    const auto& view = workspace.view;
    if (!view.given()) return;
    check_memory(workspace, problem_.device);
    auto whole = view;
    whole.set_row_major_strides();
    for (int i = 0; i < view.rank; ++i) {
      if (view.shape[i] > 1 && view.strides[i] != whole.strides[i]) {
        fail_value(workspace.name, "strides " + text_of({view.strides.data(), std::size_t(view.rank)}) + " for shape " +
                                       shape_text(view) + ", expected memory without gaps, row by row");
      }
    }
    if (reinterpret_cast<std::uintptr_t>(view.data) % workspace_alignment != 0) {
      fail_value(workspace.name,
                 "data pointer misaligned, expected a multiple of " + std::to_string(workspace_alignment) + " bytes");
    }
    regions_.add_output(workspace);
    problem_.workspace = static_cast<char*>(view.data);
    problem_.workspace_bytes = view.elements() * static_cast<std::int64_t>(element_size(view.type));
  }

  void ask_for_gradients() {
    alignas(64) static char nowhere;
    problem_.dq = problem_.q, problem_.dk = problem_.k, problem_.dv = problem_.v;  // they have the strides of those
    problem_.dq.data = problem_.dk.data = problem_.dv.data = &nowhere;
    if (options_.bias.given()) {
      problem_.dbias = bias_of(options_.bias);
      problem_.dbias.data = &nowhere;
    }
    if (options_.sink.given()) problem_.dsink.data = &nowhere;
  }

  void ask_for(const CallTensors& tensors) {
    alignas(64) static char nowhere;
    const bool backward = problem_.direction == Direction::backward;
    const auto check = [&](const char* name, bool given, bool of_backward) {
      if (!given || of_backward == backward) return;
      fail_value(name, backward ? "given to a backward call, expected a forward one"
                                : "given to a forward call, expected a backward one");
    };
    check("row_sum", tensors.row_sum, false), check("row_max", tensors.row_max, false);
    check("dlse", tensors.dlse, true), check("large_lse", tensors.large_lse, true);
    if (tensors.row_sum) problem_.row_sum.data = &nowhere;
    if (tensors.row_max) problem_.row_max.data = &nowhere;
    if (tensors.dlse) problem_.dlse.data = &nowhere;
    problem_.large_lse = tensors.large_lse;
  }

  /// Out of core the budget covers the results too. They are files of their own, row by row.
  void ask_for_files(const TensorView& q, const TensorView& k, const TensorView& v) {
    alignas(64) static char nowhere;
    const auto file_like = [](TensorView view) {
      view.set_row_major_strides();
      view.data = &nowhere;
      return view;
    };
    const bool packed = options_.layout == Layout::qkv, backward = problem_.direction == Direction::backward;
    auto out = packed ? part(q, 0) : q;
    out.shape[axes_.channel] = problem_.d_v;
    problem_.out = operand(file_like(out), axes_);
    if (!backward) return;
    problem_.dout = problem_.out;
    const auto gradient = [&](const TensorView& view, int index) {
      return operand(packed ? part(file_like(q), index) : file_like(view), axes_);
    };
    problem_.dq = gradient(q, 0), problem_.dk = gradient(k, 1), problem_.dv = gradient(v, 2);
  }

  Problem finish() {
    regions_.check(options_.rule, problem_.device);
    return std::move(problem_);
  }

 private:
  void read_numbers() {
    layout_name(options_.layout);  // throws for an unknown layout
    if (options_.align > Align::scale_end) {
      fail_value("align", "number " + std::to_string(int(options_.align)) + ", expected one of Align");
    }
    if (options_.threads < 0 || options_.threads > most_threads) {
      fail_value("threads", std::to_string(options_.threads) + ", expected 0 (all) to " + std::to_string(most_threads));
    }
    problem_.align = options_.align;
    problem_.threads = int(options_.threads);
    problem_.deterministic = options_.deterministic;
    problem_.allow_tf32 = options_.allow_tf32;
    problem_.memory_budget = options_.memory_budget;
    if (options_.out_of_core) {
      problem_.tensors_in_budget = true;
      if (options_.out_of_core->after_chunk) problem_.after_chunk = &options_.out_of_core->after_chunk;
    }
    if (options_.memory_budget.value_or(0) < 0) {
      fail_value("memory_budget", std::to_string(*options_.memory_budget) + ", expected a number of bytes");
    }
  }

  /// A number of chunks, which must divide the number of entries. With no entries any number does.
  static std::optional<std::int64_t> chunks(const char* name, std::optional<std::int64_t> given, std::int64_t entries,
                                            const char* what) {
    if (!given || (*given > 0 && entries % *given == 0)) return given;
    std::string divisors;
    int listed = 0;
    for (std::int64_t i = 1; i <= entries && listed < 6; ++i) {
      if (entries % i != 0) continue;
      divisors += ++listed == 6 ? ", ..." : (listed == 1 ? ": " : ", ") + std::to_string(i);
    }
    fail_value(name, std::to_string(*given) + ", expected a divisor of " + std::to_string(entries) + " " + what +
                         (entries > 0 ? divisors : ", any number from 1"));
  }

  /// scale and softcap must be representable in the type of the scores' computation.
  void check_scales() {
    const bool wide = problem_.type == ElementType::float64;
    const double largest = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
    const double least = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
    const char* name = wide ? "float64" : "float32";
    if (options_.scale && !(std::abs(*options_.scale) <= largest)) {
      fail_value("scale", number_text(*options_.scale) + ", expected a finite " + name);
    }
    const auto softcap = options_.softcap;
    if (softcap != 0 && !(softcap >= least && softcap <= largest)) {
      fail_value("softcap", number_text(softcap) + ", expected 0 (none) or a positive " + name);
    }
    problem_.softcap = softcap;
  }

  static std::string number_text(double number) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", number);
    return text;
  }

  void read_query(Argument query) {
    const auto& view = query.view;
    problem_.dimensions = axes_.dimensions;
    problem_.batch = axes_.batch_of(view);
    problem_.heads_q = view.shape[axes_.head];
    problem_.d_qk = head_size(query, axes_.channel, largest_d_qk);
    problem_.q_size = sequence_size(query, axes_);
    // Rounded once: 1 / sqrt in double precision is wrong in the last place for 52 of the 256 head sizes.
    problem_.scale =
        options_.scale.value_or(static_cast<double>(1 / std::sqrt(static_cast<long double>(problem_.d_qk))));
    problem_.q = operand(view, axes_);
  }

  void read_packed(Argument query, const TensorView& k, const TensorView& v) {
    check_absent({"key", k}, "with layout qkv, expected query to hold all three");
    check_absent({"value", v}, "with layout qkv, expected query to hold all three");
    check_absent({"page_table", options_.page_table}, "with layout qkv, expected keys outside query");
    check_size("query", "first size", query.view.shape[0], 3, " (queries, keys, values)");
    read_query({"query", part(query.view, 0)});
    problem_.k = operand(part(query.view, 1), axes_);
    problem_.v = operand(part(query.view, 2), axes_);
    problem_.heads_kv = problem_.heads_q;
    problem_.k_size = problem_.q_size;
    problem_.d_v = problem_.d_qk;
  }

  void read_keys(Argument key, Argument value) {
    const bool paged = options_.page_table.given();
    if (paged) check_pages_offered();
    const auto& axes = paged ? page_axes : axes_;
    for (const auto& argument : {key, value}) {
      check_given(argument);
      check_size(argument.name, "rank", argument.view.rank, axes.rank, paged ? " with a page_table" : " as in query");
      check_type(argument, problem_.type, " as in query");
      check_memory(argument, problem_.device, data_);
      if (!paged && axes.batch >= 0) {
        check_size(argument.name, "batch", argument.view.shape[axes.batch], problem_.batch, " as in query");
      }
      add_input(argument);
    }
    check_size(key.name, "head size", key.view.shape[axes.channel], problem_.d_qk, " as in query");
    problem_.d_v = head_size(value, axes.channel, largest_d_v);
    problem_.heads_kv = key.view.shape[axes.head];
    check_size(value.name, "heads", value.view.shape[axes.head], problem_.heads_kv, " as in key");
    if (problem_.heads_kv == 0 ? problem_.heads_q != 0 : problem_.heads_q % problem_.heads_kv != 0) {
      fail_value(key.name, "heads " + std::to_string(problem_.heads_kv) + ", expected a divisor of the " +
                               std::to_string(problem_.heads_q) + " of query");
    }
    for (int i = 0; i < axes.dimensions; ++i) {
      const auto axis = axes.sequence + i;
      check_size(value.name,
                 paged                  ? "page size"
                 : axes.dimensions == 1 ? "keys"
                                        : "sequence size",
                 value.view.shape[axis], key.view.shape[axis], " as in key");
    }
    if (paged) check_size(value.name, "pages", value.view.shape[0], key.view.shape[0], " as in key");
    problem_.k_size = sequence_size(key, axes);
    problem_.k = operand(key.view, axes);
    problem_.v = operand(value.view, axes);
    if (paged) read_pages(options_.page_table, key.view, data_, problem_, regions_);
  }

  void check_pages_offered() const {
    if (problem_.direction == Direction::backward) {
      fail(Error::Kind::unsupported, "page_table: given to backward, expected keys and values without pages");
    }
    if (options_.layout == Layout::thd) {
      fail(Error::Kind::unsupported, "page_table: given with layout thd, expected bhsd, bshd or bhds");
    }
    check_size("page_table", "sequence dimensions", axes_.dimensions, 1);
    if (!options_.key_lengths.given())
      fail_value("key_lengths", "not given, expected the lengths that go with page_table");
  }

  /// out or dout: query's shape with other channels.
  Operand result(Argument argument, std::int64_t channels, bool written) {
    check_given(argument);
    const auto& view = argument.view;
    check_size(argument.name, "rank", view.rank, axes_.rank);
    check_type(argument, problem_.type, " as in query");
    std::int64_t expected[TensorView::max_rank];
    if (axes_.batch >= 0) expected[axes_.batch] = problem_.batch;
    expected[axes_.head] = problem_.heads_q;
    expected[axes_.channel] = channels;
    for (int i = 0; i < axes_.dimensions; ++i) expected[axes_.sequence + i] = problem_.q_size[3 - axes_.dimensions + i];
    check_shape(argument, {expected, std::size_t(view.rank)});
    add(argument, written);
    return operand(view, axes_);
  }

  /// lse, row_sum, row_max or dlse: (batch, heads, queries), without batch in the layouts that have none.
  RowStatistic statistic(Argument argument, bool written) {
    const auto& view = argument.view;
    if (!view.given()) return {};
    const int first = axes_.batch >= 0 ? 1 : 0;
    check_size(argument.name, "rank", view.rank, first + 2);
    check_type(argument, problem_.type == ElementType::float64 ? ElementType::float64 : ElementType::float32);
    const std::int64_t expected[] = {problem_.batch, problem_.heads_q, problem_.queries()};
    check_shape(argument, std::span(expected).subspan(1 - first));
    add(argument, written);
    return {static_cast<char*>(view.data), used_stride(view, first - 1), used_stride(view, first),
            used_stride(view, first + 1)};
  }

  void gradient(Argument argument, const TensorView& of, const char* of_name) {
    const auto& view = argument.view;
    if (!view.given()) return;
    if (!of.given()) fail_value(argument.name, std::string("given without ") + of_name);
    check_size(argument.name, "rank", view.rank, of.rank, (std::string(" as in ") + of_name).c_str());
    check_type(argument, of.type, (std::string(" as in ") + of_name).c_str());
    check_shape(argument, {of.shape.data(), std::size_t(of.rank)});
    add(argument, true);
  }

  void add_input(Argument argument) {
    if (data_) regions_.add_input(argument);
  }

  void add(Argument argument, bool written) {
    check_memory(argument, problem_.device);
    if (written) check_writable(argument);
    written ? regions_.add_output(argument) : regions_.add_input(argument);
  }

  const Options& options_;
  bool data_;
  Axes axes_{};
  Problem problem_;
  Regions regions_;
};

}  // namespace
}  // namespace problem

Problem forward_problem(const TensorView& q, const TensorView& k, const TensorView& v, const ForwardOutputs& outputs,
                        const Options& options) {
  problem::Reader reader(options, Direction::forward, true);
  reader.read_inputs(q, k, v);
  reader.read_outputs(outputs);
  reader.read_workspace();
  return reader.finish();
}

Problem backward_problem(const BackwardInputs& inputs, const TensorView& q, const TensorView& k, const TensorView& v,
                         const Gradients& gradients, const Options& options) {
  problem::Reader reader(options, Direction::backward, true);
  reader.read_inputs(q, k, v);
  reader.read_backward_inputs(inputs);
  reader.read_gradients(gradients, q, k, v);
  reader.read_workspace();
  return reader.finish();
}

Problem shape_problem(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options,
                      Direction direction, const CallTensors& tensors) {
  problem::Reader reader(options, direction, false);
  reader.read_inputs(q, k, v);
  if (direction == Direction::backward) reader.ask_for_gradients();
  reader.ask_for(tensors);
  if (options.out_of_core) reader.ask_for_files(q, k, v);
  return reader.finish();
}

}  // namespace anyflash
