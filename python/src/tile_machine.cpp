// The tile machine's machines, predictions and mappings, for anyflash/tile_machine.py.
#include <anyflash/names.h>
#include <anyflash/tile_machine.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "options.h"
#include "without_gil.h"

namespace anyflash::python {
namespace {

TileChoice choice_of(const std::vector<std::int64_t>& numbers, bool trace) {
  return {numbers.at(0), numbers.at(1), numbers.at(2), trace};
}

/// Calls of the thread use this machine and these choices as long as it lives.
class Used {
 public:
  Used(const std::string& machine, const TileChoice& choice)
      : context_{parse_tile_machine(machine), choice, {}}, before_(use_tile_context(&context_)) {}
  ~Used() { use_tile_context(before_); }
  Used(const Used&) = delete;
  Used& operator=(const Used&) = delete;

 private:
  TileContext context_;
  TileContext* before_;
};

nb::dict machine_dict(const TileMachine& machine) {
  nb::dict found;
  found["name"] = machine.name;
  found["tiles"] = machine.tiles;
  found["memory_per_tile"] = machine.memory_per_tile;
  found["reserved_per_tile"] = machine.reserved_per_tile;
  found["clock_hz"] = machine.clock_hz;
  found["multiply_adds_float16"] = machine.multiply_adds_float16;
  found["multiply_adds_float32"] = machine.multiply_adds_float32;
  found["unit_rows"] = machine.unit_rows;
  found["unit_columns"] = machine.unit_columns;
  found["unit_depth"] = machine.unit_depth;
  found["unit_load_cycles"] = machine.unit_load_cycles;
  found["unit_start_cycles"] = machine.unit_start_cycles;
  found["exp_per_cycle"] = machine.exp_per_cycle;
  found["vector_per_cycle"] = machine.vector_per_cycle;
  found["exp_per_cycle_float32"] = machine.exp_per_cycle_float32;
  found["vector_per_cycle_float32"] = machine.vector_per_cycle_float32;
  found["exchange_bytes_per_cycle"] = machine.exchange_bytes_per_cycle;
  found["sync_cycles"] = machine.sync_cycles;
  found["workers"] = machine.workers;
  found["separate_vector"] = machine.separate_vector;
  found["overlap"] = machine.overlap;
  found["mesh_rows"] = machine.mesh_rows;
  found["mesh_columns"] = machine.mesh_columns;
  found["hop_cycles"] = machine.hop_cycles;
  found["memory_bytes_per_cycle"] = machine.memory_bytes_per_cycle;
  return found;
}

nb::dict phase_dict(const TilePhase& phase) {
  nb::dict found;
  found["name"] = phase.name;
  found["compute_cycles"] = phase.compute_cycles;
  found["exchange_cycles"] = phase.exchange_cycles;
  found["sync_cycles"] = phase.sync_cycles;
  found["exchanged_bytes"] = phase.exchanged_bytes;
  found["live_bytes_max"] = phase.live_bytes_max;
  found["live_bytes_mean"] = phase.live_bytes_mean;
  return found;
}

struct ReportObject {
  TileReport report;
};

nb::dict report_dict(TileReport&& made) {
  auto* const kept = new ReportObject{std::move(made)};
  const auto& report = kept->report;
  nb::dict found;
  found["_made"] = nb::cast(kept, nb::rv_policy::take_ownership);
  found["machine"] = machine_dict(report.machine);
  found["backward"] = report.backward;
  found["dtype"] = element_name(report.type);
  found["num_chunks_q"] = report.num_chunks_q;
  found["num_chunks_kv"] = report.num_chunks_kv;
  found["grid_rows"] = report.grid_rows;
  found["grid_columns"] = report.grid_columns;
  found["chunks_in_flight"] = report.chunks_in_flight;
  found["head_groups_at_once"] = report.head_groups_at_once;
  found["waves"] = report.waves;
  found["cycles"] = report.cycles;
  found["compute_cycles"] = report.compute_cycles;
  found["exchange_cycles"] = report.exchange_cycles;
  found["sync_cycles"] = report.sync_cycles;
  found["seconds"] = report.seconds;
  found["predicted_cycles"] = report.predicted_cycles;
  found["exchanged_bytes"] = report.exchanged_bytes;
  found["peak_bytes"] = report.peak_bytes;
  found["peak_tile"] = report.peak_tile;
  found["multiply_adds"] = report.multiply_adds;
  found["utilisation"] = report.utilisation;
  found["busy"] = report.busy;
  nb::list phases, transfers;
  for (const auto& phase : report.phases) phases.append(phase_dict(phase));
  for (const auto& one : report.transfers) transfers.append(nb::make_tuple(one.from, one.to, one.bytes));
  found["phases"] = phases;
  found["transfers"] = transfers;
  found["peak_bytes_of_tile"] = report.peak_bytes_of_tile;
  found["live_bytes"] = report.live_bytes;
  found["tile_compute_cycles"] = report.tile_compute_cycles;
  return found;
}

nb::dict candidate_dict(const TileCandidate& one) {
  nb::dict found;
  found["num_chunks_q"] = one.num_chunks_q;
  found["num_chunks_kv"] = one.num_chunks_kv;
  found["grid_rows"] = one.grid_rows;
  found["grid_columns"] = one.grid_columns;
  found["chunks_in_flight"] = one.chunks_in_flight;
  found["waves"] = one.waves;
  found["compute_cycles"] = one.compute_cycles;
  found["exchange_cycles"] = one.exchange_cycles;
  found["sync_cycles"] = one.sync_cycles;
  found["cycles"] = one.cycles;
  found["peak_bytes"] = one.peak_bytes;
  found["fits"] = one.fits;
  found["chosen"] = one.chosen;
  return found;
}

ElementType type_named(const std::string& name) {
  for (const auto type : {ElementType::float16, ElementType::float32}) {
    if (name == element_name(type)) return type;
  }
  throw Error(Error::Kind::type, "dtype: type " + name + ", expected float16 or float32");
}

using Shape = std::optional<std::vector<std::int64_t>>;

/// A call on a tile machine of which only shapes are known.
class Call {
 public:
  Call(const std::string& machine, const std::vector<std::int64_t>& choice, bool trace, const Shape& q, const Shape& k,
       const Shape& v, const std::string& dtype, bool backward, nb::handle return_lse, bool dlse, bool large_lse,
       const nb::dict& options)
      : machine_(machine), choice_(choice_of(choice, trace)), backward_(backward) {
    const auto type = type_named(dtype);
    q_ = view_of(q, type), k_ = view_of(k, type), v_ = view_of(v, type);
    const auto statistics = wanted_statistics(return_lse);
    if (backward && statistics > 0)
      throw Error(Error::Kind::value, "return_lse: given to a backward call, expected a forward one");
    tensors_.row_sum = tensors_.row_max = statistics == 2;
    tensors_.dlse = dlse, tensors_.large_lse = large_lse;
    options_ = read_options(options, arrays_);
    for_each_tensor([&](const char*, auto member, bool integers) {  // lengths and tables stay on the CPU
      auto& view = options_.*member;
      if (!integers && view.device.kind == DeviceKind::cpu) view.device = {DeviceKind::tiles, 0};
    });
  }

