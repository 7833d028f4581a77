#include "compare.h"

#include <anyflash/anyflash.h>

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "reference.h"
#include "results.h"
#include "shapes.h"

namespace anyflash::cli {

namespace {

std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values(std::size_t(view.elements()));
  for_each_element(view, [&](std::int64_t index, std::int64_t offset) {
    values[std::size_t(index)] = load_number(view.type, view.data, offset);
  });
  return values;
}

std::vector<std::int64_t> integers_of(const OwnedTensor& tensor) {
  const auto values = values_of(tensor.view());
  return {values.begin(), values.end()};
}

// q, k, v, out or a gradient of a call, with axes in the order of bhsd.
TensorView ordered(const Call& call, const OwnedTensor& tensor, int part_of_packed) {
  const bool packed = call.packed() && part_of_packed >= 0;
  return as_bhsd(packed ? part(tensor.view(), part_of_packed) : tensor.view(), call.options.layout);
}

SequenceShape sequence_of(const TensorView& bhsd) {
  return {bhsd.shape.begin() + 2, bhsd.shape.begin() + bhsd.rank - 1};
}

// A paged cache as (batch, heads, keys, channels).
std::vector<double> unpaged(const OwnedTensor& cache, const OwnedTensor& table, std::int64_t keys) {
  const auto pages = values_of(cache.view());
  const auto entries = integers_of(table);
  const auto size = cache.shape[1], heads = cache.shape[2], channels = cache.shape[3], per_entry = table.shape[1];
  std::vector<double> result(std::size_t(table.shape[0] * heads * keys * channels));
  std::size_t at = 0;
  for (std::int64_t b = 0; b < table.shape[0]; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t j = 0; j < keys; ++j)
        for (std::int64_t c = 0; c < channels; ++c) {
          const auto page = entries[std::size_t(b * per_entry + j / size)];
          result[at++] = page < 0 ? 0 : pages[std::size_t(((page * size + j % size) * heads + h) * channels + c)];
        }
  return result;
}

// A rule's table as one (batch, head) with `length` of the `keys` sees it. Ids, the only integer tables, lose their
// batch axis; masks and bitmaps lose their batch and head axes; a mask also loses keys that do not exist. (There are no
// bitmaps with key lengths.)
TensorView table_of(const TensorView& table, std::int64_t b, std::int64_t h, std::int64_t keys, std::int64_t length,
                    bool& shared) {
  TensorView view = table;
  const auto take = [&](std::int64_t index) {
    if (view.shape[0] > 1) shared = false;
    view = part(view, std::min(index, view.shape[0] - 1));
  };
  const bool ids = view.type == ElementType::int32 || view.type == ElementType::int64;
  if (ids && view.rank == 2) take(b);
  if (!ids && view.rank == 4) take(b);
  if (!ids && view.rank == 3) take(h);
  if (!ids && view.rank == 2 && view.shape[1] == keys) view.shape[1] = length;
  return view;
}

std::vector<std::int64_t> packed_ids(const OwnedTensor* lengths) {
  std::vector<std::int64_t> ids;
  if (!lengths) return ids;
  const auto starts = integers_of(*lengths);
  for (std::size_t i = 1; i < starts.size(); ++i)
    ids.insert(ids.end(), std::size_t(starts[i] - starts[i - 1]), std::int64_t(i));
  return ids;
}

// The mask of one (batch, head) from the rule's definition, with its distances if there are ALiBi slopes.
void add_mask(ReferenceCase& given, const Call& call, const Rule& rule, const SequenceShape& q_shape,
              const SequenceShape& k_shape) {
  const auto& options = call.options;
  const bool has_alibi = call.find("alibi") != nullptr;
  const auto visible = pattern(rule, q_shape, k_shape, options.align);
  std::vector<double> distances;
  if (has_alibi)
    distances = aligned_distances(q_shape, k_shape, options.align, packed_ids(call.find("cu_seqlens_q")),
                                  packed_ids(call.find("cu_seqlens_k")));
  const auto width = volume(k_shape);  // less than given.keys if this entry has fewer keys
  auto& mask = given.masks.emplace_back(std::size_t(given.queries * given.keys));
  auto& distance = given.distances.emplace_back(has_alibi ? mask.size() : 0);
  for (std::int64_t i = 0; i < given.queries; ++i)
    for (std::int64_t j = 0; j < width; ++j) {
      mask[std::size_t(i * given.keys + j)] = visible[std::size_t(i * width + j)];
      if (has_alibi) distance[std::size_t(i * given.keys + j)] = distances[std::size_t(i * width + j)];
    }
}

void add_masks(ReferenceCase& given, const Call& call, const SequenceShape& q_shape, const SequenceShape& k_shape) {
  const auto in_rule = call.options.rule.text();  // rule names, not names of the user's tables
  const auto unsupported = [&](const char* name, const char* with) {
    if (call.find(name) && in_rule.find(with) != std::string::npos)
      throw Error(Error::Kind::unsupported, std::string(name) + ": not checked together with " + with + " in the rule");
  };
  unsupported("alibi", "documents");
  unsupported("key_lengths", "documents");
  unsupported("key_lengths", "blocks");
  const auto* lengths = call.find("key_lengths");
  bool shared = lengths == nullptr;  // by all (batch, head), unless the rule's tables differ
  for (std::int64_t b = 0; b < given.batch; ++b)
    for (std::int64_t h = 0; h < given.heads_q; ++h) {
      if (given.masks.empty() || !shared) {
        const auto keys = lengths ? SequenceShape{integers_of(*lengths)[std::size_t(b)]} : k_shape;
        auto rule = parse_rule(call.rule, [&](const std::string& name) {
          return table_of(call.find(name)->view(), b, h, given.keys, volume(keys), shared);
        });
        if (call.options.cu_seqlens_q.given())
          rule = rule & documents_packed(call.options.cu_seqlens_q, call.options.cu_seqlens_k);
        add_mask(given, call, rule, q_shape, keys);
      }
      given.mask_of.push_back(int(given.masks.size()) - 1);
    }
}

ReferenceCase reference_case(const Call& call, const OwnedTensor* dout, const OwnedTensor* dlse) {
  const auto& options = call.options;
  const auto q = ordered(call, call.q, 0);
  const auto* table = call.find("page_table");
  ReferenceCase given;
  given.type = call.q.type;
  given.batch = q.shape[0];
  given.heads_q = q.shape[1];
  given.d_qk = q.shape[std::size_t(q.rank - 1)];
  const auto q_shape = sequence_of(q);
  SequenceShape k_shape;
  given.q = values_of(q);
  if (table) {
    k_shape = {table->shape[1] * call.k.shape[1]};
    given.heads_kv = call.k.shape[2];
    given.d_v = call.v.shape[3];
    given.k = unpaged(call.k, *table, k_shape[0]);
    given.v = unpaged(call.v, *table, k_shape[0]);
  } else {
    const auto k = ordered(call, call.packed() ? call.q : call.k, 1),
               v = ordered(call, call.packed() ? call.q : call.v, 2);
    k_shape = sequence_of(k);
    given.heads_kv = k.shape[1];
    given.d_v = v.shape[std::size_t(v.rank - 1)];
    given.k = values_of(k);
    given.v = values_of(v);
  }
  given.queries = volume(q_shape);
  given.keys = volume(k_shape);
  given.scale = options.scale.value_or(double(1 / std::sqrt((long double)(given.d_qk))));
  given.softcap = options.softcap;
  if (const auto* bias = call.find("bias")) {
    given.bias = values_of(bias->view());
    std::copy(bias->shape.begin(), bias->shape.end(), given.bias_size);
  }
  if (const auto* sink = call.find("sink")) given.sink = values_of(sink->view());
  if (const auto* alibi = call.find("alibi")) {
    const auto slopes = values_of(alibi->view());
    for (std::int64_t b = 0; b < given.batch; ++b) {
      const auto first = slopes.begin() + (alibi->shape.size() == 2 ? b * given.heads_q : 0);
      given.slopes.insert(given.slopes.end(), first, first + given.heads_q);
    }
  }
  if (dout) given.dout = values_of(ordered(call, *dout, -1));
  if (dlse) given.dlse = values_of(dlse->view());
  add_masks(given, call, q_shape, k_shape);
  return given;
}

double distance(Wide a, Wide b) {
  if (a == b) return 0;  // infinities of one sign too
  const auto d = double(std::fabs(a - b));
  return std::isnan(d) ? double(INFINITY) : d;
}

// The library's result compared with the exact one and with textbook ones.
class Measure {
 public:
  explicit Measure(const ReferenceCase& given) : exact_(exact_result(given)), textbooks_(textbook_results(given)) {}

