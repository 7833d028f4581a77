// parse_rule: a rule from text, by recursive descent.
//
//   either = both { "|" both }        both = unary { "&" unary }        unary = "~" unary | "(" either ")" | call
//   call   = name "(" [ argument { "," argument } ] ")"                 argument = [ name "=" ] value
//   value  = integer | "true" | "false" | "[" integer { "," integer } "]" | name of a table
#include <anyflash/names.h>
#include <anyflash/rule.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <vector>

#include "rules/node.h"

namespace anyflash {
namespace {

constexpr int deepest = 64;  // nested parentheses and ~: bounds the recursion

struct Value {
  PerDimension numbers = 0;
  bool word = false;  // written as true or false
  std::string table;  // the name of a table, else empty
  std::size_t at = 0;
};

struct Argument {
  std::string name;  // empty: by position
  Value value;
};

class Parser {
 public:
  Parser(std::string_view text, const TableOfName* table_of) : text_(text), table_of_(table_of) {}

  Rule whole() {
    auto rule = either();
    if (!at_end()) fail_here("expected & | or the end");
    return rule;
  }

 private:
  [[noreturn]] void fail(std::size_t at, const std::string& what) const {
    throw Error(Error::Kind::value, "rule: column " + std::to_string(at + 1) + ": " + what);
  }

  [[noreturn]] void fail_here(const std::string& expected) {
    skip_spaces();
    fail(at_, expected + ", found " + found());
  }

  std::string found() const {
    if (at_ >= text_.size()) return "the end";
    const char c = text_[at_];
    return c >= ' ' && c <= '~' ? std::string("'") + c + "'" : "a character that is not printable ASCII";
  }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || (text_[at_] >= '\t' && text_[at_] <= '\r'))) ++at_;
  }

  bool at_end() {
    skip_spaces();
    return at_ >= text_.size();
  }

  bool take(char c) {
    if (at_end() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!take(c)) fail_here(std::string("expected '") + c + "'");
  }

  static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  std::string_view name() {
    skip_spaces();
    const auto from = at_;
    while (at_ < text_.size() && (is_letter(text_[at_]) || (at_ > from && is_digit(text_[at_])))) ++at_;
    return text_.substr(from, at_ - from);
  }

  Rule either() {
    auto rule = both();
    while (take('|')) rule = rule | both();
    return rule;
  }

  Rule both() {
    auto rule = unary();
    while (take('&')) rule = rule & unary();
    return rule;
  }

  Rule unary() {
    skip_spaces();
    if (++depth_ > deepest) fail(at_, "more than " + std::to_string(deepest) + " levels of parentheses and ~");
    std::optional<Rule> rule;
    if (take('~')) {
      rule = ~unary();
    } else if (take('(')) {
      rule = either();
      expect(')');
    } else {
      rule = call();
    }
    --depth_;
    return *rule;
  }

  std::int64_t integer() {
    skip_spaces();
    const auto* const begin = text_.data() + at_;
    const auto* const end = text_.data() + text_.size();
    std::int64_t number = 0;
    const auto result = std::from_chars(begin, end, number);
    if (result.ec == std::errc::result_out_of_range) fail(at_, "a number beyond 64 bits");
    if (result.ec != std::errc()) fail_here("expected a number");
    at_ += static_cast<std::size_t>(result.ptr - begin);
    return number;
  }

  Value value() {
    skip_spaces();
    Value result;
    result.at = at_;
    const auto word = name();
    if (!word.empty()) {
      result.word = word == "true" || word == "false";
      if (!result.word && !table_of_) fail_word(result.at, word);
      if (!result.word) result.table = word;
      result.numbers = word == "true";
    } else if (take('[')) {
      int count = 0;
      do {
        if (count == 3) fail(at_, "more than 3 numbers for the dimensions");
        result.numbers.value[count++] = integer();
      } while (take(','));
      expect(']');
      result.numbers.count = count;
    } else {
      result.numbers = integer();
    }
    return result;
  }

  [[noreturn]] void fail_word(std::size_t at, std::string_view word) const {
    fail(at, "expected a number, true or false, found '" + shown(word) + "'" + did_you_mean(word, {"true", "false"}));
  }

  Argument argument() {
    skip_spaces();
    const auto from = at_;
    const auto word = name();
    if (!word.empty() && take('=')) return {std::string(word), value()};
    at_ = from;
    return {{}, value()};
  }

  Rule call();

  std::string_view text_;
  const TableOfName* table_of_;  // null: text without tables
  std::size_t at_ = 0;
  int depth_ = 0;
};

/// The arguments of a call, matched to the parameters' names.
class Arguments {
 public:
  Arguments(std::string_view rule, std::size_t at, std::vector<Argument> given, Names names)
      : rule_(rule), at_(at), names_(std::move(names)), values_(names_.size()) {
    std::size_t position = 0;
    bool named = false;
    for (auto& [name, value] : given) {
      if (name.empty()) {
        if (named) fail(value.at, "an argument without a name after one with a name");
        if (position == names_.size()) fail(value.at, "at most " + std::to_string(position) + " arguments");
        values_[position++] = value;
        continue;
      }
      named = true;
      const auto i = std::size_t(std::find(names_.begin(), names_.end(), name) - names_.begin());
      if (i == names_.size()) fail(value.at, "no argument '" + shown(name) + "'" + did_you_mean(name, names_));
      if (values_[i]) fail(value.at, "argument '" + name + "' given twice");
      values_[i] = value;
    }
  }

