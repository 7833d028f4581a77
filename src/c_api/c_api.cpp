// The C API: C structs become views and Options, exceptions become a status and a line.
#include <anyflash/c_api.h>

#include <anyflash/anyflash.h>
#include <anyflash/tile_machine.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

struct anyflash_rule {
  anyflash::Rule rule;
};

struct anyflash_plan {
  anyflash::Plan plan;
};

namespace {

using namespace anyflash;

// A fixed buffer: reporting that memory has run out needs no memory.
thread_local char last_error[512] = "";

anyflash_status failed(anyflash_status status, const char* line) {
  std::snprintf(last_error, sizeof(last_error), "%s", line);
  return status;
}

anyflash_status status_of(Error::Kind kind) {
  switch (kind) {
    case Error::Kind::value: return ANYFLASH_ERROR_VALUE;
    case Error::Kind::type: return ANYFLASH_ERROR_TYPE;
    case Error::Kind::device: return ANYFLASH_ERROR_DEVICE;
    case Error::Kind::unsupported: return ANYFLASH_ERROR_UNSUPPORTED;
    case Error::Kind::memory: return ANYFLASH_ERROR_MEMORY;
  }
  return ANYFLASH_ERROR_INTERNAL;
}

/// Runs work and catches all exceptions.
template <typename Work>
anyflash_status guarded(const Work& work) noexcept {
  try {
    work();
    return ANYFLASH_OK;
  } catch (const Error& error) {
    return failed(status_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(ANYFLASH_ERROR_MEMORY, "not enough memory");
  } catch (const std::exception& error) {
    return failed(ANYFLASH_ERROR_INTERNAL, error.what());
  } catch (...) {
    return failed(ANYFLASH_ERROR_INTERNAL, "unknown error");
  }
}

[[noreturn]] void fail(const char* name, const std::string& text) {
  throw Error(Error::Kind::value, std::string(name) + ": " + text);
}

template <typename Pointer>
Pointer not_null(const char* name, Pointer pointer) {
  if (!pointer) fail(name, "null pointer");
  return pointer;
}

/// A C number as an enumeration whose last value is `last`.
template <typename Enum>
Enum enumerated(const char* name, std::int32_t number, Enum last) {
  if (number < 0 || number > static_cast<std::int32_t>(last)) {
    fail(name, std::to_string(number) + ", expected 0 to " + std::to_string(int(last)));
  }
  return static_cast<Enum>(number);
}

TensorView view_of(const char* name, const anyflash_tensor* tensor) {
  TensorView view;
  if (!tensor) return view;
  const auto prefixed = [&](const char* what) { return std::string(name) + ": " + what; };
  if (tensor->rank < 0 || tensor->rank > ANYFLASH_MAX_RANK) {
    fail(name, "rank " + std::to_string(tensor->rank) + ", expected 0 to " + std::to_string(ANYFLASH_MAX_RANK));
  }
  view.data = tensor->data;
  view.type = enumerated(prefixed("type").c_str(), tensor->type, ElementType::int64);
  view.device = {enumerated(prefixed("device").c_str(), tensor->device, DeviceKind::tiles), tensor->device_index};
  view.rank = tensor->rank;
  std::copy_n(tensor->shape, view.rank, view.shape.begin());
  std::copy_n(tensor->strides, view.rank, view.strides.begin());
  return view;
}

Options options_of(const anyflash_options* given) {
  Options options;
  if (!given) return options;
  if (given->struct_size != sizeof(anyflash_options)) {
    fail("options", "struct_size " + std::to_string(given->struct_size) + ", expected " +
                        std::to_string(sizeof(anyflash_options)) + " as anyflash_options_init sets it");
  }
  if (given->rule) options.rule = given->rule->rule;
  options.align = enumerated("align", given->align, Align::scale_end);
  options.layout = enumerated("layout", given->layout, Layout::thd);
  if (given->has_scale) options.scale = given->scale;
  options.softcap = given->softcap;
  options.bias = view_of("bias", given->bias);
  options.alibi_slopes = view_of("alibi_slopes", given->alibi_slopes);
  options.sink = view_of("sink", given->sink);
  options.cu_seqlens_q = view_of("cu_seqlens_q", given->cu_seqlens_q);
  options.cu_seqlens_k = view_of("cu_seqlens_k", given->cu_seqlens_k);
  options.key_lengths = view_of("key_lengths", given->key_lengths);
  options.page_table = view_of("page_table", given->page_table);
  options.workspace = view_of("workspace", given->workspace);
  options.deterministic = given->deterministic != 0;
  options.allow_tf32 = given->allow_tf32 != 0;
  options.threads = given->threads;
  if (given->memory_budget != 0) options.memory_budget = given->memory_budget;
  if (given->num_chunks_q != 0) options.num_chunks_q = given->num_chunks_q;
  if (given->num_chunks_kv != 0) options.num_chunks_kv = given->num_chunks_kv;
  options.stream = given->stream;
  if (given->plan) options.plan = &given->plan->plan;
  return options;
}

PerDimension per_dimension(const char* name, std::int32_t dimensions, const std::int64_t* values) {
  if (dimensions < 1 || dimensions > 3) fail("dimensions", std::to_string(dimensions) + ", expected 1 to 3");
  not_null(name, values);
  PerDimension result(0);
  result.count = dimensions;
  std::copy_n(values, dimensions, result.value);
  return result;
}

/// Stores the rule that make() returns, or NULL.
template <typename Make>
anyflash_status make_rule(anyflash_rule** rule, const Make& make) noexcept {
  if (rule) *rule = nullptr;
  return guarded([&] {
    not_null("rule", rule);  // checked first, because an assignment evaluates its right side before its left
    *rule = new anyflash_rule{make()};
  });
}

const Rule& operand(const char* name, const anyflash_rule* rule) { return not_null(name, rule)->rule; }

}  // namespace

const char* anyflash_last_error(void) { return last_error; }
const char* anyflash_version(void) { return ANYFLASH_VERSION; }
const char* anyflash_instruction_set(void) {
  const char* name = nullptr;
  guarded([&] { name = instruction_set(); });
  return name;
}

anyflash_status anyflash_tensor_init(anyflash_tensor* tensor, void* data, int32_t type, int32_t rank,
                                     const int64_t* shape) {
  return guarded([&] {
    not_null("tensor", tensor);
    if (rank < 0 || rank > ANYFLASH_MAX_RANK) {
      fail("tensor", "rank " + std::to_string(rank) + ", expected 0 to " + std::to_string(ANYFLASH_MAX_RANK));
    }
    if (rank > 0) not_null("shape", shape);
    TensorView view;
    view.type = enumerated("type", type, ElementType::int64);
    view.rank = rank;
    std::copy_n(shape, rank, view.shape.begin());
    view.set_row_major_strides();
    *tensor = {data, type, ANYFLASH_CPU, 0, rank, {}, {}};
    std::copy_n(view.shape.begin(), rank, tensor->shape);
    std::copy_n(view.strides.begin(), rank, tensor->strides);
  });
}

// --- rules

anyflash_status anyflash_rule_full(anyflash_rule** rule) { return make_rule(rule, full); }
anyflash_status anyflash_rule_causal(anyflash_rule** rule) { return make_rule(rule, causal); }

anyflash_status anyflash_rule_local(int64_t window, int32_t log2_stride, int32_t causal, anyflash_rule** rule) {
  return make_rule(rule, [&] { return local(window, log2_stride, causal != 0); });
}

anyflash_status anyflash_rule_window(int32_t dimensions, const int64_t* left, const int64_t* right,
                                     anyflash_rule** rule) {
  return make_rule(
      rule, [&] { return window(per_dimension("left", dimensions, left), per_dimension("right", dimensions, right)); });
}

anyflash_status anyflash_rule_prefix(int64_t n, anyflash_rule** rule) {
  return make_rule(rule, [&] { return prefix(n); });
}

anyflash_status anyflash_rule_prefix_queries(int64_t n, anyflash_rule** rule) {
  return make_rule(rule, [&] { return prefix_queries(n); });
}

anyflash_status anyflash_rule_sink(int64_t n, anyflash_rule** rule) {
  return make_rule(rule, [&] { return sink(n); });
}

anyflash_status anyflash_rule_documents(const anyflash_tensor* ids_q, const anyflash_tensor* ids_k,
                                        anyflash_rule** rule) {
  return make_rule(rule, [&] { return documents(view_of("ids_q", ids_q), view_of("ids_k", ids_k)); });
}

anyflash_status anyflash_rule_documents_packed(const anyflash_tensor* cu_seqlens_q, const anyflash_tensor* cu_seqlens_k,
                                               anyflash_rule** rule) {
  return make_rule(rule, [&] {
    return documents_packed(view_of("cu_seqlens_q", cu_seqlens_q), view_of("cu_seqlens_k", cu_seqlens_k));
  });
}

anyflash_status anyflash_rule_tiles(int32_t dimensions, const int64_t* shape, const int64_t* kernel,
                                    anyflash_rule** rule) {
  return make_rule(rule, [&] {
    return tiles(per_dimension("shape", dimensions, shape), per_dimension("kernel", dimensions, kernel));
  });
}

anyflash_status anyflash_rule_neighbourhood(int32_t dimensions, const int64_t* kernel, const int64_t* dilation,
                                            const int64_t* causal, anyflash_rule** rule) {
  return make_rule(rule, [&] {
    return neighbourhood(per_dimension("kernel", dimensions, kernel),
                         dilation ? per_dimension("dilation", dimensions, dilation) : PerDimension(1),
                         causal ? per_dimension("causal", dimensions, causal) : PerDimension(0));
  });
}

anyflash_status anyflash_rule_blocks(const anyflash_tensor* bitmap, int64_t block_q, int64_t block_k,
                                     anyflash_rule** rule) {
  return make_rule(rule, [&] { return blocks(view_of("bitmap", bitmap), block_q, block_k); });
}

anyflash_status anyflash_rule_dense(const anyflash_tensor* mask, anyflash_rule** rule) {
  return make_rule(rule, [&] { return dense(view_of("mask", mask)); });
}

anyflash_status anyflash_rule_and(const anyflash_rule* a, const anyflash_rule* b, anyflash_rule** rule) {
  return make_rule(rule, [&] {
    const auto& left = operand("a", a);
    return left & operand("b", b);
  });
}

anyflash_status anyflash_rule_or(const anyflash_rule* a, const anyflash_rule* b, anyflash_rule** rule) {
  return make_rule(rule, [&] {
    const auto& left = operand("a", a);
    return left | operand("b", b);
  });
}

anyflash_status anyflash_rule_not(const anyflash_rule* a, anyflash_rule** rule) {
  return make_rule(rule, [&] { return ~operand("a", a); });
}

anyflash_status anyflash_rule_parse(const char* text, anyflash_rule** rule) {
  return make_rule(rule, [&] { return parse_rule(not_null("text", text)); });
}

anyflash_status anyflash_rule_text(const anyflash_rule* rule, char* text, size_t size, size_t* needed) {
  return guarded([&] {
    const auto whole = operand("rule", rule).text();
    if (size > 0) std::snprintf(not_null("text", text), size, "%s", whole.c_str());
    if (needed) *needed = whole.size() + 1;
  });
}

void anyflash_rule_free(anyflash_rule* rule) { delete rule; }

// --- calls

anyflash_status anyflash_options_init(anyflash_options* options, size_t struct_size) {
  return guarded([&] {
    not_null("options", options);
    if (struct_size != sizeof(anyflash_options)) {
      fail("struct_size", std::to_string(struct_size) + ", expected " + std::to_string(sizeof(anyflash_options)));
    }
    *options = ANYFLASH_OPTIONS_INIT;
  });
}

anyflash_status anyflash_forward(const anyflash_tensor* q, const anyflash_tensor* k, const anyflash_tensor* v,
                                 const anyflash_outputs* outputs, const anyflash_options* options) {
  return guarded([&] {
    not_null("outputs", outputs);
    const ForwardOutputs views{view_of("out", outputs->out), view_of("lse", outputs->lse),
                               view_of("row_sum", outputs->row_sum), view_of("row_max", outputs->row_max)};
    forward(view_of("query", q), view_of("key", k), view_of("value", v), views, options_of(options));
  });
}

anyflash_status anyflash_backward(const anyflash_backward_inputs* inputs, const anyflash_tensor* q,
                                  const anyflash_tensor* k, const anyflash_tensor* v,
                                  const anyflash_gradients* gradients, const anyflash_options* options) {
  return guarded([&] {
    not_null("inputs", inputs);
    not_null("gradients", gradients);
    const BackwardInputs views{view_of("dout", inputs->dout), view_of("out", inputs->out), view_of("lse", inputs->lse),
                               view_of("dlse", inputs->dlse)};
    const Gradients wanted{view_of("dq", gradients->dq), view_of("dk", gradients->dk), view_of("dv", gradients->dv),
                           view_of("dbias", gradients->dbias), view_of("dsink", gradients->dsink)};
    backward(views, view_of("query", q), view_of("key", k), view_of("value", v), wanted, options_of(options));
  });
}

anyflash_status anyflash_plan_create(const anyflash_tensor* q, const anyflash_tensor* k, const anyflash_tensor* v,
                                     const anyflash_options* options, anyflash_plan** plan) {
  if (plan) *plan = nullptr;
  return guarded([&] {
    not_null("plan", plan);
    *plan = new anyflash_plan{
        anyflash::plan(view_of("query", q), view_of("key", k), view_of("value", v), options_of(options))};
  });
}

anyflash_status anyflash_plan_workspace(const anyflash_plan* plan, int64_t* forward, int64_t* backward) {
  return guarded([&] {
    const auto& made = not_null("plan", plan)->plan;
    if (forward) *forward = made.forward_workspace();
    if (backward) *backward = made.backward_workspace();
  });
}

void anyflash_plan_free(anyflash_plan* plan) { delete plan; }

// --- figures

anyflash_status anyflash_explain(const anyflash_rule* rule, int32_t dimensions, const int64_t* q_shape,
                                 const int64_t* k_shape, int32_t align, anyflash_explanation* explanation) {
  return guarded([&] {
    not_null("explanation", explanation);
    if (dimensions < 1 || dimensions > 3) fail("dimensions", std::to_string(dimensions) + ", expected 1 to 3");
    not_null("q_shape", q_shape);
    not_null("k_shape", k_shape);
    ExplainOptions options;
    options.align = enumerated("align", align, Align::scale_end);
    const auto found = explain(rule ? rule->rule : full(), SequenceShape(q_shape, q_shape + dimensions),
                               SequenceShape(k_shape, k_shape + dimensions), options);
    *explanation = {found.queries,       found.keys,
                    found.visible_pairs, found.visited_pairs,
                    found.query_blocks,  found.key_blocks,
                    found.tiles_skipped, found.tiles_partial,
                    found.tiles_full,    found.visited_per_visible,
                    found.forward_flops, found.backward_flops,
                    found.bytes,         found.dense_mask_bytes};
  });
}

// --- the tile machine

anyflash_status anyflash_use_tile_machine(const char* name_or_path) {
  return guarded([&] { use_tile_machine(tile_machine(not_null("name_or_path", name_or_path))); });
}

anyflash_status anyflash_last_tile_report(anyflash_tile_report* report) {
  return guarded([&] {
    not_null("report", report);
    const auto& found = last_tile_report();
    *report = {found.num_chunks_q,     found.num_chunks_kv,       found.grid_rows,   found.grid_columns,
               found.chunks_in_flight, found.head_groups_at_once, found.waves,       found.cycles,
               found.compute_cycles,   found.exchange_cycles,     found.sync_cycles, found.seconds,
               found.predicted_cycles, found.exchanged_bytes,     found.peak_bytes,  found.peak_tile,
               found.multiply_adds,    found.utilisation,         found.busy};
  });
}