  Measured operator()(const std::string& name, const TensorView& got, WideArray ReferenceResult::* array,
                      const std::string& terms) const {
    const auto& exact = exact_.*array;
    Measured result{name, 0, 0, 0, exact_.terms.at(terms)};
    Wide largest = 0;
    for_each_element(got, [&](std::int64_t index, std::int64_t offset) {
      const auto value = exact[std::size_t(index)];
      result.error = std::max(result.error, distance(Wide(load_number(got.type, got.data, offset)), value));
      if (!std::isfinite(value)) return;
      largest = std::max(largest, std::fabs(value));
      for (const auto& textbook : textbooks_)
        result.textbook_error = std::max(result.textbook_error, distance((textbook.*array)[std::size_t(index)], value));
    });
    result.unit = ulp(got.type, double(largest));
    return result;
  }

 private:
  ReferenceResult exact_;
  std::vector<ReferenceResult> textbooks_;
};

// m + log(l) must be lse: l alone has no bound of its own, since it changes with m's rounding.
OwnedTensor recombined(const Results& results) {
  auto sum = OwnedTensor::zeros(results.lse.type, results.lse.shape);
  for (std::int64_t i = 0; i < sum.elements(); ++i) {
    const auto m = load_number(sum.type, results.row_max->data.get(), i),
               l = load_number(sum.type, results.row_sum->data.get(), i);
    store_number(sum.type, sum.data.get(), i, l == 0 ? m : m + std::log(l));
  }
  return sum;
}

}  // namespace

