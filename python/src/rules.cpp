// Python's Rule class and the functions that make rules. Their documentation is in anyflash/_rules.py.
#include <algorithm>
#include <map>
#include <optional>

#include <anyflash/names.h>

#include "rule_object.h"

namespace anyflash::python {
namespace {

RuleObject joined(Rule rule, const RuleObject& a, const RuleObject& b) {
  RuleObject made{std::move(rule), a.tables};
  made.tables.insert(made.tables.end(), b.tables.begin(), b.tables.end());
  return made;
}

RuleObject local_rule(nb::handle window, nb::handle log2_stride, nb::handle causal) {
  return {local(integer(window, "rule local: window"), integer(log2_stride, "rule local: log2_stride"),
                flag(causal, "rule local: causal")),
          {}};
}

using MakeFromTwo = Rule (*)(const TensorView&, const TensorView&);

RuleObject rule_of_tables(MakeFromTwo make, nb::handle first, const char* first_name, nb::handle second,
                          const char* second_name) {
  const auto tables = std::make_shared<Arrays>();
  const auto a = tables->input(first, first_name, Elements::indices);
  const auto b = tables->input(second, second_name, Elements::indices);
  return {make(a, b), {tables}};
}

RuleObject blocks_rule(nb::handle bitmap, nb::handle block_q, nb::handle block_k) {
  const auto tables = std::make_shared<Arrays>();
  const auto view = tables->input(bitmap, "rule blocks: bitmap", Elements::mask);
  return {blocks(view, integer(block_q, "rule blocks: block_q"), integer(block_k, "rule blocks: block_k")), {tables}};
}

RuleObject dense_rule(nb::handle mask) {
  const auto tables = std::make_shared<Arrays>();
  const auto view = tables->input(mask, "rule dense: mask", Elements::mask);
  return {dense(view), {tables}};
}

/// A table's name; nothing if it is not a text, which no rule can name.
std::optional<std::string_view> name_of_table(nb::handle key) {
  Py_ssize_t size = 0;
  const char* const letters = PyUnicode_Check(key.ptr()) ? PyUnicode_AsUTF8AndSize(key.ptr(), &size) : nullptr;
  PyErr_Clear();
  if (letters == nullptr) return {};
  return std::string_view(letters, std::size_t(size));
}

std::string nearest_table(const std::string& name, nb::handle arrays) {
  if (!PyDict_Check(arrays.ptr())) return {};
  Names known;
  for (const auto& [key, array] : nb::borrow<nb::dict>(arrays)) {
    if (const auto letters = name_of_table(key)) known.push_back(*letters);
  }
  return did_you_mean(name, known);
}

/// Throws Error if `arrays` holds more than the tables that the rule's text names.
void refuse_others(nb::handle arrays, const std::map<std::string, TensorView>& named) {
  if (PyMapping_Size(arrays.ptr()) == Py_ssize_t(named.size())) return;
  PyErr_Clear();
  const auto keys = nb::steal(PyMapping_Keys(arrays.ptr()));
  if (!keys.is_valid()) {
    PyErr_Clear();
    throw Error(Error::Kind::type, "tables: type " + class_name(arrays) + ", expected arrays by name");
  }
  Names known;
  for (const auto& [name, view] : named) known.push_back(name);
  for (const nb::handle key : keys) {
    const auto name = name_of_table(key);
    if (name && named.contains(std::string(*name))) continue;
    throw Error(Error::Kind::value, "tables: " + (name ? "'" + shown(*name) + "'" : echoed(nb::repr(key))) +
                                        ", which the rule's text does not name" +
                                        (name ? did_you_mean(*name, known) : ""));
  }
}

/// `of_call`: the rule lives only as long as a call.
RuleObject rule_of_text(std::string_view text, nb::handle arrays, bool of_call) {
  RuleObject made;
  std::map<std::string, TensorView> views;  // a table named twice is one table
  made.rule = parse_rule(text, [&](const std::string& name) {
    if (const auto known = views.find(name); known != views.end()) return known->second;
    if (!PyMapping_Check(arrays.ptr()) || PyMapping_HasKeyString(arrays.ptr(), name.c_str()) != 1) {
      throw Error(Error::Kind::value,
                  "tables: no array '" + shown(name) + "', which the rule's text names" + nearest_table(name, arrays));
    }
    auto& table = *made.tables.emplace_back(std::make_shared<Arrays>());
    const auto label = "tables: " + shown(name);
    const nb::object array = arrays[name.c_str()];
    return views[name] =
               of_call ? table.table_of_call(array, label.c_str()) : table.input(array, label.c_str(), Elements::table);
  });
  refuse_others(arrays, views);
  return made;
}

/// The arguments from which anyflash.parse_rule makes the rule again: its text, and its tables by name as NumPy arrays,
/// which share the rule's memory or are copies.
nb::tuple parts(nb::handle self, bool copies) {
  std::vector<TensorView> views;
  nb::dict arrays;
  const auto text = rule_of(self).rule.text([&](const TensorView& table) {
    const auto same = [&](const TensorView& other) {
      return other.data == table.data && other.type == table.type && other.rank == table.rank &&
             other.shape == table.shape && other.strides == table.strides;
    };
    const auto known = std::find_if(views.begin(), views.end(), same);
    const auto name = "t" + std::to_string(known - views.begin());
    if (known == views.end()) {
      if (table.device.kind != DeviceKind::cpu) {
        throw Error(Error::Kind::device, "rule: a table on " + device_name(table.device) +
                                             ", expected cpu, or the rule's text and its tables by name");
      }
      views.push_back(table);
      const auto array = shared(table, self);
      arrays[name.c_str()] = copies ? nb::object(array.attr("copy")()) : array;
    }
    return name;
  });
  return nb::make_tuple(text, arrays);
}

nb::tuple arrays_on_gpus(nb::handle self) {
  nb::list all;
  for (const auto& tables : rule_of(self).tables)
    for (const auto& array : tables->on_gpus()) all.append(array);
  return nb::tuple(all);
}

/// For pickle and copy.
nb::tuple reduced(nb::handle self) {
  return nb::make_tuple(nb::module_::import_("anyflash").attr("parse_rule"), parts(self, true));
}

// Every argument accepts None: otherwise nanobind would raise its own message.
auto any(const char* name) { return nb::arg(name).none(); }

void add_plain_rules(nb::module_& module) {
  module.def("full", [] { return RuleObject{full(), {}}; });
  module.def("causal", [] { return RuleObject{causal(), {}}; });
  module.def("local", &local_rule, any("window"), any("log2_stride"), any("causal"));
  module.def(
      "window",
      [](nb::handle left, nb::handle right) {
        return RuleObject{window(per_dimension(left, "rule window: left"), per_dimension(right, "rule window: right")),
                          {}};
      },
      any("left"), any("right"));
  module.def("prefix", [](nb::handle n) { return RuleObject{prefix(integer(n, "rule prefix: n")), {}}; }, any("n"));
  module.def(
      "prefix_queries",
      [](nb::handle n) { return RuleObject{prefix_queries(integer(n, "rule prefix_queries: n")), {}}; }, any("n"));
  module.def("sink", [](nb::handle n) { return RuleObject{sink(integer(n, "rule sink: n")), {}}; }, any("n"));
  module.def(
      "tiles",
      [](nb::handle shape, nb::handle kernel) {
        return RuleObject{tiles(per_dimension(shape, "rule tiles: shape"), per_dimension(kernel, "rule tiles: kernel")),
                          {}};
      },
      any("shape"), any("kernel"));
  module.def(
      "neighbourhood",
      [](nb::handle kernel, nb::handle dilation, nb::handle causal) {
        return RuleObject{neighbourhood(per_dimension(kernel, "rule neighbourhood: kernel"),
                                        per_dimension(dilation, "rule neighbourhood: dilation"),
                                        per_dimension(causal, "rule neighbourhood: causal")),
                          {}};
      },
      any("kernel"), any("dilation"), any("causal"));
  module.def(
      "parse_rule",
      [](nb::handle text, nb::handle tables, bool of_call) {
        const auto characters = utf8(text, "text");
        return tables.is_none() ? RuleObject{parse_rule(characters), {}} : rule_of_text(characters, tables, of_call);
      },
      any("text"), any("tables"), nb::arg("of_call") = false);
}

void add_rules_of_tables(nb::module_& module) {
  module.def(
      "documents",
      [](nb::handle ids_q, nb::handle ids_k) {
        return rule_of_tables(&documents, ids_q, "rule documents: ids_q", ids_k, "rule documents: ids_k");
      },
      any("ids_q"), any("ids_k"));
  module.def(
      "documents_packed",
      [](nb::handle cu_q, nb::handle cu_k) {
        return rule_of_tables(&documents_packed, cu_q, "cu_seqlens_q", cu_k, "cu_seqlens_k");
      },
      any("cu_seqlens_q"), any("cu_seqlens_k"));
  module.def("blocks", &blocks_rule, any("bitmap"), any("block_q"), any("block_k"));
  module.def("dense", &dense_rule, any("mask"));
}

}  // namespace

const RuleObject& rule_of(nb::handle object) {
  if (!nb::isinstance<RuleObject>(object) || !nb::inst_ready(object)) {  // ready: not only made by __new__
    throw Error(Error::Kind::type, "rule: type " + class_name(object) + ", expected a rule such as anyflash.causal()" +
                                       (PyUnicode_Check(object.ptr()) ? ", or anyflash.parse_rule of the text" : ""));
  }
  return *nb::inst_ptr<RuleObject>(object);
}

void add_rules(nb::module_& module) {
  nb::class_<RuleObject>(
      module, "Rule",
      "Which keys a query sees. Made by full, causal, local, window, prefix, prefix_queries, sink,\n"
      "documents, documents_packed, tiles, neighbourhood, blocks and dense; combined with & | ~ (and, or, not and if\n"
      "raise TypeError: a rule has no truth value). Immutable. It keeps the arrays that it was made of alive, and "
      "calls\n"
      "read them. str(rule) is the rule as text.")
      .def("__repr__", [](const RuleObject& self) { return self.rule.text(); })
      .def(
          "__and__", [](const RuleObject& a, const RuleObject& b) { return joined(a.rule & b.rule, a, b); },
          nb::is_operator(), nb::arg("other"), "Visible where both rules make it visible.")
      .def(
          "__or__", [](const RuleObject& a, const RuleObject& b) { return joined(a.rule | b.rule, a, b); },
          nb::is_operator(), nb::arg("other"), "Visible where either rule makes it visible.")
      .def(
          "__invert__", [](const RuleObject& a) { return RuleObject{~a.rule, a.tables}; },
          "Visible where the rule makes it hidden.")
      .def("__bool__",
           [](const RuleObject&) -> bool {
             throw Error(Error::Kind::type, "rule: has no truth value, expected & | ~ in place of and, or, not");
           })
      .def("__reduce__", &reduced)
      .def_prop_ro(
          "_parts", [](nb::handle self) { return parts(self, false); },
          "(text, {name: table}), which parse_rule reads; the tables share the rule's memory.")
      .def_prop_ro("_arrays", &arrays_on_gpus, "Those of its tables that are on a GPU, as they came.")
      .def("__copy__", [](nb::handle self) { return nb::borrow(self); });

  add_plain_rules(module);
  add_rules_of_tables(module);
}

}  // namespace anyflash::python
