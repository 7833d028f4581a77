// Random calls for the tile machine, and the same calls in float64 on the CPU.
#pragma once

#include <anyflash/anyflash.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hwy/base.h"

namespace anyflash::testing {

/// A contiguous tensor with its numbers, in float64 and in the type of the call.
class Numbers {
 public:
  Numbers() = default;
  Numbers(ElementType type, std::vector<std::int64_t> shape) : type_(type), shape_(std::move(shape)) {
    for (const auto n : shape_) count_ *= n;
    wide_.assign(count_, 0);
    bytes_.assign(count_ * element_size(type), 0);
  }

  /// Random ones, which the type represents exactly.
  void draw(std::mt19937& random, double size = 1) {
    std::normal_distribution<double> normal(0, size);
    for (std::int64_t i = 0; i < count_; ++i) {
      put(i, normal(random));
      wide_[i] = at(i);
    }
  }
  double at(std::int64_t i) const {
    if (type_ == ElementType::float16)
      return hwy::F32FromF16(reinterpret_cast<const hwy::float16_t*>(bytes_.data())[i]);
    float x;
    std::memcpy(&x, bytes_.data() + i * 4, 4);
    return x;
  }
  void put(std::int64_t i, double x) {
    if (type_ == ElementType::float16) {
      reinterpret_cast<hwy::float16_t*>(bytes_.data())[i] = hwy::F16FromF32(float(x));
    } else {
      const auto narrow = float(x);
      std::memcpy(bytes_.data() + i * 4, &narrow, 4);
    }
  }

  TensorView view(Device device = {DeviceKind::tiles, 0}) { return make(bytes_.data(), type_, device); }
  TensorView wide() { return make(wide_.data(), ElementType::float64, {}); }
  bool given() const { return !shape_.empty(); }
  std::int64_t size() const { return count_; }

  /// The largest distance from the float64 numbers, relative to the largest of them and 1.
  double error() const {
    double most = 0, largest = 1;
    for (std::int64_t i = 0; i < count_; ++i) {
      const double got = at(i), exact = wide_[i];
      if (got == exact || (std::isnan(got) && std::isnan(exact))) continue;
      const double distance = std::abs(got - exact);
      most = std::isnan(distance) ? HUGE_VAL : std::max(most, distance);
      largest = std::max(largest, std::abs(exact));
    }
    return most / largest;
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  TensorView make(void* data, ElementType type, Device device) const {
    TensorView view;
    view.data = data, view.type = type, view.device = device;
    view.rank = int(shape_.size());
    std::copy(shape_.begin(), shape_.end(), view.shape.begin());
    view.set_row_major_strides();
    return view;
  }

  ElementType type_ = ElementType::float32;
  std::vector<std::int64_t> shape_;
  std::int64_t count_ = 1;
  std::vector<double> wide_;
  std::vector<char> bytes_;
};

/// One call, forward and backward, on the tile machine and in float64 on the CPU.
struct TileCall {
  ElementType type = ElementType::float32;
  std::int64_t batch = 1, heads = 1, kv_heads = 1, d_qk = 8, d_v = 8;
  std::vector<std::int64_t> queries = {16}, keys = {16};
  Rule rule;
  Align align = Align::none_front;
  double softcap = 0;
  std::int64_t chunks_q = 0, chunks_kv = 0, budget = -1;  // of the call on tiles; 0, -1: none
  Layout layout = Layout::bhsd;                           // or bshd or bhds
  bool deterministic = false;
  bool bias = false, sink = false, alibi = false, dlse = false;
  std::vector<std::int64_t> key_lengths;
  unsigned seed = 1;
  // Filled by the runs:
  Numbers q, k, v, out, lse, row_sum, row_max, dout, dlse_in, dq, dk, dv, b, db, s, ds, a;

  std::string text() const {
    const auto numbers = [](const std::vector<std::int64_t>& list) {
      std::string text;
      for (const auto n : list) text += (text.empty() ? "" : "x") + std::to_string(n);
      return text;
    };
    return std::string(element_name(type)) + " b" + std::to_string(batch) + " h" + std::to_string(heads) + "/" +
           std::to_string(kv_heads) + " d" + std::to_string(d_qk) + "/" + std::to_string(d_v) + " " + numbers(queries) +
           " keys " + numbers(keys) + " " + rule.text() + " " + align_names[int(align)] + (bias ? " bias" : "") +
           (layout == Layout::bhsd ? "" : std::string(" ") + layout_names[int(layout)]) + (sink ? " sink" : "") +
           (alibi ? " alibi" : "") + (dlse ? " dlse" : "") + (softcap > 0 ? " softcap" : "") +
           (key_lengths.empty() ? "" : " lengths " + numbers(key_lengths));
  }