  nb::dict predicted() const { return report_dict(on_machine(&predict_tiles)); }
  nb::list candidates() const {
    nb::list found;
    for (const auto& one : on_machine(&tile_candidates)) found.append(candidate_dict(one));
    return found;
  }

 private:
  static TensorView view_of(const Shape& shape, ElementType type) {
    TensorView view;
    if (!shape) return view;
    view.type = type, view.device = {DeviceKind::tiles, 0};
    view.rank = int(std::min<std::size_t>(shape->size(), TensorView::max_rank));
    std::copy_n(shape->begin(), view.rank, view.shape.begin());
    view.set_row_major_strides();
    return view;
  }

  template <typename Result>
  Result on_machine(Result (*ask)(const TensorView&, const TensorView&, const TensorView&, const Options&, bool,
                                  const CallTensors&)) const {
    const WithoutGil without_gil;
    const Used used(machine_, choice_);
    return ask(q_, k_, v_, options_, backward_, tensors_);
  }

  std::string machine_;
  TileChoice choice_;
  TensorView q_, k_, v_;
  Arrays arrays_;
  Options options_;
  CallTensors tensors_;
  bool backward_;
};

}  // namespace

void add_tile_machine(nb::module_& module) {
  nb::class_<ReportObject>(module, "TileReport").def("svg", [](const ReportObject& made, const std::string& picture) {
    static const Names names = {"all", "memory", "phases", "transfers", "live"};
    return tile_picture_svg(made.report, TilePicture(place_of_name("picture", picture, names)));
  });
  nb::class_<TileContext>(module, "TileContext")
      .def("__init__",
           [](TileContext* made, const std::string& machine, const std::vector<std::int64_t>& choice, bool trace) {
             new (made) TileContext{parse_tile_machine(machine), choice_of(choice, trace), {}};
           })
      .def("forget", [](TileContext& context) { context.report.reset(); })
      .def("report", [](const TileContext& context) {
        if (!context.report) throw Error(Error::Kind::value, "tile report: no call on the tile machine yet");
        return report_dict(TileReport(*context.report));
      });
  module.def(
      "run_on_tiles",
      [](TileContext* context) {
        use_tile_context(context);
        tiles_of_arrays = context;
      },
      nb::arg("context").none());
  module.def("on_tiles", [] { return tiles_of_arrays != nullptr; });
  module.def("tile_machine_names", &tile_machine_names);
  module.def("tile_machine", [](const std::string& name) { return machine_dict(tile_machine(name)); });
  module.def("read_tile_machine", [](const std::string& path) { return machine_dict(read_tile_machine(path)); });
  module.def("parse_tile_machine", [](const std::string& text) { return machine_dict(parse_tile_machine(text)); });
  nb::class_<Call>(module, "TileCall")
      .def(nb::init<const std::string&, const std::vector<std::int64_t>&, bool, const Shape&, const Shape&,
                    const Shape&, const std::string&, bool, nb::handle, bool, bool, const nb::dict&>(),
           nb::arg("machine"), nb::arg("choice"), nb::arg("trace"), nb::arg("q_shape"), nb::arg("k_shape").none(),
           nb::arg("v_shape").none(), nb::arg("dtype"), nb::arg("backward"), nb::arg("return_lse").none(),
           nb::arg("dlse"), nb::arg("large_lse"), nb::arg("options"))
      .def("predicted", &Call::predicted)
      .def("candidates", &Call::candidates);
  module.def("tile_product_cycles",
             [](const std::string& machine, const std::string& dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
               return tile_product_cycles(parse_tile_machine(machine), type_named(dtype), m, n, k);
             });
  module.def("tile_step_cycles", [](const std::string& machine, const std::string& dtype, std::int64_t rows,
                                    std::int64_t keys, std::int64_t d_qk, std::int64_t d_v) {
    const auto step = tile_step_cycles(parse_tile_machine(machine), type_named(dtype), rows, keys, d_qk, d_v);
    return nb::make_tuple(step.products, step.total);
  });
}

}  // namespace anyflash::python
