#include "check_cases.h"

#include <algorithm>
#include <random>

#include "layouts.h"
#include "numbers.h"
#include "shapes.h"

namespace anyflash::cli {

namespace {

constexpr std::int64_t block = 16;  // of the rule blocks

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + std::int64_t(engine_() % std::uint64_t(high - low + 1));
  }
  bool one_in(int n) { return between(1, n) == 1; }
  std::int64_t one_of(const std::vector<std::int64_t>& list) {
    return list[std::size_t(between(0, std::int64_t(list.size()) - 1))];
  }
  OwnedTensor normal(ElementType type, const Shape& shape, double spread = 1) {
    std::normal_distribution<double> numbers(0, spread);
    auto tensor = OwnedTensor::zeros(type, shape);
    for (std::int64_t i = 0; i < tensor.elements(); ++i) store_number(type, tensor.data.get(), i, numbers(engine_));
    return tensor;
  }
  OwnedTensor integers(ElementType type, const Shape& shape, std::int64_t low, std::int64_t high) {
    auto tensor = OwnedTensor::zeros(type, shape);
    for (std::int64_t i = 0; i < tensor.elements(); ++i)
      store_number(type, tensor.data.get(), i, double(between(low, high)));
    return tensor;
  }
  // From 0 to `total` in `parts` steps, some of them 0.
  OwnedTensor cumulative(std::int64_t total, std::int64_t parts) {
    std::vector<std::int64_t> cuts = {0, total};
    for (std::int64_t i = 1; i < parts; ++i) cuts.push_back(between(0, total));
    std::sort(cuts.begin(), cuts.end());
    auto tensor = OwnedTensor::zeros(ElementType::int32, {parts + 1});
    for (std::size_t i = 0; i < cuts.size(); ++i)
      store_number(tensor.type, tensor.data.get(), std::int64_t(i), double(cuts[i]));
    return tensor;
  }

 private:
  std::mt19937_64 engine_;
};

struct Sizes {
  std::int64_t batch, heads_kv, heads_q, d_qk, d_v;
  Shape queries, keys;
};

bool uses(const CheckedRule& rule, const char* name) { return rule.text.find(name) != std::string::npos; }

// The same call for a rule and type, whichever others are checked too (FNV-1a).
std::uint64_t seed_of(const CheckedRule& rule, ElementType type, Align align, std::uint64_t seed) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  for (const char c : rule.text) add(std::uint64_t(c));
  for (const auto value : {std::uint64_t(rule.dimensions), std::uint64_t(type), std::uint64_t(align), seed}) add(value);
  return hash;
}

Layout draw_layout(Draw& draw, const CheckedRule& rule) {
  std::vector<Layout> layouts = {Layout::bhsd, Layout::bshd, Layout::bhds};
  if (rule.dimensions == 1) layouts.push_back(Layout::qkv);
  if (rule.dimensions == 1 && !uses(rule, "documents")) layouts.push_back(Layout::thd);
  return layouts[std::size_t(draw.between(0, std::int64_t(layouts.size()) - 1))];
}

Sizes draw_sizes(Draw& draw, const CheckedRule& rule, Layout layout) {
  Sizes sizes{draw.between(1, 2), draw.between(1, 2), 0, draw.one_of({4, 16, 32, 40, 64, 72}), 0, {}, {}};
  sizes.heads_q = sizes.heads_kv * draw.between(1, 2);
  sizes.d_v = draw.one_in(2) ? sizes.d_qk : draw.one_of({8, 24, 64, 80});
  const std::int64_t longest[] = {0, 160, 14, 6};
  for (int i = 0; i < rule.dimensions; ++i) {
    sizes.queries.push_back(draw.between(2, longest[rule.dimensions]));
    sizes.keys.push_back(draw.between(2, longest[rule.dimensions]));
  }
  if (layout == Layout::thd) sizes.batch = 1;  // documents replace it
  if (layout == Layout::qkv) {
    sizes.batch = 1;
    sizes.heads_kv = sizes.heads_q;
    sizes.d_v = sizes.d_qk;
    sizes.keys = sizes.queries;
  }
  return sizes;
}

