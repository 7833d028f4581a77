#include "call.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>

#include "../call_text.h"

namespace anyflash::tensorflow {
using call_text::number, call_text::parts_of, call_text::read_call;

namespace {

[[noreturn]] void fail(const std::string& name, const std::string& text) {
  throw Error(Error::Kind::value, name + ": " + text);
}

std::string text_of_shape(const std::vector<std::int64_t>& shape, int axes) {
  std::string text = "(";
  for (int i = 0; i < axes; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (axes == 1 ? ",)" : ")");
}

}  // namespace

Text::Text(const std::string& text) {
  rule = "full()";
  read_call(text, options, [&](const std::string& name, std::string_view value) {
    if (name == "rule") rule = value;
    else if (name == "names") names = parts_of(value, ' ');
    else if (name == "dimensions") dimensions = number<int>(name, value);
    else if (name == "sharpening") sharpening = number<double>(name, value);
    else return name == "returns";
    return true;
  });
  if (dimensions < 0 || dimensions > 2) fail("dimensions", std::to_string(dimensions) + ", expected 0 to 2");
  if (dimensions > 0) options.layout = Layout::bhds;
  struct Tables {};
  try {
    options.rule = parse_rule(rule, [](const std::string&) -> TensorView { throw Tables(); });
  } catch (const Tables&) {
    has_tables = true;
  }
}

Call::Call(const Text& text, Context& context) : options(text.options), text_(text) {
  const char* names[] = {"query", "key", "value"};
  TensorView* seen[] = {&q, &k, &v};
  for (int i = 0; i < 3; ++i) given[i] = context.next_shaped(names[i]);
  for (int i = 0; i < 3; ++i) *seen[i] = like_out(given[i], names[i]);
  if (text.sharpening != 1 && q.rank > 2) {
    const auto scale = options.scale.value_or(static_cast<double>(1 / std::sqrt(static_cast<long double>(q.shape[2]))));
    options.scale = scale * text.sharpening;
  }
  read_extras(context);
}

TensorView Call::flattened(const Shaped& tensor, const char* name) const {
  const auto &shape = tensor.shape, &query = given[0].shape;
  const int dimensions = text_.dimensions, batch_rank = int(query.size()) - dimensions - 1;
  if (batch_rank < 0) {
    fail(name, "rank " + std::to_string(shape.size()) + ", expected at least " + std::to_string(dimensions + 1));
  }
  if (shape.size() != query.size()) {
    fail(name, "rank " + std::to_string(shape.size()) + ", expected " + std::to_string(query.size()) + " as in query");
  }
  TensorView view = tensor.view;
  view.rank = dimensions + 3;
  view.shape = {1, 1};
  bool same = true;
  for (int i = 0; i < batch_rank; ++i) {
    view.shape[0] *= shape[i];
    same = same && shape[i] == query[i];
  }
  if (!same) {
    fail(name, "batch " + text_of_shape(shape, batch_rank) + ", expected " + text_of_shape(query, batch_rank) +
                   " as in query");
  }
  for (int i = 0; i <= dimensions; ++i) view.shape[2 + i] = shape[batch_rank + i];
  view.set_row_major_strides();
  return view;
}

void Call::read_extras(Context& context) {
  std::map<std::string, TensorView> tables;
  for (const auto& name : text_.names) {
    if (name.starts_with('@')) {
      tables[name.substr(1)] = context.next(name.c_str(), true);
      continue;
    }
    bool known = false;
    for_each_tensor([&](const char* option, auto member, bool integers) {
      if (name != option) return;
      options.*member = context.next(option, integers);
      if (name == "bias" || name == "sink") terms.push_back({name, options.*member});
      known = true;
    });
    if (!known) fail("names", "'" + shown(name) + "', expected an option's name");
  }
  read_rule(tables);
}

void Call::read_rule(const std::map<std::string, TensorView>& tables) {
  Names known, named;
  for (const auto& [table, tensor] : tables) known.push_back(table);
  const auto table_of = [&](const std::string& name) {
    const auto found = tables.find(name);
    if (found == tables.end()) {
      throw Error(Error::Kind::value,
                  "tables: no tensor '" + shown(name) + "', which the rule's text names" + did_you_mean(name, known));
    }
    named.push_back(found->first);
    return found->second;
  };
  if (text_.has_tables) options.rule = parse_rule(text_.rule, table_of);
  for (const auto& table : known) {
    if (std::find(named.begin(), named.end(), table) != named.end()) continue;
    throw Error(Error::Kind::value,
                "tables: '" + shown(table) + "', which the rule's text does not name" + did_you_mean(table, named));
  }
}

TensorView Call::like_out(const Shaped& tensor, const char* name) const {
  return text_.dimensions > 0 ? flattened(tensor, name) : tensor.whole(name);
}

std::vector<std::int64_t> Call::shape_of_out(const ResultShapes& shapes) const {
  if (text_.dimensions == 0) return shapes.out;
  auto shape = given[0].shape;
  shape.end()[-text_.dimensions - 1] = v.shape[2];
  return shape;
}

std::vector<std::int64_t> Call::shape_of_rows(const ResultShapes& shapes) const {
  if (text_.dimensions == 0) return shapes.lse;
  auto shape = given[0].shape;
  shape.erase(shape.end() - text_.dimensions - 1);
  return shape;
}

}  // namespace anyflash::tensorflow
