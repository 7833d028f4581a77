// Figures and pictures of a rule, for anyflash/_explain.py.
#include <nanobind/stl/vector.h>

#include "rule_object.h"
#include "without_gil.h"

namespace anyflash::python {
namespace {

SequenceShape sequence_shape(nb::handle sizes, const char* name) {
  const auto shape = per_dimension(sizes, name);
  return {shape.value, shape.value + shape.count};
}

/// Moves a vector into a NumPy array, which frees it.
nb::object array_of(std::vector<std::uint8_t>&& values, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::vector<std::uint8_t>(std::move(values));
  const nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<std::uint8_t>*>(vector); });
  static std::uint8_t nothing = 0;  // an empty vector has no address
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(kept->empty() ? &nothing : kept->data(), shape, owner));
}

ElementType type_named(nb::handle dtype) {
  const std::string name = echoed(dtype);
  for (const auto type : {ElementType::float16, ElementType::bfloat16, ElementType::float32, ElementType::float64}) {
    if (name == element_name(type)) return type;
  }
  throw Error(Error::Kind::type, "dtype: type " + name + ", expected float16, bfloat16, float32 or float64");
}

nb::tuple three(const std::int64_t (&numbers)[3]) { return nb::make_tuple(numbers[0], numbers[1], numbers[2]); }

nb::tuple tuple_of(const SequenceShape& sizes) { return nb::steal<nb::tuple>(PyList_AsTuple(nb::cast(sizes).ptr())); }

nb::dict explained(nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align, nb::handle d_qk,
                   nb::handle d_v, nb::handle dtype, nb::handle backward) {
  ExplainOptions options;
  options.align = align_of(align);
  options.d_qk = integer(d_qk, "d_qk");
  options.d_v = integer(d_v, "d_v");
  options.type = type_named(dtype);
  options.backward = flag(backward, "backward");
  const auto& rule_object = rule_of(rule);
  const auto queries = sequence_shape(q_shape, "q_shape");
  const auto keys = k_shape.is_none() ? queries : sequence_shape(k_shape, "k_shape");
  Explanation found;
  {
    const WithoutGil without_gil;
    found = explain(rule_object.rule, queries, keys, options);
  }
  nb::dict figures;
  figures["_q_shape"] = tuple_of(queries);
  figures["_k_shape"] = tuple_of(keys);
  figures["queries"] = found.queries;
  figures["keys"] = found.keys;
  figures["visible_pairs"] = found.visible_pairs;
  figures["visited_pairs"] = found.visited_pairs;
  figures["visited_per_visible"] = found.visited_per_visible;
  figures["tiles_skipped"] = found.tiles_skipped;
  figures["tiles_partial"] = found.tiles_partial;
  figures["tiles_full"] = found.tiles_full;
  figures["query_block"] = three(found.query_block);
  figures["query_step"] = three(found.query_step);
  figures["key_block"] = three(found.key_block);
  figures["key_step"] = three(found.key_step);
  figures["forward_flops"] = found.forward_flops;
  figures["backward_flops"] = found.backward_flops;
  figures["bytes"] = found.bytes;
  figures["dense_mask_bytes"] = found.dense_mask_bytes;
  figures["threads"] = found.threads;
  figures["workspace_bytes"] = found.workspace_bytes;
  const bool listed = std::int64_t(found.tile_classes.size()) == found.query_blocks * found.key_blocks;
  figures["tile_classes"] =
      listed ? array_of(std::move(found.tile_classes), {std::size_t(found.query_blocks), std::size_t(found.key_blocks)})
             : nb::object(nb::none());
  return figures;
}

nb::object pattern_array(nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align) {
  const auto& rule_object = rule_of(rule);
  const auto queries = sequence_shape(q_shape, "q_shape"), keys = sequence_shape(k_shape, "k_shape");
  const auto aligned = align_of(align);
  std::vector<std::uint8_t> pairs;
  {
    const WithoutGil without_gil;
    pairs = pattern(rule_object.rule, queries, keys, aligned);
  }
  std::size_t rows = 1, columns = 1;  // pattern has checked that there are at most 2^28 pairs
  for (const auto size : queries) rows *= std::size_t(size);
  for (const auto size : keys) columns *= std::size_t(size);
  return array_of(std::move(pairs), {rows, columns});
}

Picture picture_of(nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align, nb::handle side) {
  const auto& rule_object = rule_of(rule);
  const auto queries = sequence_shape(q_shape, "q_shape"), keys = sequence_shape(k_shape, "k_shape");
  const auto aligned = align_of(align);
  const auto pixels = integer(side, "side");
  const WithoutGil without_gil;
  return picture(rule_object.rule, queries, keys, aligned, pixels);
}

nb::object picture_array(nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align, nb::handle side) {
  auto made = picture_of(rule, q_shape, k_shape, align, side);
  return array_of(std::move(made.grey), {std::size_t(made.height), std::size_t(made.width)});
}

nb::object image_array(nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align, nb::handle side,
                       const std::string& title) {
  auto image = picture_image(picture_of(rule, q_shape, k_shape, align, side), title);
  return array_of(std::move(image.rgb), {std::size_t(image.height), std::size_t(image.width), 3});
}

}  // namespace

void add_explain(nb::module_& module) {
  const auto any = [](const char* name) { return nb::arg(name).none(); };
  module.def("explain", &explained, any("rule"), any("q_shape"), any("k_shape"), any("align"), any("d_qk"), any("d_v"),
             any("dtype"), any("backward"));
  module.def("pattern", &pattern_array, any("rule"), any("q_shape"), any("k_shape"), any("align"));
  module.def("picture", &picture_array, any("rule"), any("q_shape"), any("k_shape"), any("align"), any("side"));
  module.def("picture_image", &image_array, any("rule"), any("q_shape"), any("k_shape"), any("align"), any("side"),
             nb::arg("title"));
  module.def(
      "picture_text",
      [](nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align, nb::handle side) {
        return picture_text(picture_of(rule, q_shape, k_shape, align, side));
      },
      any("rule"), any("q_shape"), any("k_shape"), any("align"), any("side"));
  module.def(
      "picture_svg",
      [](nb::handle rule, nb::handle q_shape, nb::handle k_shape, nb::handle align, nb::handle side,
         const std::string& title) { return picture_svg(picture_of(rule, q_shape, k_shape, align, side), title); },
      any("rule"), any("q_shape"), any("k_shape"), any("align"), any("side"), nb::arg("title"));
}

}  // namespace anyflash::python
