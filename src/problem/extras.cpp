#include "problem/extras.h"

#include <algorithm>
#include <limits>

#include "rules/compile.h"

namespace anyflash::problem {
namespace {

void check_bias(const Options& options, bool data, Problem& problem, Regions& regions) {
  const Argument bias{"bias", options.bias};
  if (!bias.view.given()) return;
  check_size(bias.name, "rank", bias.view.rank, 4);
  check_floating(bias);
  check_memory(bias, problem.device, data);
  const std::int64_t full[4] = {problem.batch, problem.heads_q, problem.queries(), problem.keys()};
  for (int i = 0; i < 4; ++i) {
    if (bias.view.shape[i] == 1 || bias.view.shape[i] == full[i]) continue;
    fail_value(bias.name,
               "shape " + shape_text(bias.view) + ", expected " + text_of(full) + ", or 1 in place of a size");
  }
  if (data) regions.add_input(bias);
  problem.bias = bias_of(bias.view);
}

void check_alibi(const Options& options, bool data, Problem& problem, Regions& regions) {
  const Argument slopes{"alibi_slopes", options.alibi_slopes};
  const auto& view = slopes.view;
  if (!view.given()) return;
  if (view.rank != 2) check_size(slopes.name, "rank", view.rank, 1, " (heads) or 2 (batch, heads)");
  check_type(slopes, ElementType::float32, ElementType::float64);
  check_memory(slopes, problem.device, data);
  if (view.rank == 1) {
    check_shape(slopes, {&problem.heads_q, 1});
  } else {
    const std::int64_t expected[] = {problem.batch, problem.heads_q};
    check_shape(slopes, expected);
  }
  if (data) regions.add_input(slopes);
  problem.alibi = head_numbers(view);
}

void check_sink(const Options& options, bool data, Problem& problem, Regions& regions) {
  const Argument sink{"sink", options.sink};
  if (!sink.view.given()) return;
  check_size(sink.name, "rank", sink.view.rank, 1);
  check_floating(sink);
  check_memory(sink, problem.device, data);
  check_shape(sink, {&problem.heads_q, 1});
  if (data) regions.add_input(sink);
  problem.sink = head_numbers(sink.view);
}

bool on_cpu(const TensorView& view) { return view.device.kind == DeviceKind::cpu; }

/// The device where lengths or a page table must be: the CPU if they are there, else the query's.
Device place_of(const TensorView& view, const Problem& problem) { return on_cpu(view) ? Device{} : problem.device; }

void check_integers(Argument argument, const Problem& problem, Regions& regions) {
  check_size(argument.name, "rank", argument.view.rank, 1);
  check_type(argument, ElementType::int32, ElementType::int64);
  check_memory(argument, place_of(argument.view, problem));
  regions.add_input(argument);
}

void check_cu_seqlens(const Options& options, Problem& problem, Regions& regions) {
  const Argument sides[] = {{"cu_seqlens_q", options.cu_seqlens_q}, {"cu_seqlens_k", options.cu_seqlens_k}};
  for (const auto& side : sides) {
    if (options.layout != Layout::thd) {
      if (side.view.given()) {
        fail_value(side.name,
                   std::string("given with layout ") + layout_name(options.layout) + ", expected only with thd");
      }
      continue;
    }
    if (!side.view.given()) fail_value(side.name, "not given, expected the cumulative lengths of layout thd");
    check_integers(side, problem, regions);
    if (side.view.shape[0] < 1) fail_value(side.name, "shape (0), expected documents + 1 numbers");
  }
  if (options.layout == Layout::thd) {
    check_size("cu_seqlens_k", "size", options.cu_seqlens_k.shape[0], options.cu_seqlens_q.shape[0],
               " as in cu_seqlens_q");
  }
  problem.cu_seqlens_q = options.cu_seqlens_q;
  problem.cu_seqlens_k = options.cu_seqlens_k;
}

void check_key_lengths(const Options& options, const Axes& axes, Problem& problem, Regions& regions) {
  const Argument lengths{"key_lengths", options.key_lengths};
  if (!lengths.view.given()) return;
  if (options.layout == Layout::thd)
    fail_value(lengths.name, "given with layout thd, expected cu_seqlens_k to tell the lengths");
  check_size(lengths.name, "sequence dimensions", axes.dimensions, 1);
  check_integers(lengths, problem, regions);
  check_shape(lengths, {&problem.batch, 1});
  for (std::int64_t b = 0; b < problem.batch && on_cpu(lengths.view); ++b) {
    const auto length = integer_at(lengths.view, b);
    if (length < 0 || length > problem.keys()) {
      fail_value(lengths.name, std::to_string(length) + " for batch entry " + std::to_string(b) + ", expected 0 to " +
                                   std::to_string(problem.keys()));
    }
  }
  problem.key_lengths = lengths.view;
}

/// Every page that holds a key must exist; table entries beyond may hold anything. Problem has pages and key lengths.
void check_page_numbers(const Problem& problem, std::int64_t pages) {
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const auto length = integer_at(problem.key_lengths, b);
    const auto used = (length + problem.pages.page_size - 1) / problem.pages.page_size;
    for (std::int64_t i = 0; i < used; ++i) {
      const auto page = problem.pages.table[b * problem.pages.table_batch + i * problem.pages.table_page];
      if (page >= 0 && page < pages) continue;
      fail_value("page_table", "page " + std::to_string(page) + " at (" + std::to_string(b) + ", " + std::to_string(i) +
                                   "), expected 0 to " + std::to_string(pages - 1));
    }
  }
}

/// Checks that all tables of a call are in one place.
void check_places(const Options& options, Problem& problem) {
  const Argument all[] = {{"key_lengths", options.key_lengths},
                          {"page_table", options.page_table},
                          {"cu_seqlens_q", options.cu_seqlens_q},
                          {"cu_seqlens_k", options.cu_seqlens_k}};
  const Argument* first = nullptr;
  for (const auto& one : all) {
    if (!one.view.given()) continue;
    if (first && on_cpu(one.view) != on_cpu(first->view)) {
      fail(Error::Kind::device, std::string(one.name) + ": on " + device_name(one.view.device) + ", expected " +
                                    device_name(first->view.device) + " as " + first->name);
    }
    if (!first) first = &one;
    problem.tables_on_device |= !on_cpu(one.view);
  }
  const auto in_rule = rules::table_axes(options.rule);
  if (in_rule.on_cpu && in_rule.on_device)
    fail(Error::Kind::device, "rule: tables on the cpu and on a GPU, expected all in one place");
  if (first && in_rule.tables && in_rule.on_device == on_cpu(first->view)) {
    fail(Error::Kind::device, std::string("rule: a table on ") + (in_rule.on_device ? "a GPU" : "the cpu") +
                                  ", expected " + device_name(first->view.device) + " as " + first->name);
  }
  problem.tables_on_device |= in_rule.on_device;
  if (options.key_lengths.given() && in_rule.documents && problem.tables_on_device) {
    fail(Error::Kind::unsupported, "key_lengths: with documents on a GPU, expected both on the cpu");
  }
}

}  // namespace

