// attention, attention_backward and plan: converts Python's arguments for the C++ calls, and results to new NumPy
// arrays.
#include <anyflash/join.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "options.h"
#include "without_gil.h"

namespace anyflash::python {
namespace {

/// A result of the kind of the array `example`, whose view is `view`.
nb::object made_for(Caller caller, const char* name, std::span<const std::int64_t> shape, ElementType type,
                    nb::handle example, const TensorView& view) {
  return caller == Caller::torch ? new_tensor(shape, type, example, view)
                                 : new_array(name, shape, type, example, view.device);
}

/// result_shapes. For plain tensors it is known without the check, which forward makes too.
ResultShapes shapes_of_forward(Caller caller, const TensorView& q, const TensorView& k, const TensorView& v,
                               const Options& options) {
  const bool plain = options.layout == Layout::bhsd && !options.page_table.given() && q.rank == 4 && v.rank == 4;
  if (caller != Caller::torch || !plain || q.shape[3] != v.shape[3]) return result_shapes(q, k, v, options);
  return {{q.shape.begin(), q.shape.begin() + 4}, {q.shape.begin(), q.shape.begin() + 3}};
}

/// near: l and m may be to any number near the maximum (ForwardOutputs::near_maxima).
template <Caller caller>
nb::object forward_of(nb::handle q_array, nb::handle k_array, nb::handle v_array, nb::handle out_array,
                      nb::handle return_lse, const nb::dict& given, bool near) {
  forget_tile_report();
  Arrays arrays(caller);
  const auto options = read_options(given, arrays);
  const int statistics = wanted_statistics(return_lse);
  const auto q = arrays.input(q_array, "query"), k = arrays.input(k_array, "key"), v = arrays.input(v_array, "value");
  const auto shapes = shapes_of_forward(caller, q, k, v, options);
  const bool make_out = out_array.is_none();
  nb::object out = make_out ? made_for(caller, "out", shapes.out, q.type, q_array, q) : nb::borrow(out_array);
  ForwardOutputs outputs;
  outputs.near_maxima = near;
  outputs.out = make_out ? arrays.made(out, q.type) : arrays.output(out, "out");
  nb::object first, second;
  const auto row_type = q.type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
  if (statistics > 0) {
    first = made_for(caller, statistics == 1 ? "lse" : "l", shapes.lse, row_type, q_array, q);
    (statistics == 1 ? outputs.lse : outputs.row_sum) = arrays.made(first, row_type);
  }
  if (statistics == 2) {
    second = made_for(caller, "m", shapes.lse, row_type, q_array, q);
    outputs.row_max = arrays.made(second, row_type);
  }
  {
    const WithoutGil without_gil;
    forward(q, k, v, outputs, options);
  }
  if (make_out) out = finished(std::move(out), q.type, q_array);
  if (statistics == 0) return out;
  return statistics == 1 ? nb::make_tuple(out, first) : nb::make_tuple(out, first, second);
}

template <Caller caller>
nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle return_lse,
                     const nb::dict& given) {
  return forward_of<caller>(q, k, v, out, return_lse, given, false);
}

/// One of the results that torch_join joins.
nb::object attention_of_part(nb::handle q, nb::handle k, nb::handle v, const nb::dict& given) {
  return forward_of<Caller::torch>(q, k, v, nb::none(), nb::str("lm"), given, true);
}

constexpr int all_gradients = 0b11111;

/// `wanted_bits`: bit i for the i-th of dq, dk, dv, dbias and dsink.
template <Caller caller>
nb::tuple attention_backward(nb::handle dout_array, nb::handle q_array, nb::handle k_array, nb::handle v_array,
                             nb::handle out_array, nb::handle lse_array, nb::handle dlse_array, const nb::dict& given,
                             int wanted_bits) {
  forget_tile_report();
  Arrays arrays(caller);
  const auto options = read_options(given, arrays);
  const auto q = arrays.input(q_array, "query"), k = arrays.input(k_array, "key"), v = arrays.input(v_array, "value");
  BackwardInputs inputs;
  inputs.dout = arrays.input(dout_array, "dout");
  inputs.out = arrays.input(out_array, "out");
  inputs.lse = arrays.input(lse_array, "lse");
  inputs.dlse = arrays.input(dlse_array, "dlse");

  struct Wanted {
    const char* name;
    TensorView of;
    nb::handle array;
    TensorView* gradient;
    nb::object made = nb::none();
  };
  Gradients gradients;
  Wanted wanted[] = {{"dq", q, q_array, &gradients.dq},
                     {"dk", k, k_array, &gradients.dk},
                     {"dv", v, v_array, &gradients.dv},
                     {"dbias", options.bias, option_in(given, "bias"), &gradients.dbias},
                     {"dsink", options.sink, option_in(given, "sink"), &gradients.dsink}};
  backward(inputs, q, k, v, gradients, options);  // asked for none yet: checks the call
  for (int i = 0; auto& [name, of, array, gradient, made] : wanted) {
    if (!(wanted_bits >> i++ & 1) || !of.given()) continue;
    made = made_for(caller, name, {of.shape.data(), std::size_t(of.rank)}, of.type, array, of);
    *gradient = arrays.made(made, of.type);
  }
  {
    const WithoutGil without_gil;
    backward(inputs, q, k, v, gradients, options);
  }
  const auto result = [&](int i) { return finished(wanted[i].made, wanted[i].of.type, wanted[i].array); };
  return nb::make_tuple(result(0), result(1), result(2), result(3), result(4));
}

PlanObject make_plan(nb::handle q_array, nb::handle k_array, nb::handle v_array, const nb::dict& given) {
  Arrays arrays;
  const auto options = read_options(given, arrays);
  const auto q = arrays.input(q_array, "query"), k = arrays.input(k_array, "key"), v = arrays.input(v_array, "value");
  auto made = [&] {
    const WithoutGil without_gil;
    return plan(q, k, v, options);
  }();
  return {std::move(made), nb::borrow(option_in(given, "rule"))};
}

/// Bytes that attention_backward works in for the gradients in `wanted_bits`. Of q, k and v only shapes, types and
/// strides are looked at.
std::int64_t workspace_of_backward(nb::handle q_array, nb::handle k_array, nb::handle v_array, const nb::dict& given,
                                   int wanted_bits) {
  Arrays arrays(Caller::torch);
  const auto options = read_options(given, arrays);
  const auto q = arrays.input(q_array, "query"), k = arrays.input(k_array, "key"), v = arrays.input(v_array, "value");
  Gradients gradients;
  if (wanted_bits & 1) gradients.dq = q;
  if (wanted_bits & 2) gradients.dk = k;
  if (wanted_bits & 4) gradients.dv = v;
  return backward_workspace(q, k, v, gradients, options);
}

/// The results that come first become those over the keys of both.
void join_results(nb::handle out, nb::handle row_sum, nb::handle row_max, nb::handle out_of_part,
                  nb::handle sum_of_part, nb::handle max_of_part, std::uintptr_t stream, std::int64_t threads) {
  Arrays arrays(Caller::torch);
  ForwardOutputs into, part;
  into.out = arrays.output(out, "out"), part.out = arrays.input(out_of_part, "out");
  into.row_sum = arrays.output(row_sum, "row_sum"), part.row_sum = arrays.input(sum_of_part, "row_sum");
  into.row_max = arrays.output(row_max, "row_max"), part.row_max = arrays.input(max_of_part, "row_max");
  const WithoutGil without_gil;
  join(into, part, reinterpret_cast<void*>(stream), threads);
}

/// key and value are None in the layout qkv.
std::int64_t least_budget(nb::handle q_array, nb::handle k_array, nb::handle v_array, const nb::dict& given,
                          bool with_backward) {
  Arrays arrays(Caller::torch);
  const auto options = read_options(given, arrays);
  const auto q = arrays.input(q_array, "query");
  const auto k = k_array.is_none() ? TensorView{} : arrays.input(k_array, "key");
  const auto v = v_array.is_none() ? TensorView{} : arrays.input(v_array, "value");
  return least_workspace(q, k, v, options, with_backward);
}

nb::tuple tuple_of(const std::vector<std::int64_t>& sizes) {
  nb::list list;
  for (const auto size : sizes) list.append(size);
  return nb::tuple(list);
}

/// The shapes of out and of lse; checks the call. Of q, k and v only shapes and types are looked at.
nb::tuple shapes_of_results(nb::handle q_array, nb::handle k_array, nb::handle v_array, const nb::dict& given) {
  Arrays arrays;
  const auto options = read_options(given, arrays);
  const auto q = arrays.input(q_array, "query"), k = arrays.input(k_array, "key"), v = arrays.input(v_array, "value");
  const auto shapes = result_shapes(q, k, v, options);
  return nb::make_tuple(tuple_of(shapes.out), tuple_of(shapes.lse));
}

/// Of a call with tensors of these shapes on the CPU.
std::int64_t visible_pairs_of(const std::array<nb::handle, 3>& shapes, const nb::dict& given) {
  Arrays arrays;
  const auto options = read_options(given, arrays);
  TensorView views[3];
  for (int i = 0; i < 3; ++i) {
    if (shapes[i].is_none()) continue;
    const auto sizes = nb::cast<std::vector<std::int64_t>>(shapes[i]);
    if (sizes.size() > TensorView::max_rank) throw Error(Error::Kind::value, "shape: more axes than expected");
    views[i].rank = int(sizes.size());
    std::copy(sizes.begin(), sizes.end(), views[i].shape.begin());
    views[i].set_row_major_strides();
  }
  const WithoutGil without_gil;
  return visible_pairs(views[0], views[1], views[2], options);
}

}  // namespace