std::vector<Measured> compare(const Call& call, const OwnedTensor* dout, const OwnedTensor* dlse) {
  using R = ReferenceResult;
  const auto results = run_forward(call, true);
  const auto gradients = dout ? run_backward(call, results, *dout, dlse) : NamedTensors();
  const Measure measure(reference_case(call, dout, dlse));
  std::vector<Measured> all = {measure("out", ordered(call, results.out, -1), &R::out, "out"),
                               measure("lse", results.lse.view(), &R::lse, "lse"),
                               measure("row_max", results.row_max->view(), &R::row_max, "lse"),
                               measure("row_max + log(row_sum)", recombined(results).view(), &R::lse, "lse")};
  for (const auto& [name, tensor] : gradients) {
    const bool packed = name == "dqkv";
    if (packed || name == "dq") all.push_back(measure("dq", ordered(call, tensor, 0), &R::dq, "dq"));
    if (packed || name == "dk") all.push_back(measure("dk", ordered(call, tensor, 1), &R::dk, "dk"));
    if (packed || name == "dv") all.push_back(measure("dv", ordered(call, tensor, 2), &R::dv, "dv"));
    if (name == "dbias") all.push_back(measure(name, tensor.view(), &R::dbias, name));
    if (name == "dsink") all.push_back(measure(name, tensor.view(), &R::dsink, name));
  }
  return all;
}

}  // namespace anyflash::cli