void read_extras(const Options& options, const Axes& axes, bool data, Problem& problem, Regions& regions) {
  check_bias(options, data, problem, regions);
  check_alibi(options, data, problem, regions);
  check_sink(options, data, problem, regions);
  check_cu_seqlens(options, problem, regions);
  check_key_lengths(options, axes, problem, regions);
  check_places(options, problem);
  if (data && problem.pages.page_size > 0 && !problem.tables_on_device)
    check_page_numbers(problem, problem.pages.pages);
}

void read_pages(const TensorView& page_table, const TensorView& key, bool data, Problem& problem, Regions& regions) {
  const Argument table{"page_table", page_table};
  check_size(table.name, "rank", page_table.rank, 2);
  check_type(table, ElementType::int32);
  check_memory(table, place_of(page_table, problem), data);
  check_size(table.name, "batch", page_table.shape[0], problem.batch, " as in query");
  const auto page_size = key.shape[page_axes.sequence];
  if (page_size < 1) fail_value("key", "page size 0, expected at least 1");
  const auto keys = page_table.shape[1] * page_size;
  if (keys > std::numeric_limits<std::int32_t>::max()) {
    fail_value(table.name, std::to_string(page_table.shape[1]) + " pages of " + std::to_string(page_size) +
                               " keys, expected at most 2147483647 keys");
  }
  problem.k_size = {{1, 1, static_cast<std::int32_t>(keys)}};
  problem.pages = {static_cast<const std::int32_t*>(page_table.data), page_table.strides[0], page_table.strides[1],
                   page_size, key.shape[page_axes.batch]};
  if (data) regions.add_input(table);
}

Bias bias_of(const TensorView& view) {
  Bias bias;
  bias.data = static_cast<char*>(view.data);
  bias.type = view.type;
  for (int i = 0; i < 4; ++i) {
    bias.size[i] = view.shape[i];
    bias.stride[i] = view.shape[i] > 1 ? view.strides[i] : 0;
  }
  return bias;
}

HeadNumbers head_numbers(const TensorView& view) {
  const bool batched = view.rank == 2;
  return {static_cast<char*>(view.data), view.type, batched ? view.strides[0] : 0, view.strides[batched ? 1 : 0]};
}

}  // namespace anyflash::problem