  void draw() {
    std::mt19937 random(seed);
    const auto shaped = [&](std::int64_t h, const std::vector<std::int64_t>& sequence, std::int64_t d) {
      std::vector<std::int64_t> shape = {batch, h};
      shape.insert(shape.end(), sequence.begin(), sequence.end());
      shape.push_back(d);
      return Numbers(type, shape);
    };
    std::int64_t n = 1, m = 1;
    for (const auto size : queries) n *= size;
    for (const auto size : keys) m *= size;
    q = shaped(heads, queries, d_qk), k = shaped(kv_heads, keys, d_qk), v = shaped(kv_heads, keys, d_v);
    out = dout = shaped(heads, queries, d_v);
    dq = q, dk = k, dv = v;
    lse = row_sum = row_max = dlse_in = Numbers(ElementType::float32, {batch, heads, n});
    for (auto* one : {&q, &k, &v, &dout, &dlse_in}) one->draw(random);
    if (bias) b = db = Numbers(ElementType::float32, {1, heads, n, m}), b.draw(random);
    if (sink) s = ds = Numbers(ElementType::float32, {heads}), s.draw(random);
    if (alibi) a = Numbers(ElementType::float32, {heads}), a.draw(random, 0.1);
  }

  /// A view (batch, heads, sequence..., channels), in the layout.
  TensorView arranged(TensorView view) const {
    const auto shape = view.shape, strides = view.strides;
    const auto from = [&](int axis) {  // of the layout's
      const int last = view.rank - 1;
      if (layout == Layout::bshd) return axis == 0 || axis == last ? axis : axis == last - 1 ? 1 : axis + 1;
      if (layout == Layout::bhds) return axis < 2 ? axis : axis == 2 ? last : axis - 1;
      return axis;
    };
    for (int axis = 0; axis < view.rank; ++axis)
      view.shape[axis] = shape[from(axis)], view.strides[axis] = strides[from(axis)];
    return view;
  }

  Options options(bool wide) {
    Options options;
    options.layout = layout;
    options.rule = rule, options.align = align, options.softcap = softcap, options.deterministic = deterministic;
    if (!wide && chunks_q > 0) options.num_chunks_q = chunks_q;
    if (!wide && chunks_kv > 0) options.num_chunks_kv = chunks_kv;
    if (!wide && budget >= 0) options.memory_budget = budget;
    const auto add = [&](Numbers& numbers, TensorView& to) {
      if (numbers.given()) to = wide ? numbers.wide() : numbers.view();
    };
    add(b, options.bias), add(s, options.sink), add(a, options.alibi_slopes);
    if (!key_lengths.empty())
      options.key_lengths = TensorView(key_lengths.data(), ElementType::int64, {std::int64_t(key_lengths.size())});
    return options;
  }

  void forward(bool wide, bool with_lse = true, bool with_lm = true) {
    const auto view = [&](Numbers& numbers) { return wide ? numbers.wide() : numbers.view(); };
    const auto tensor = [&](Numbers& numbers) { return arranged(view(numbers)); };
    ForwardOutputs outputs{tensor(out), {}, {}, {}};
    if (with_lse) outputs.lse = view(lse);
    if (with_lm) outputs.row_sum = view(row_sum), outputs.row_max = view(row_max);
    anyflash::forward(tensor(q), tensor(k), tensor(v), outputs, options(wide));
  }
  /// From forward's exact results, rounded, so that its errors are not those of forward.
  void backward(bool wide) {
    const auto view = [&](Numbers& numbers) { return wide ? numbers.wide() : numbers.view(); };
    const auto tensor = [&](Numbers& numbers) { return arranged(view(numbers)); };
    const auto given = [&](Numbers& numbers) { return numbers.given() ? view(numbers) : TensorView(); };
    BackwardInputs inputs{tensor(dout), tensor(out), view(lse), {}};
    if (dlse) inputs.dlse = view(dlse_in);
    anyflash::backward(inputs, tensor(q), tensor(k), tensor(v),
                       {tensor(dq), tensor(dk), tensor(dv), given(db), given(ds)}, options(wide));
  }
  /// What predict expects of it.
  TileReport predicted(bool backward, const CallTensors& tensors) {
    const auto shape = [&](Numbers& numbers) {
      auto view = arranged(numbers.view());
      view.data = nullptr;
      return view;
    };
    return predict_tiles(shape(q), shape(k), shape(v), options(false), backward, tensors);
  }
};

}  // namespace anyflash::testing