  PerDimension numbers(std::size_t i, bool words = false) const {
    if (!values_[i]) fail(at_, "argument '" + std::string(names_[i]) + "' missing");
    if (!values_[i]->table.empty()) {
      fail(values_[i]->at, "argument '" + std::string(names_[i]) + "' takes a number, found '" +
                               shown(values_[i]->table) + "'" + did_you_mean(values_[i]->table, {"true", "false"}));
    }
    if (values_[i]->word && !words)
      fail(values_[i]->at, "argument '" + std::string(names_[i]) + "' true or false, expected a number");
    return values_[i]->numbers;
  }
  PerDimension numbers_or(std::size_t i, std::int64_t otherwise, bool words = false) const {
    return values_[i] ? numbers(i, words) : PerDimension(otherwise);
  }
  std::int64_t number(std::size_t i, bool words = false) const {
    const auto result = numbers(i, words);
    if (result.count != 1) fail(values_[i]->at, "argument '" + std::string(names_[i]) + "' takes one number");
    return result.value[0];
  }
  TensorView table(std::size_t i, const TableOfName& table_of) const {
    if (!values_[i]) fail(at_, "argument '" + std::string(names_[i]) + "' missing");
    if (values_[i]->table.empty())
      fail(values_[i]->at, "argument '" + std::string(names_[i]) + "' takes a table's name");
    return table_of(values_[i]->table);
  }
  std::int64_t number_or(std::size_t i, std::int64_t otherwise, bool words = false) const {
    return values_[i] ? number(i, words) : otherwise;
  }
  bool truth_or(std::size_t i, bool otherwise) const {
    const auto result = number_or(i, otherwise, true);
    if (result != 0 && result != 1)
      fail(values_[i]->at, "argument '" + std::string(names_[i]) + "' takes true or false");
    return result == 1;
  }

 private:
  [[noreturn]] void fail(std::size_t at, const std::string& what) const {
    throw Error(Error::Kind::value, "rule: column " + std::to_string(at + 1) + ": " + std::string(rule_) + ": " + what);
  }

  std::string_view rule_;
  std::size_t at_;
  Names names_;
  std::vector<std::optional<Value>> values_;
};

/// A rule's name, its parameters, and the function that makes it.
struct Builder {
  std::string_view name;
  Names parameters;
  Rule (*make)(const Arguments&, const TableOfName&);
  bool tables = false;
};

const std::vector<Builder>& builders() {
  using A = const Arguments&;
  using T = const TableOfName&;
  static const auto& all = *new std::vector<Builder>{
      {"full", {}, [](A, T) { return full(); }},
      {"causal", {}, [](A, T) { return causal(); }},
      {"local",
       {"window", "log2_stride", "causal"},
       [](A a, T) { return local(a.number(0), a.number_or(1, 0), a.truth_or(2, false)); }},
      {"window", {"left", "right"}, [](A a, T) { return window(a.numbers(0), a.numbers(1)); }},
      {"prefix", {"n"}, [](A a, T) { return prefix(a.number(0)); }},
      {"prefix_queries", {"n"}, [](A a, T) { return prefix_queries(a.number(0)); }},
      {"sink", {"n"}, [](A a, T) { return sink(a.number(0)); }},
      {"tiles", {"shape", "kernel"}, [](A a, T) { return tiles(a.numbers(0), a.numbers(1)); }},
      {"neighbourhood",
       {"kernel", "dilation", "causal"},
       [](A a, T) { return neighbourhood(a.numbers(0), a.numbers_or(1, 1), a.numbers_or(2, 0, true)); }},
      {"documents", {"ids_q", "ids_k"}, [](A a, T of) { return documents(a.table(0, of), a.table(1, of)); }, true},
      {"documents_packed",
       {"cu_seqlens_q", "cu_seqlens_k"},
       [](A a, T of) { return documents_packed(a.table(0, of), a.table(1, of)); },
       true},
      {"blocks",
       {"bitmap", "block_q", "block_k"},
       [](A a, T of) { return blocks(a.table(0, of), a.number(1), a.number(2)); },
       true},
      {"dense", {"mask"}, [](A a, T of) { return dense(a.table(0, of)); }, true}};
  return all;
}

Rule Parser::call() {
  skip_spaces();
  const auto at = at_;
  const auto rule = name();
  if (rule.empty()) fail_here("expected a rule");
  const auto& all = builders();
  const auto builder = std::find_if(all.begin(), all.end(), [&](const Builder& one) { return one.name == rule; });
  if (builder == all.end()) {
    Names names;
    for (const auto& one : all) names.push_back(one.name);
    fail(at, "no rule '" + shown(rule) + "'" + did_you_mean(rule, names));
  }
  if (builder->tables && !table_of_) {
    fail(at, std::string(rule) + " takes a table, which needs a name and an array for it");
  }
  expect('(');
  std::vector<Argument> given;
  if (!take(')')) {
    do {
      given.push_back(argument());
    } while (take(','));
    expect(')');
  }
  const Arguments arguments(rule, at, std::move(given), builder->parameters);
  try {
    return builder->make(arguments, table_of_ ? *table_of_ : TableOfName());
  } catch (const Error& error) {
    const std::string line = error.what();
    if (line.rfind("rule: column ", 0) == 0) throw;
    if (line.rfind("rule ", 0) != 0) throw;  // an error of the caller's table_of, or of cumulative lengths
    throw Error(error.kind(), "rule: column " + std::to_string(at + 1) + ": " + line.substr(5));  // from a builder
  }
}

}  // namespace

Rule parse_rule(std::string_view text) { return Parser(text, nullptr).whole(); }

Rule parse_rule(std::string_view text, const TableOfName& table_of) {
  return Parser(text, table_of ? &table_of : nullptr).whole();
}

}  // namespace anyflash
