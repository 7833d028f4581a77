// Text of rules, parse_rule, and the builders' own checks.
#include <anyflash/names.h>
#include <gtest/gtest.h>

#include <map>

#include "cases.h"
#include "rules/node.h"

namespace anyflash::rules::testing {
namespace {

/// The line of the Error that f throws; "" if it throws none.
template <class F>
std::string error_of(const F& f, Error::Kind kind = Error::Kind::value) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "";
}

std::string parse_error(std::string_view text) {
  return error_of([&] { parse_rule(text); });
}

TEST(Text, OfRules) {
  EXPECT_EQ(Rule().text(), "full()");
  EXPECT_EQ((causal() & local(256)).text(), "causal() & local(256)");
  EXPECT_EQ(local(8, 2, true).text(), "local(8, log2_stride=2, causal=true)");
  EXPECT_EQ(window({1, 2}, -1).text(), "window([1, 2], -1)");
  EXPECT_EQ(neighbourhood(7).text(), "neighbourhood(7)");
  EXPECT_EQ(neighbourhood({7, 5}, 2, {0, 1}).text(), "neighbourhood([7, 5], dilation=2, causal=[0, 1])");
  EXPECT_EQ(tiles({2, 4, 8}, 3).text(), "tiles([2, 4, 8], 3)");
  EXPECT_EQ((~(causal() | sink(4)) & prefix(9)).text(), "~(causal() | sink(4)) & prefix(9)");
  EXPECT_EQ((causal() | (full() & ~full())).text(), "causal() | full() & ~full()");
  EXPECT_EQ((causal() | (full() | causal())).text(), "causal() | (full() | causal())");
  EXPECT_EQ((~~causal()).text(), "causal()");
  std::int64_t ids[6] = {};
  std::uint8_t bits[6] = {};
  EXPECT_EQ(documents(TensorView(ids, ElementType::int64, {6}), TensorView(ids, ElementType::int64, {2, 3})).text(),
            "documents((6), (2, 3))");
  EXPECT_EQ(blocks(TensorView(bits, ElementType::uint8, {2, 3}), 64, 32).text(), "blocks((2, 3), 64, 32)");
  EXPECT_EQ(dense(TensorView(bits, ElementType::boolean, {2, 3})).text(), "dense((2, 3))");
}

TEST(Text, ReadBackTheSame) {
  Maker make(21);
  for (int n = repeats(20000); n > 0; --n) {
    const auto shapes = make.shapes(int(make.between(1, 3)), 500);
    const auto rule = make.tree(4, shapes, Maker::without_tables, full());
    ASSERT_EQ(parse_rule(rule.text()).text(), rule.text());
  }
}

TEST(Text, WithTablesByNameReadBackTheSame) {
  std::int32_t ids[6] = {0, 1, 0, 1, 1, 0};
  std::uint8_t bits[6] = {1, 0, 1, 0, 0, 1};
  const std::map<std::string, TensorView> tables{{"ids", TensorView(ids, ElementType::int32, {6})},
                                                 {"part", TensorView(ids, ElementType::int32, {3})},
                                                 {"map", TensorView(bits, ElementType::uint8, {3, 2})},
                                                 {"mask", TensorView(bits, ElementType::boolean, {1, 6})}};
  const auto name_of = [&](const TensorView& table) {
    for (const auto& [name, view] : tables) {
      if (view.data == table.data && view.shape == table.shape) return name;
    }
    return std::string("none");
  };
  const std::string text = "documents(ids, part) & ~blocks(map, 2, 3) | documents_packed(part, part) & dense(mask)";
  const auto rule = parse_rule(text, [&](const std::string& name) { return tables.at(name); });
  EXPECT_EQ(rule.text(name_of), text);
  EXPECT_EQ(rule.text(), "documents((6), (3)) & ~blocks((3, 2), 2, 3) | documents_packed((3), (3)) & dense((1, 6))");
}

TEST(Text, WaysToWriteARule) {
  EXPECT_EQ(parse_rule(" causal ( ) ").text(), "causal()");
  EXPECT_EQ(parse_rule("local(window=4,causal=true)").text(), "local(4, causal=true)");
  EXPECT_EQ(parse_rule("local(4, causal=0, log2_stride=3)").text(), "local(4, log2_stride=3)");
  EXPECT_EQ(parse_rule("window(right=0, left=[-1,2])").text(), "window([-1, 2], 0)");
}

TEST(Text, Precedence) {
  EXPECT_EQ(parse_rule("~causal() & sink(1) | full() & ~~prefix(2)").text(),
            "~causal() & sink(1) | full() & prefix(2)");
  EXPECT_EQ(parse_rule("~(causal() & (sink(1) | full()))").text(), "~(causal() & (sink(1) | full()))");
  EXPECT_EQ(parse_rule("((causal()))").text(), "causal()");
}

TEST(Text, NamesTheNearest) {
  const auto table = [](const std::string&) { return TensorView(); };
  EXPECT_EQ(parse_error("casual()"), "rule: column 1: no rule 'casual', did you mean 'causal'?");
  EXPECT_EQ(parse_error("full() & Neighborhood(3)"),
            "rule: column 10: no rule 'Neighborhood', did you mean 'neighbourhood'?");
  EXPECT_EQ(parse_error("document(a, b)"), "rule: column 1: no rule 'document', did you mean 'documents'?");
  EXPECT_EQ(parse_error("prefix-queries(3)"), "rule: column 7: expected '(', found '-'");
  EXPECT_EQ(parse_error("local(1, log_stride=2)"),
            "rule: column 21: local: no argument 'log_stride', did you mean 'log2_stride'?");
  EXPECT_EQ(parse_error("local(1, 0, True)"),
            "rule: column 13: expected a number, true or false, found 'True', did you mean 'true'?");
  EXPECT_EQ(error_of([&] { parse_rule("local(1, 0, True)", table); }),
            "rule: column 13: local: argument 'causal' takes a number, found 'True', did you mean 'true'?");
}

TEST(Names, TheNearestIsNear) {
  const Names known{"none_front", "none_end", "scale_front", "scale_end", "q", "qkv"};
  const auto nearest = [&](std::string_view given) { return did_you_mean(given, known); };
  EXPECT_EQ(nearest("none-end"), ", did you mean 'none_end'?");        // another separator
  EXPECT_EQ(nearest("NONE_END"), ", did you mean 'none_end'?");        // capitals
  EXPECT_EQ(nearest("noneend"), ", did you mean 'none_end'?");         // a letter less
  EXPECT_EQ(nearest("none_endd"), ", did you mean 'none_end'?");       // one more
  EXPECT_EQ(nearest("scale_frnot"), ", did you mean 'scale_front'?");  // two swapped
  EXPECT_EQ(nearest("qvk"), ", did you mean 'qkv'?");
  EXPECT_EQ(nearest("end"), "");  // too many letters are missing
  EXPECT_EQ(nearest("k"), "");    // nothing of the name is left
  EXPECT_EQ(nearest(""), "");
  EXPECT_EQ(nearest(std::string(1 << 20, 'q')), "");
  EXPECT_EQ(did_you_mean("a", {}), "");
}

TEST(Text, NamesTheColumn) {
  EXPECT_EQ(parse_error(""), "rule: column 1: expected a rule, found the end");
  EXPECT_EQ(parse_error("causal() &"), "rule: column 11: expected a rule, found the end");
  EXPECT_EQ(parse_error("causal() causal()"), "rule: column 10: expected & | or the end, found 'c'");
  EXPECT_EQ(parse_error("causal"), "rule: column 7: expected '(', found the end");
  EXPECT_EQ(parse_error("(causal()"), "rule: column 10: expected ')', found the end");
  EXPECT_EQ(parse_error("nosuch(1)"), "rule: column 1: no rule 'nosuch'");
  EXPECT_EQ(parse_error("causal(1)"), "rule: column 8: causal: at most 0 arguments");
  EXPECT_EQ(parse_error("full() | local()"), "rule: column 10: local: argument 'window' missing");
  EXPECT_EQ(parse_error("full() | local(0)"), "rule: column 10: local: window 0, expected at least 1");
  EXPECT_EQ(parse_error("local(window=1, window=2)"), "rule: column 24: local: argument 'window' given twice");
  EXPECT_EQ(parse_error("local(1, width=2)"), "rule: column 16: local: no argument 'width'");
  EXPECT_EQ(parse_error("local(window=1, 2)"),
            "rule: column 17: local: an argument without a name after one with a name");
  EXPECT_EQ(parse_error("local(true)"), "rule: column 7: local: argument 'window' true or false, expected a number");
  EXPECT_EQ(parse_error("local([1, 2])"), "rule: column 7: local: argument 'window' takes one number");
  EXPECT_EQ(parse_error("local(1, 99999)"), "rule: column 1: local: log2_stride 99999, expected at most 30");
  EXPECT_EQ(parse_error("local(1, 0, 2)"), "rule: column 13: local: argument 'causal' takes true or false");
  EXPECT_EQ(parse_error("prefix(99999999999999999999)"), "rule: column 8: a number beyond 64 bits");
  EXPECT_EQ(parse_error("prefix(-99999999999999999999)"), "rule: column 8: a number beyond 64 bits");
  EXPECT_EQ(parse_error("prefix(1.5)"), "rule: column 9: expected ')', found '.'");
  EXPECT_EQ(parse_error("window([1, 2, 3, 4], 0)"), "rule: column 17: more than 3 numbers for the dimensions");
  EXPECT_EQ(parse_error("window([], 0)"), "rule: column 9: expected a number, found ']'");
  EXPECT_EQ(parse_error("window(left, 0)"), "rule: column 8: expected a number, true or false, found 'left'");
  EXPECT_EQ(parse_error("causal() \n\x01"),
            "rule: column 11: expected & | or the end, found a character that is not printable ASCII");
  EXPECT_EQ(parse_error("dense(1)"), "rule: column 1: dense takes a table, which needs a name and an array for it");
  EXPECT_EQ(parse_error("tiles(4, 2)"), "rule: column 1: tiles: kernel 2, expected an odd number");
}

TEST(Text, HostileLengthsEndInAnError) {
  const std::string deep = "rule: column 65: more than 64 levels of parentheses and ~";
  EXPECT_EQ(parse_error(std::string(1000000, '(')), deep);
  EXPECT_EQ(parse_error(std::string(1000000, '~')), deep);
  std::string names = "local(";
  for (int i = 0; i < 200000; ++i) names += "a=";
  EXPECT_EQ(parse_error(names), "rule: column 9: expected a number, true or false, found 'a'");
  std::string parts = "full()";
  for (int i = 0; i < 100000; ++i) parts += "&full()";
  EXPECT_EQ(parse_error(parts), "rule: 1025 parts, at most 32");
  const std::string name(100000, 'x'), start(40, 'x');
  EXPECT_EQ(parse_error("local(" + name + "=1)"), "rule: column 100008: local: no argument '" + start + "...'");
  EXPECT_EQ(parse_error(name + "()"), "rule: column 1: no rule '" + start + "...'");
}

TEST(Text, IsShownInOneLine) {
  EXPECT_EQ(shown("a 'word'~"), "a 'word'~");
  EXPECT_EQ(shown(std::string_view("end\0\n\x7f\xc3\xa4", 7)), "end\\x00\\x0a\\x7f\\xc3");
  EXPECT_EQ(shown(std::string(40, '\n')).size(), 160u);
  EXPECT_EQ(shown("abcd", 3), "abc...");
}

TEST(Text, TablesByName) {
  std::int64_t ids[6] = {};
  std::uint8_t bits[6] = {};
  const auto table_of = [&](const std::string& name) {
    if (name == "ids") return TensorView(ids, ElementType::int64, {6});
    if (name == "map") return TensorView(bits, ElementType::uint8, {2, 3});
    throw Error(Error::Kind::value, "no tensor " + name);
  };
  const auto parsed = [&](std::string_view text) { return parse_rule(text, table_of).text(); };
  EXPECT_EQ(parsed("documents(ids, ids_k=ids) & causal()"), "documents((6), (6)) & causal()");
  EXPECT_EQ(parsed("documents_packed(ids, ids)"), "documents_packed((6), (6))");
  EXPECT_EQ(parsed("blocks(map, block_k=8, block_q=4) | ~dense(map)"), "blocks((2, 3), 4, 8) | ~dense((2, 3))");
  const auto error = [&](std::string_view text) { return error_of([&] { parsed(text); }); };
  EXPECT_EQ(error("dense(nothing)"), "no tensor nothing");
  EXPECT_EQ(error("dense(4)"), "rule: column 7: dense: argument 'mask' takes a table's name");
  EXPECT_EQ(error("local(ids)"), "rule: column 7: local: argument 'window' takes a number, found 'ids'");
  EXPECT_EQ(error_of([&] { parsed("causal() & dense(ids)"); }, Error::Kind::type),
            "rule: column 12: dense: mask type int64, expected boolean or uint8");
}

// Any text is a rule or an Error: cut, doubled and changed pieces of rules.
TEST(Text, AnyTextIsARuleOrAnError) {
  Maker make(22);
  int rules = 0;
  for (int n = repeats(100000); n > 0; --n) {
    const auto shapes = make.shapes(int(make.between(1, 3)), 50);
    auto text = make.tree(2, shapes, Maker::without_tables, full()).text();
    for (auto changes = make.between(1, 3); changes > 0 && !text.empty(); --changes) {
      const auto at = std::size_t(make.between(0, std::int64_t(text.size()) - 1));
      if (make.chance(30)) {
        text.erase(at, std::size_t(make.between(1, 5)));
      } else {
        text[at] = "()[],=~&| 0-atx\0\xff"[make.between(0, 16)];
      }
    }
    try {
      const auto rule = parse_rule(text);
      ASSERT_EQ(parse_rule(rule.text()).text(), rule.text());
      ++rules;
    } catch (const Error& error) {
      ASSERT_EQ(std::string(error.what()).rfind("rule: column ", 0), 0u) << error.what();
    }
  }
  EXPECT_GT(rules, 0);
}

TEST(Builders, CheckTheirNumbers) {
  EXPECT_EQ(error_of([] { local(0); }), "rule local: window 0, expected at least 1");
  EXPECT_EQ(error_of([] { local(1, -1); }), "rule local: log2_stride -1, expected at least 0");
  EXPECT_EQ(error_of([] { local(1, 31); }), "rule local: log2_stride 31, expected at most 30");
  EXPECT_EQ(error_of([] { prefix(-1); }), "rule prefix: n -1, expected at least 0");
  EXPECT_EQ(error_of([] { sink(-5); }), "rule sink: n -5, expected at least 0");
  EXPECT_EQ(error_of([] { tiles(0, 1); }), "rule tiles: shape 0, expected at least 1");
  EXPECT_EQ(error_of([] { tiles({4, 4}, {3, 4}); }), "rule tiles: kernel 4, expected an odd number");
  EXPECT_EQ(error_of([] { neighbourhood({3, 0}); }), "rule neighbourhood: kernel 0, expected at least 1");
  EXPECT_EQ(error_of([] { neighbourhood(3, 0); }), "rule neighbourhood: dilation 0, expected at least 1");
  EXPECT_EQ(error_of([] { neighbourhood(3, 1, 2); }), "rule neighbourhood: causal 2, expected 0 or 1");
  EXPECT_EQ(error_of([] { window({1, 2, 3, 4}, 0); }), "rule: 4 numbers for the dimensions, expected 1 to 3");
  EXPECT_EQ(error_of([] { window(std::initializer_list<std::int64_t>{}, 0); }),
            "rule: 0 numbers for the dimensions, expected 1 to 3");
}

TEST(Builders, CheckTheirTables) {
  std::int64_t ids[6] = {};
  std::uint8_t bits[6] = {};
  const TensorView good(ids, ElementType::int64, {6}), map(bits, ElementType::uint8, {2, 3}), none;
  const TensorView floats(ids, ElementType::float32, {6}),
      far(ids, ElementType::int64, {6}, Device{DeviceKind::cuda, 0});
  const TensorView flat(bits, ElementType::uint8, {6}), nowhere(nullptr, ElementType::int64, {6});
  EXPECT_EQ(error_of([&] { documents(good, none); }), "rule documents: ids_k not given");
  EXPECT_EQ(error_of([&] { documents(floats, good); }, Error::Kind::type),
            "rule documents: ids_q type float32, expected int32 or int64");
  EXPECT_EQ(error_of([&] { documents(good, far); }, Error::Kind::device),
            "rule documents: ids_k on cuda:0, expected cpu as ids_q");
  EXPECT_EQ(error_of([&] { documents(nowhere, good); }), "rule documents: ids_q data pointer null");
  EXPECT_EQ(error_of([&] { documents(TensorView(ids, ElementType::int64, {1, 2, 3}), good); }),
            "rule documents: ids_q shape (1, 2, 3), expected (queries) or (batch, queries)");
  EXPECT_EQ(error_of([&] { documents_packed(good, TensorView(ids, ElementType::int64, {5})); }),
            "cu_seqlens_k: 5 entries, expected 6 as in cu_seqlens_q");
  EXPECT_EQ(error_of([&] { documents_packed(TensorView(ids, ElementType::int64, {0}), good); }),
            "cu_seqlens_q: shape (0), expected (documents + 1)");
  EXPECT_EQ(error_of([&] { documents_packed(good, none); }), "cu_seqlens_k: not given");
  EXPECT_EQ(error_of([&] { blocks(flat, 1, 1); }),
            "rule blocks: bitmap shape (6), expected (rows, columns), (heads, rows, columns) or (batch, heads, rows, "
            "columns)");
  EXPECT_EQ(error_of([&] { blocks(map, 0, 1); }), "rule blocks: block_q 0, expected at least 1");
  EXPECT_EQ(error_of([&] { blocks(good, 1, 1); }, Error::Kind::type),
            "rule blocks: bitmap type int64, expected boolean or uint8");
  EXPECT_EQ(error_of([&] { dense(flat); }),
            "rule dense: mask shape (6), expected (queries, keys) or (batch, heads, queries, keys)");
}

}  // namespace
}  // namespace anyflash::rules::testing
