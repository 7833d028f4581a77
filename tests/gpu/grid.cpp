// Calls each kernel that a GPU has on small tensors, forward and backward: each type and head size, plain and with all
// options, rows that are whole vectors and rows that are not, boxes, few queries, a hidden key that is not finite,
// biases that the copy engine takes, results that are not wanted, lengths, ids, pages and rules' tables in device memory,
// more tasks than multiprocessors, nothing to do. What it computes is checked elsewhere; this is what
// scripts/sanitize-gpu watches.
// Prints the number of calls.
#include <anyflash/attention.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace anyflash;

constexpr Device gpu{DeviceKind::cuda, 0};

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "grid: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

std::mt19937 random_numbers(1);

void write(char* to, ElementType type, double x) {
  const auto single = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &single, 4);
  if (type == ElementType::float64) {
    std::memcpy(to, &x, 8);
  } else if (type == ElementType::float32) {
    std::memcpy(to, &single, 4);
  } else if (type == ElementType::bfloat16) {
    std::memcpy(to, reinterpret_cast<char*>(&bits) + 2, 2);
  } else {  // |x| from 2^-14 to 2^15, or not finite
    const auto exponent = static_cast<int>(bits >> 23 & 255) - 127;
    const std::uint32_t middle = std::isfinite(x) ? (exponent + 15) << 10 | (bits >> 13 & 1023) : 0x7e00;
    const auto half = static_cast<std::uint16_t>(bits >> 31 << 15 | middle);
    std::memcpy(to, &half, 2);
  }
}

/// A tensor on the GPU, from 1/8 to 2 in size; freed at the end of the program.
struct Tensor {
  std::vector<char> host;
  TensorView view;