// The rule's tables and the other tensors, by name, and the options that point to them.
void add_extra(CheckCase& made, Draw& draw, const CheckedRule& rule, const Sizes& sizes) {
  auto& call = made.call;
  auto& options = call.options;
  const auto queries = volume(sizes.queries), keys = volume(sizes.keys);
  const auto add = [&](const std::string& name, OwnedTensor tensor) {
    made.description += ", " + name + " " + shape_text(tensor.shape);
    call.extra.emplace_back(name, std::move(tensor));
    return call.extra.back().second.view();
  };
  if (uses(rule, "ids_q")) {
    const auto batch = draw.one_in(2) ? sizes.batch : 0;
    add("ids_q", draw.integers(ElementType::int32, batch ? Shape{batch, queries} : Shape{queries}, 0, 2));
    add("ids_k", draw.integers(ElementType::int32, batch ? Shape{batch, keys} : Shape{keys}, 0, 2));
  }
  if (uses(rule, "bitmap"))
    add("bitmap",
        draw.integers(ElementType::boolean, {(queries + block - 1) / block, (keys + block - 1) / block}, 0, 1));
  if (uses(rule, "mask")) {
    const Shape plain = {queries, keys}, each = {sizes.batch, sizes.heads_q, queries, keys};
    add("mask", draw.integers(ElementType::boolean, draw.one_in(2) ? plain : each, 0, 1));
  }
  if (options.layout == Layout::thd) {
    const auto documents = draw.between(1, 4);
    options.cu_seqlens_q = add("cu_seqlens_q", draw.cumulative(queries, documents));
    options.cu_seqlens_k = add("cu_seqlens_k", draw.cumulative(keys, documents));
  }
  const bool one_length =
      rule.dimensions > 1 || options.layout == Layout::thd || uses(rule, "documents") || uses(rule, "blocks");
  if (!one_length && draw.one_in(5))
    options.key_lengths = add("key_lengths", draw.integers(ElementType::int32, {sizes.batch}, 0, keys));
  if (draw.one_in(3)) {
    const auto axis = [&](std::int64_t size) { return draw.one_in(3) ? 1 : size; };
    options.bias = add("bias", draw.normal(draw.one_in(2) ? call.q.type : ElementType::float32,
                                           {axis(sizes.batch), axis(sizes.heads_q), axis(queries), axis(keys)}));
  }
  if (draw.one_in(4)) options.sink = add("sink", draw.normal(statistic_type(call.q.type), {sizes.heads_q}));
  if (!uses(rule, "documents") && draw.one_in(4))
    options.alibi_slopes = add("alibi", draw.normal(statistic_type(call.q.type), {sizes.heads_q}, 0.1));
}

}  // namespace

const std::vector<CheckedRule>& checked_rules() {
  static const std::vector<CheckedRule> rules = {
      {"full()"},
      {"causal()"},
      {"local(7)"},
      {"local(5, log2_stride=2)"},
      {"local(9, log2_stride=1, causal=true)"},
      {"window(12, 3)"},
      {"window(-1, 5)"},
      {"prefix(20) | causal()"},
      {"prefix(9) | prefix_queries(12) | local(20)"},
      {"sink(3) | (local(8) & causal())"},
      {"documents(ids_q, ids_k)"},
      {"documents(ids_q, ids_k) & causal()"},
      {"tiles(8, 3)"},
      {"neighbourhood(7)"},
      {"neighbourhood(5, dilation=2, causal=1)"},
      {"blocks(bitmap, 16, 16)"},
      {"dense(mask)"},
      {"dense(mask) & causal()"},
      {"~local(6) & causal()"},
      {"causal()", 2},
      {"local(3)", 2},
      {"local(2, log2_stride=1)", 2},
      {"window([2, 3], [1, -1])", 2},
      {"tiles([4, 2], [1, 3])", 2},
      {"neighbourhood([5, 3], dilation=[1, 2])", 2},
      {"documents(ids_q, ids_k)", 2},
      {"local(2, causal=true)", 3},
      {"tiles(2, 3)", 3},
      {"neighbourhood(3, dilation=1, causal=[1, 0, 0])", 3},
  };
  return rules;
}

CheckCase random_case(const CheckedRule& rule, ElementType type, Align align, std::uint64_t seed) {
  Draw draw(seed_of(rule, type, align, seed));
  CheckCase made;
  auto& call = made.call;
  auto& options = call.options;
  options.align = align;
  options.layout = draw_layout(draw, rule);
  options.threads = int(draw.between(0, 3));
  const auto sizes = draw_sizes(draw, rule, options.layout);
  const auto make = [&](std::int64_t heads, const Shape& sequence, std::int64_t channels) {
    return draw.normal(type, shape_in(options.layout, sizes.batch, heads, sequence, channels));
  };
  if (call.packed()) {
    auto shape = shape_in(options.layout, sizes.batch, sizes.heads_q, sizes.queries, sizes.d_qk);
    shape.insert(shape.begin(), 3);
    call.q = draw.normal(type, shape);
  } else {
    call.q = make(sizes.heads_q, sizes.queries, sizes.d_qk);
    call.k = make(sizes.heads_kv, sizes.keys, sizes.d_qk);
    call.v = make(sizes.heads_kv, sizes.keys, sizes.d_v);
  }
  made.description = name_of(options.layout) + ", " + name_of(align) + ", q " + shape_text(call.q.shape);
  if (!call.packed()) made.description += ", k " + shape_text(call.k.shape) + ", v " + shape_text(call.v.shape);
  if (draw.one_in(4)) options.scale = 0.2;
  if (draw.one_in(4)) options.softcap = 2.5;
  if (options.scale) made.description += ", scale 0.2";
  if (options.softcap > 0) made.description += ", softcap 2.5";
  add_extra(made, draw, rule, sizes);
  call.rule = rule.text;
  options.rule = parse_rule(rule.text, [&](const std::string& name) { return call.find(name)->view(); });
  made.dout = random_dout(call, seed + 1);
  if (draw.one_in(2)) made.dlse = draw.normal(statistic_type(type), call.result_shapes().lse);
  return made;
}

OwnedTensor random_normal(ElementType type, const Shape& shape, std::uint64_t seed) {
  return Draw(seed).normal(type, shape);
}

OwnedTensor random_dout(const Call& call, std::uint64_t seed) {
  return random_normal(call.q.type, call.result_shapes().out, seed);
}

}  // namespace anyflash::cli