void add_calls(nb::module_& module) {
  nb::class_<PlanObject>(
      module, "Plan",
      "How a call will run: blocks, runs of visible tiles, threads. Made by anyflash.plan for given shapes,\n"
      "types and options. Immutable, usable from several threads, keeps its rule alive.")
      .def_prop_ro(
          "forward_workspace", [](const PlanObject& self) { return self.plan->forward_workspace(); },
          "Bytes of workspace that a call of attention needs.")
      .def_prop_ro(
          "backward_workspace", [](const PlanObject& self) { return self.plan->backward_workspace(); },
          "The same for attention_backward; 0 with a page_table, which has no backward.")
      .def("__repr__", [](const PlanObject& self) {
        return "<anyflash.Plan of " + nb::cast<const RuleObject&>(self.rule).rule.text() + ">";
      });
  // Every argument may come as None, or nanobind would answer in its own words; the options are the Python side's dict.
  const auto any = [](const char* name) { return nb::arg(name).none(); };
  const auto add_forward = [&](const char* name, auto* call) {
    module.def(name, call, any("q"), any("k"), any("v"), any("out"), any("return_lse"), nb::arg("options"));
  };
  const auto add_backward = [&](const char* name, auto* call) {
    module.def(name, call, any("dout"), any("q"), any("k"), any("v"), any("out"), any("lse"), any("dlse"),
               nb::arg("options"), nb::arg("wanted") = all_gradients);
  };
  add_forward("attention", &attention<Caller::anyone>);
  add_backward("attention_backward", &attention_backward<Caller::anyone>);
  module.def("use_torch", &use_torch, nb::arg("module"), any("exchange"));
  module.def("torch_covers", &torch_covers, any("query"), any("key"), any("value"), any("mask"), any("causal"),
             any("enable_gqa"));
  add_forward("torch_attention", &attention<Caller::torch>);
  add_backward("torch_attention_backward", &attention_backward<Caller::torch>);
  module.def("torch_backward_workspace", &workspace_of_backward, any("q"), any("k"), any("v"), nb::arg("options"),
             nb::arg("wanted"));
  module.def("torch_part", &attention_of_part, any("q"), any("k"), any("v"), nb::arg("options"));
  module.def("torch_join", &join_results, nb::arg("out"), nb::arg("row_sum"), nb::arg("row_max"),
             nb::arg("out_of_part"), nb::arg("sum_of_part"), nb::arg("max_of_part"), nb::arg("stream"),
             nb::arg("threads"));
  module.def("torch_least_budget", &least_budget, any("q"), any("k"), any("v"), nb::arg("options"),
             nb::arg("backward") = true);
  module.def("result_shapes", &shapes_of_results, any("q"), any("k"), any("v"), nb::arg("options"));
  module.def(
      "visible_pairs",
      [](nb::handle q_shape, nb::handle k_shape, nb::handle v_shape, const nb::dict& options) {
        return visible_pairs_of({q_shape, k_shape, v_shape}, options);
      },
      any("q_shape"), any("k_shape"), any("v_shape"), nb::arg("options"));
  module.def("plan", &make_plan, any("q"), any("k"), any("v"), nb::arg("options"));
  module.def("as_bfloat16", &as_bfloat16, nb::arg("bits"));
}

}  // namespace anyflash::python