  Tensor(ElementType type, std::initializer_list<std::int64_t> shape, bool odd = false)
      : view(nullptr, type, shape, gpu) {
    const auto size = element_size(type), count = static_cast<std::size_t>(view.elements());
    host.resize((count + odd) * size);
    std::uniform_real_distribution<double> numbers(0.125, 2);
    for (std::size_t i = 0; i < count + odd; ++i)
      write(&host[i * size], type, numbers(random_numbers) * (random_numbers() % 2 ? 1 : -1));
    void* memory = nullptr;
    must(cudaMalloc(&memory, host.size()));
    view.data = static_cast<char*>(memory) + odd * size;  // then no row begins on 16 bytes
    must(cudaMemcpy(memory, host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  void set(std::int64_t element, double x) {
    char bytes[8];
    write(bytes, view.type, x);
    const auto size = element_size(view.type);
    must(cudaMemcpy(static_cast<char*>(view.data) + element * size, bytes, size, cudaMemcpyHostToDevice));
  }
};

struct Shape {
  std::int64_t queries, keys, d_qk, d_v;
  bool odd;
  std::int64_t heads = 1;  // of keys
  std::int64_t batch = 1;
};

/// How a call differs from the usual one.
struct How {
  bool hidden_nan = false;  ///< the last key
  int dimensions = 1;
  bool dlse = true, dq = true, dk = true, dv = true;  ///< are given
  bool statistics = false;                            ///< the rows' sums and maxima are asked for
  bool backward = true;
};

int calls = 0;

void run(ElementType type, const Shape& shape, Options options, const How& how = {}) {
  const auto statistic = type == ElementType::float64 ? type : ElementType::float32;
  const auto tensor = [&](std::int64_t heads, std::int64_t rows, std::int64_t channels) {
    if (how.dimensions == 3) return Tensor(type, {shape.batch, heads, rows / 40, 4, 10, channels}, shape.odd);
    if (how.dimensions == 2) return Tensor(type, {shape.batch, heads, rows / 10, 10, channels}, shape.odd);
    return Tensor(type, {shape.batch, heads, rows, channels}, shape.odd);
  };
  const auto heads = 2 * shape.heads;
  auto q = tensor(heads, shape.queries, shape.d_qk), k = tensor(shape.heads, shape.keys, shape.d_qk);
  auto v = tensor(shape.heads, shape.keys, shape.d_v), out = tensor(heads, shape.queries, shape.d_v);
  auto dout = tensor(heads, shape.queries, shape.d_v);
  auto dq = tensor(heads, shape.queries, shape.d_qk), dk = tensor(shape.heads, shape.keys, shape.d_qk);
  auto dv = tensor(shape.heads, shape.keys, shape.d_v);
  const std::initializer_list<std::int64_t> rows = {shape.batch, heads, shape.queries};
  Tensor lse(statistic, rows), dlse(statistic, rows), sum(statistic, rows), largest(statistic, rows);
  if (how.hidden_nan) {
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    k.set((shape.keys - 1) * shape.d_qk, nan), v.set((shape.keys - 1) * shape.d_v, nan);
  }
  const auto given = [](bool yes, const Tensor& tensor) { return yes ? tensor.view : TensorView(); };
  forward(q.view, k.view, v.view, {out.view, lse.view, given(how.statistics, sum), given(how.statistics, largest)},
          options);
  ++calls;
  must(cudaDeviceSynchronize());
  if (!how.backward) return;
  Gradients gradients{given(how.dq, dq), given(how.dk, dk), given(how.dv, dv), {}, {}};
  if (options.bias.given()) {
    auto dbias = options.bias;
    must(cudaMalloc(&dbias.data, dbias.elements() * element_size(dbias.type)));
    gradients.dbias = dbias;
  }
  if (options.sink.given()) must(cudaMalloc(&(gradients.dsink = options.sink).data, 2 * sizeof(float)));
  backward({dout.view, out.view, lse.view, given(how.dlse, dlse)}, q.view, k.view, v.view, gradients, options);
  ++calls;
  must(cudaDeviceSynchronize());
}

Options with(Rule rule, Align align = Align::none_end) {
  Options options;
  options.rule = std::move(rule);
  options.align = align;
  return options;
}

Options with_bias(Rule rule, const TensorView& bias, Align align = Align::none_end) {
  auto options = with(std::move(rule), align);
  options.bias = bias;
  return options;
}

void all_options(ElementType type, const Shape& shape) {
  Tensor sink(ElementType::float32, {2}), slopes(ElementType::float32, {2});
  for (const bool along_queries : {true, false})
    for (const bool along_keys : {true, false}) {
      Tensor bias(ElementType::float32, {1, 2, along_queries ? shape.queries : 1, along_keys ? shape.keys : 1});
      auto options = with(causal());
      options.softcap = 5;
      options.bias = bias.view, options.sink = sink.view, options.alibi_slopes = slopes.view;
      run(type, shape, options);
      options.alibi_slopes = {};  // which some kernels leave to others
      run(type, shape, options);
    }
}

/// Without a soft cap, which leaves the gradient to the portable kernel: one bias for each head, one for all, one row
/// for all queries.
void biases(ElementType type, const Shape& shape) {
  const std::pair<std::int64_t, std::int64_t> sizes[] = {{2, shape.queries}, {1, shape.queries}, {2, 1}};
  for (const auto& [heads, queries] : sizes) {
    Tensor bias(type, {1, heads, queries, shape.keys});
    auto options = with(causal() & local(100));
    options.bias = bias.view;
    run(type, shape, options);
  }
}

/// Where rows of biases are whole vectors, which the copy engine takes: biases of each type, for each head, for all,
/// for all batch entries, one row for all queries; no bias, but a soft cap or ALiBi. Of two batch entries; with tiles that are
/// skipped, and without.
void copied_biases(ElementType type, const Shape& shape) {
  for (const auto bias_type : {ElementType::float16, ElementType::bfloat16, ElementType::float32}) {
    const Shape sizes[] = {{shape.queries, 0, 0, 0, false, 2, 2},
                           {shape.queries, 0, 0, 0, false, 2, 1},
                           {shape.queries, 0, 0, 0, false, 1, 2},
                           {shape.queries, 0, 0, 0, false, 1, 1},
                           {1, 0, 0, 0, false, 2, 2},
                           {1, 0, 0, 0, false, 1, 1}};
    for (const auto& size : sizes) {
      Tensor bias(bias_type, {size.batch, size.heads, size.queries, shape.keys});
      auto options = with(causal() & local(100));
      options.bias = bias.view;
      run(type, shape, options);
      if (&size != &sizes[0] && &size != &sizes[4]) continue;
      run(type, shape, with_bias(full(), bias.view));
      options.softcap = 5;
      run(type, shape, options);
    }
  }
  auto options = with(causal());
  options.softcap = 5;
  run(type, shape, options);
  Tensor slopes(ElementType::float32, {2});
  options.softcap = 0, options.alibi_slopes = slopes.view;
  run(type, shape, options);
}

/// What else Hopper's kernels are asked for: results that are not wanted, statistics, rows whose lse is large, heads
/// for more tasks than multiprocessors (of 16-bit types alone: the other kernels' blocks have one task each), of which
/// some see nothing, tiles that are whole or skipped, a NaN in the latter.
void rare_calls(ElementType type, const Shape& shape) {
  run(type, shape, with(causal()), {.dlse = false, .statistics = true});
  run(type, shape, with(causal()), {.dq = false});
  run(type, shape, with(causal()), {.dk = false});
  run(type, shape, with(causal()), {.dv = false});
  run(type, shape, with(tiles(64, 1), Align::none_front), {.hidden_nan = true});
  auto far = with(causal());
  far.scale = 200;
  run(type, shape, far);
  far.softcap = 3000;
  run(type, shape, far);
  const Shape many{70, 136, shape.d_qk, shape.d_v, false, element_size(type) == 2 ? 80 : 3};
  run(type, many, with(causal(), Align::none_front));
  Tensor bias(type, {1, 2 * many.heads, 70, 136});
  run(type, many, with_bias(causal(), bias.view, Align::none_front));
}

/// An int32 array on the GPU.
TensorView integers(const std::vector<std::int32_t>& numbers, std::initializer_list<std::int64_t> shape) {
  TensorView view(nullptr, ElementType::int32, shape, gpu);
  must(cudaMalloc(&view.data, numbers.size() * sizeof(std::int32_t)));
  must(cudaMemcpy(view.data, numbers.data(), numbers.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
  return view;
}

/// Documents by their ids on the GPU: in order, and some in many segments, so that places in them are counted.
void ids(ElementType type, const Shape& shape) {
  const auto of = [](std::int64_t entries, std::int32_t length, std::int32_t documents) {
    std::vector<std::int32_t> numbers;
    for (std::int32_t i = 0; i < entries; ++i) numbers.push_back(i / length % documents);
    return integers(numbers, {entries});
  };
  for (const auto& [length, documents] : {std::pair(50, 1000), {1, 3}})
    for (const bool with_causal : {false, true}) {
      const auto q = of(shape.queries, length, documents);
      const auto same = anyflash::documents(q, shape.keys == shape.queries ? q : of(shape.keys, length, documents));
      run(type, shape, with(with_causal ? same & causal() : same));
    }
}

/// Masks that are found on the device.
void late(ElementType type, const Shape& shape) {
  auto options = with(causal());
  options.key_lengths = integers({static_cast<std::int32_t>(shape.keys) - 9}, {1});
  run(type, shape, options);
  run(type, shape, options, {.hidden_nan = true});
  options.deterministic = true;
  run(type, shape, options);
  Tensor bias(type, {1, 2, shape.queries, shape.keys});
  options.bias = bias.view;
  run(type, shape, options);
  TensorView table(nullptr, ElementType::boolean, {1, 2, shape.queries, shape.keys}, gpu);  // of each head
  must(cudaMalloc(&table.data, table.elements()));
  must(cudaMemset(table.data, 1, table.elements()));
  run(type, shape, with(dense(table)));
}

/// float32 where TF32 is allowed, scores that need more, too.
void with_tf32(const Shape& shape) {
  auto options = with(causal());
  options.allow_tf32 = true;
  run(ElementType::float32, shape, options);
  run(ElementType::float32, shape, options, {.hidden_nan = true});
  options.softcap = 5;
  run(ElementType::float32, shape, options);
}

/// Two documents, one behind the other, whose lengths are on the device.
void packed(ElementType type) {
  Tensor q(type, {300, 2, 64}), k(type, {300, 1, 64}), v(type, {300, 1, 64}), out(type, {300, 2, 64});
  Tensor lse(type == ElementType::float64 ? type : ElementType::float32, {2, 300});
  auto options = with(causal());
  options.layout = Layout::thd;
  options.cu_seqlens_q = options.cu_seqlens_k = integers({0, 130, 300}, {3});
  forward(q.view, k.view, v.view, {out.view, lse.view, {}, {}}, options);
  Tensor dq(type, {300, 2, 64}), dk(type, {300, 1, 64}), dv(type, {300, 1, 64});
  backward({out.view, out.view, lse.view, {}}, q.view, k.view, v.view, {dq.view, dk.view, dv.view, {}, {}}, options);
  calls += 2;
  must(cudaDeviceSynchronize());
}

void paged(ElementType type, std::int64_t queries, std::int64_t page_size, std::int64_t depth, const Rule& rule) {
  Tensor q(type, {1, 4, queries, depth}), out(type, {1, 4, queries, depth});
  Tensor k(type, {9, page_size, 2, depth}), v(type, {9, page_size, 2, depth});
  auto options = with(rule);
  options.page_table = integers({2, 8, 0, 5, 1, 7, 3, 6, 4}, {1, 9});
  options.key_lengths = integers({static_cast<std::int32_t>(9 * page_size) - 5}, {1});
  forward(q.view, k.view, v.view, {out.view, {}, {}, {}}, options);
  ++calls;
  must(cudaDeviceSynchronize());
}

}  // namespace

/// Arguments: `few`, the calls of few queries, `shapes` or `depths`, two parts of the others; the name of an element
/// type. What is not given means all.
int main(int argc, char** argv) {
  std::vector<std::string_view> parts, types;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    (name == "few" || name == "shapes" || name == "depths" ? parts : types).push_back(name);
  }
  const auto among = [](const auto& names, std::string_view name) {
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
  };
  const auto wanted = [&](std::string_view part) { return among(parts, part); };
  for (const auto& [name, type] : {std::pair("float16", ElementType::float16),
                                   {"bfloat16", ElementType::bfloat16},
                                   {"float32", ElementType::float32},
                                   {"float64", ElementType::float64}}) {
    if (!among(types, name)) continue;
    for (const Shape& shape :
         {Shape{130, 150, 64, 64, false}, Shape{70, 130, 40, 100, true}, Shape{300, 200, 128, 128, false},
          Shape{130, 70, 256, 256, false}, Shape{65, 66, 200, 300, true}}) {
      if (!wanted("shapes")) break;
      run(type, shape, with(full()));
      run(type, shape, with(causal()));
      run(type, shape, with(causal() & local(20)));
      run(type, shape, with(~full() | prefix(shape.keys - 1), Align::none_front), {.hidden_nan = true});
      all_options(type, shape);
      biases(type, shape);
      late(type, shape);
      if (type == ElementType::float32) with_tf32(shape);
    }
    for (const std::int64_t depth : {64, 128, 256}) {
      if (!wanted("depths")) break;
      if (type != ElementType::float64) copied_biases(type, {130, 152, depth, depth, false, 1, 2});
      rare_calls(type, {130, 152, depth, depth, false});
      run(type, {320, 320, depth, depth, false}, with(local(3), Align::none_front), {.dimensions = 2});
      run(type, {320, 320, depth, depth, false, 2, 2}, with(local(3), Align::none_front), {.dimensions = 3});
      run(type, {512, 512, depth, depth, false}, with(local(16, 4), Align::none_front));  // every 16th row
    }
    if (wanted("depths")) {
      packed(type);
      ids(type, {130, 130, 64, 64, false});
      ids(type, {1100, 1300, 128, 128, false});
      paged(type, 130, 64, 64, causal());
      run(type, {130, 0, 64, 64, false}, with(full()));  // results that need no arithmetic
    }
    for (const Shape& shape :
         {Shape{1, 130, 64, 64, false}, Shape{20, 150, 128, 128, false}, Shape{3, 130, 200, 300, true}}) {
      if (!wanted("few")) break;
      run(type, shape, with(full()));  // few queries
      run(type, shape, with(causal() & local(100)));
      run(type, shape, with(~full() | prefix(shape.keys - 1), Align::none_front), {.hidden_nan = true});
      all_options(type, shape);
    }
    for (const std::int64_t depth : {64, 128, 256})
      for (const std::int64_t queries : {1, 8}) {  // of two heads: up to 8 rows, and up to 16
        if (!wanted("few")) break;
        run(type, {queries, 152, depth, depth, false}, with(full()));
        run(type, {queries, 152, depth, depth, false}, with(full()), {.hidden_nan = true});
        // More tasks than multiprocessors.
        run(type, {queries, 152, depth, depth, false, 160}, with(full()), {.backward = false});
        late(type, {queries, 152, depth, depth, false});
      }
    if (wanted("few")) {
      late(type, {1, 130, 64, 64, false});
      late(type, {20, 150, 128, 128, false});
      for (const std::int64_t queries : {1, 8, 10}) {  // of two heads: up to 8 rows, up to 16, and more
        paged(type, queries, 24, 64, causal());
        paged(type, queries, 64, 64, full());
        for (const std::int64_t depth : {64, 128, 256}) paged(type, queries, 16, depth, full());
      }
      run(type, {1, 5000, 64, 64, false}, with(causal()));                          // in parts
      run(type, {32, 5000, 64, 64, false, 65}, with(full()), {.backward = false});  // more than 4096 rows in parts
      for (const std::int64_t depth : {64, 128, 256}) {                             // more than 64 rows of a key head
        run(type, {40, 5000, depth, depth, false}, with(causal()), {.backward = false});
        run(type, {100, 150, depth, depth, false}, with(full()), {.hidden_nan = true, .backward = false});
        auto whole = with(causal());  // from 128 channels on heads are packed, then keys are in parts
        whole.deterministic = true;
        run(type, {40, 150, depth, depth, false}, whole, {.hidden_nan = true, .backward = false});
        run(type, {100, 2000, depth, depth, false}, with(causal()), {.statistics = true, .backward = false});
      }
      run(type, {1, 70, 64, 64, false, 300}, with(~full() | prefix(69), Align::none_front),
          {.hidden_nan = true, .backward = false});  // many tasks
      for (const Shape& shape :
           {Shape{20, 150, 64, 64, false}, Shape{20, 150, 200, 304, false}, Shape{12, 5000, 128, 128, false}}) {
        run(type, shape, with(full()));  // more than 16 rows of a key head
        run(type, shape, with(full()), {.hidden_nan = true});
      }
    }
    if (wanted("depths")) run(type, {300, 300, 24, 24, false}, with(local(3), Align::none_front), {.dimensions = 2});
  }
  std::printf("grid: %d calls\n", calls);
  return calls == 0;
}
