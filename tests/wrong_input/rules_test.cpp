// Malformed rules: those that cannot be built, those that do not fit a call, plans for other calls, DLPack, explain.
#include <dlpack/dlpack.h>

#include <anyflash/dlpack.h>

#include <array>

#include "call.h"

namespace anyflash::wrong_input {
namespace {

using Kind = Error::Kind;

struct Statement {
  Kind kind;
  const char* line;
  std::function<void()> run;
};

void expect_errors(const std::vector<Statement>& statements) {
  for (const auto& wrong : statements) {
    SCOPED_TRACE(wrong.line);
    try {
      wrong.run();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), wrong.line);
      EXPECT_EQ(int(error.kind()), int(wrong.kind));
    } catch (const std::exception& other) {
      ADD_FAILURE() << "not an anyflash::Error: " << other.what();
    }
  }
}

TEST(WrongInputRules, CannotBeBuilt) {
  Call c;
  const auto floats = c.input({8});
  const auto ids = c.integers({0, 0, 1, 1});
  const auto bits = c.input({2, 2}, ElementType::boolean);
  auto elsewhere = ids, nowhere = bits;
  elsewhere.device.kind = DeviceKind::cuda;
  nowhere.data = nullptr;
  PerDimension four = 1, none = 1;  // counts that no constructor makes
  four.count = 4, none.count = 0;
  auto endless = bits;
  endless.rank = 1 << 20;
  expect_errors({
      {Kind::value, "rule local: window 0, expected at least 1", [] { local(0); }},
      {Kind::value, "rule local: log2_stride -1, expected at least 0", [] { local(4, -1); }},
      {Kind::value, "rule local: log2_stride 31, expected at most 30", [] { local(4, 31); }},
      {Kind::value, "rule prefix: n -1, expected at least 0", [] { prefix(-1); }},
      {Kind::value, "rule prefix_queries: n -1, expected at least 0", [] { prefix_queries(-1); }},
      {Kind::value, "rule sink: n -2, expected at least 0", [] { sink(-2); }},
      {Kind::value, "rule tiles: kernel 4, expected an odd number", [] { tiles(8, 4); }},
      {Kind::value, "rule tiles: shape 0, expected at least 1", [] { tiles(0, 3); }},
      {Kind::value, "rule neighbourhood: kernel 0, expected at least 1", [] { neighbourhood(0); }},
      {Kind::value, "rule neighbourhood: dilation 0, expected at least 1", [] { neighbourhood(3, {1, 0}); }},
      {Kind::value, "rule neighbourhood: causal 2, expected 0 or 1", [] { neighbourhood(3, 1, 2); }},
      {Kind::value, "rule window: right of 4 numbers, expected 1 to 3", [=] { window(1, four); }},
      {Kind::value, "rule tiles: shape of 4 numbers, expected 1 to 3", [=] { tiles(four, 3); }},
      {Kind::value, "rule neighbourhood: dilation of 0 numbers, expected 1 to 3", [=] { neighbourhood(3, none); }},
      {Kind::value, "rule neighbourhood: causal of 4 numbers, expected 1 to 3", [=] { neighbourhood(3, 1, four); }},
      {Kind::value, "rule: null", [] { Rule(std::shared_ptr<const rules::Node>()); }},
      {Kind::value, "plan: null", [] { Plan(std::shared_ptr<const detail::PlanPair>()); }},
      {Kind::value, "rule blocks: block_q 0, expected at least 1", [&] { blocks(bits, 0, 4); }},
      {Kind::type, "rule blocks: bitmap type float32, expected boolean or uint8", [&] { blocks(floats, 4, 4); }},
      {Kind::device, "rule documents: ids_k on cuda:0, expected cpu as ids_q", [&] { documents(ids, elsewhere); }},
      {Kind::device, "cu_seqlens_k: on cuda:0, expected cpu as cu_seqlens_q",
       [&] { documents_packed(ids, elsewhere); }},
      {Kind::value, "rule dense: mask data pointer null", [&] { dense(nowhere); }},
      {Kind::value, "rule dense: mask not given", [] { dense({}); }},
      {Kind::value, "rule dense: mask rank 1048576, expected at most 8", [&] { dense(endless); }},
      {Kind::type, "rule documents: ids_q type float32, expected int32 or int64", [&] { documents(floats, ids); }},
      {Kind::value, "rule documents: ids_k not given", [&] { documents(ids, {}); }},
      {Kind::value, "cu_seqlens_k: 2 entries, expected 4 as in cu_seqlens_q",
       [&] {
         Call other;
         documents_packed(ids, other.integers({0, 4}));
       }},
  });
}

TEST(WrongInputRules, DoNotFitWhatIsExplained) {
  expect_errors({
      {Kind::value, "k_shape: (16), expected 2 sizes as in q_shape", [] { explain(causal(), {4, 4}, {16}); }},
      {Kind::value, "k_shape: (4, 4, 4), expected 1 sizes as in q_shape", [] { picture(causal(), {4}, {4, 4, 4}); }},
      {Kind::value, "q_shape: (1, 2, 3, 4), expected 1 to 3 sizes", [] { explain(causal(), {1, 2, 3, 4}, {16}); }},
      {Kind::value, "rule window: 2 numbers, expected 1 as the sequence's dimensions",
       [] { pattern(window({1, 2}, 1), {4}, {4}); }},
      {Kind::value, "rule neighbourhood: 2 numbers, expected 1 or 3 as the sequence's dimensions",
       [] { explain(neighbourhood(3, {2, 3}) & neighbourhood(5, {2, 3}), {4, 4, 4}, {4, 4, 4}); }},
  });
}

void rule(Call& c, Rule rule) { c.options.rule = std::move(rule); }

TEST(WrongInputRules, TablesDoNotFitTheCall) {
  wrong_input::expect_errors(
      {
          {Kind::value, "rule dense: mask has 11 columns, expected 12 (or 1) as the keys",
           [](Call& c) { rule(c, dense(c.input({8, 11}, ElementType::boolean))); }},
          {Kind::value, "rule dense: mask has 3 batch entries, expected 2 (or 1) as in query",
           [](Call& c) { rule(c, dense(c.input({3, 4, 8, 12}, ElementType::boolean))); }},
          {Kind::value, "rule blocks: bitmap has 2 columns, expected 3 for the keys",
           [](Call& c) { rule(c, blocks(c.input({2, 2}, ElementType::uint8), 4, 4)); }},
          {Kind::value, "rule documents: ids_q has 3 entries, expected 8 as the queries",
           [](Call& c) { rule(c, documents(c.integers({0, 0, 1}), c.integers({0, 1}))); }},
          {Kind::value, "cu_seqlens_q: ends at 7, expected 8 as the queries",
           [](Call& c) { rule(c, documents_packed(c.integers({0, 7}), c.integers({0, 12}))); }},
          {Kind::value, "cu_seqlens_q: falls from 9 to 8 at entry 2, expected no fall",
           [](Call& c) { rule(c, documents_packed(c.integers({0, 9, 8}), c.integers({0, 6, 12}))); }},
          {Kind::value, "cu_seqlens_q: starts at 1, expected 0",
           [](Call& c) { rule(c, documents_packed(c.integers({1, 8}), c.integers({0, 12}))); }},
      },
      &Call::forward);
}

TEST(WrongInputRules, DoNotFitTheCall) {
  wrong_input::expect_errors(
      {
          {Kind::value, "rule window: 2 numbers, expected 1 as the sequence's dimensions",
           [](Call& c) { rule(c, window({1, 2}, {1, 2})); }},
          {Kind::value, "rule tiles: 3 numbers, expected 1 as the sequence's dimensions",
           [](Call& c) { rule(c, tiles({1, 2, 2}, 3)); }},
          {Kind::value, "rule: two tables of documents, at most one",
           [](Call& c) {
             const auto q = c.integers({0, 0, 0, 0, 0, 0, 0, 0}), k = c.integers({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
             rule(c, documents(q, k) | documents(k, q));
           }},
          {Kind::value, "rule: 39 parts, at most 32",
           [](Call& c) {
             Rule many = local(1);
             for (int i = 2; i < 40; ++i) many = many | local(i);
             rule(c, many);
           }},
          {Kind::value, "cu_seqlens_q: ends at 9, expected 8 as the queries",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_q = c.integers({0, 3, 9}); }},
          {Kind::value, "cu_seqlens_k: falls from 13 to 12 at entry 2, expected no fall",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_k = c.integers({0, 13, 12}, ElementType::int64); }},
          {Kind::value,
           "a table of the rule: strides (4611686018427387904, 1), expected elements within the address space",
           [](Call& c) {
             auto mask = c.input({8, 12}, ElementType::uint8);
             mask.strides[0] = std::int64_t{1} << 62;
             rule(c, dense(mask));
           }},
          // No program is compiled for calls without pairs; they are checked all the same.
          {Kind::value, "rule window: 2 numbers, expected 1 as the sequence's dimensions",
           [](Call& c) {
             c.k = c.input({2, 2, 0, 16}), c.v = c.input({2, 2, 0, 24});
             rule(c, window({1, 2}, {1, 2}));
           }},
      },
      &Call::forward);
}

TEST(WrongInputRules, Text) {
  expect_errors({
      {Kind::value, "rule: column 1: expected a rule, found the end", [] { parse_rule(""); }},
      {Kind::value, "rule: column 7: expected '(', found the end", [] { parse_rule("causal"); }},
      {Kind::value, "rule: column 11: expected a rule, found the end", [] { parse_rule("causal() &"); }},
      {Kind::value, "rule: column 1: local: window 0, expected at least 1", [] { parse_rule("local(0)"); }},
      {Kind::value, "rule: column 7: a number beyond 64 bits", [] { parse_rule("local(99999999999999999999)"); }},
      {Kind::value, "rule: column 1: no rule 'circular'", [] { parse_rule("circular(3)"); }},
      {Kind::value, "rule: column 65: more than 64 levels of parentheses and ~",
       [] { parse_rule(std::string(100000, '(')); }},
  });
}

TEST(WrongInputPlan, MadeForAnotherCall) {
  const auto plan_before = [](Call& c) { c.options.plan = &c.plan.emplace(plan(c.q, c.k, c.v, c.options)); };
  wrong_input::expect_errors(
      {
          {Kind::value, "plan: made for 128 queries, the call has 8",
           [](Call& c) {
             const TensorView longer(nullptr, ElementType::float32, {2, 4, 128, 16});
             c.options.plan = &c.plan.emplace(plan(longer, c.k, c.v, c.options));
           }},
          {Kind::value, "plan: made for 13 keys, the call has 12",
           [](Call& c) {
             const TensorView k(nullptr, ElementType::float32, {2, 2, 13, 16}),
                 v(nullptr, ElementType::float32, {2, 2, 13, 24});
             c.options.plan = &c.plan.emplace(plan(c.q, k, v, c.options));
           }},
          {Kind::value, "plan: made for float64, the call has float32",
           [](Call& c) {
             auto q = c.q, k = c.k, v = c.v;
             q.type = k.type = v.type = ElementType::float64;
             c.options.plan = &c.plan.emplace(plan(q, k, v, c.options));
           }},
          {Kind::value, "plan: made for rule full(), the call has causal()",
           [=](Call& c) { plan_before(c), c.options.rule = causal(); }},
          {Kind::value, "plan: made for another alignment than the call has",
           [=](Call& c) { plan_before(c), c.options.align = Align::none_end; }},
          {Kind::value, "plan: made for other key_lengths than the call has",
           [=](Call& c) {
             c.options.key_lengths = c.integers({12, 5});
             plan_before(c);
             static_cast<std::int32_t*>(c.options.key_lengths.data)[1] = 6;
           }},
          {Kind::value, "plan: made for other cu_seqlens_q than the call has",
           [=](Call& c) { c.use_layout_thd(), plan_before(c), c.options.cu_seqlens_q = c.integers({0, 4, 8}); }},
          {Kind::value, "plan: made for another rule dense((8, 12)), expected the rule object that it was made with",
           [=](Call& c) {
             c.options.rule = dense(c.input({8, 12}, ElementType::boolean));
             plan_before(c);
             c.options.rule = dense(c.input({8, 12}, ElementType::boolean));
           }},
          {Kind::value, "plan: made before a table of rule documents((8), (12)) & causal() was changed",
           [=](Call& c) {
             const auto ids = c.integers({0, 0, 1, 1, 1, 0, 2, 2});
             const auto keys = c.integers({0, 0, 1, 1, 1, 0, 2, 2, 0, 0, 0, 0}, ElementType::int64);
             c.options.rule = documents(ids, keys) & causal();
             plan_before(c);
             static_cast<std::int64_t*>(keys.data)[11] = 1;
           }},
          {Kind::value, "plan: made before a table of rule blocks((2, 3), 4, 4) was changed",
           [=](Call& c) {
             const auto map = c.input({2, 3}, ElementType::boolean);
             c.options.rule = blocks(map, 4, 4);
             plan_before(c);
             static_cast<std::uint8_t*>(map.data)[0] = 1;
           }},
          {Kind::value, "plan: made for 4 x 2 queries, the call has 2 x 4",
           [](Call& c) {
             c.use_two_dimensions();
             c.options.plan = &c.plan.emplace(plan(c.input({2, 4, 4, 2, 16}), c.k, c.v, c.options));
           }},
      },
      &Call::forward);
}

TEST(WrongInputPlan, FitsItsOwnCall) {
  Call c;
  c.options.rule = causal() & local(4);
  const auto made = plan(c.q, c.k, c.v, c.options);
  c.options.plan = &made;
  c.options.rule = local(4) & causal();
  c.options.rule = causal() & local(4);  // another object that means the same
  EXPECT_NO_THROW(c.forward());
  EXPECT_NO_THROW(c.backward());
}

// A given plan is compared with the tables; those that hold the same still fit.
TEST(WrongInputPlan, FitsTablesThatHoldTheSame) {
  Call c;
  auto map = c.input({2, 3}, ElementType::uint8);
  auto* const entry = static_cast<std::uint8_t*>(map.data) + 4;
  *entry = 1;
  const auto ids = c.integers({0, 0, 1, 1, 1, 0, 2, 2});
  c.options.rule = blocks(map, 4, 4) & documents(ids, c.input({12}, ElementType::int32));
  const auto made = plan(c.q, c.k, c.v, c.options);
  c.options.plan = &made;
  *entry = 255;  // as true as before
  EXPECT_NO_THROW(c.forward());
}

TEST(Values, MovedFromAreStillThere) {
  Call c;
  Rule rule = causal();
  const Rule taken = std::move(rule);
  Rule assigned;
  assigned = std::move(rule);
  EXPECT_EQ(rule.text(), "causal()");  // NOLINT: it is what is shown
  EXPECT_EQ(((rule & ~rule) | taken).text(), "causal() & ~causal() | causal()");
  EXPECT_EQ(assigned.text(), "causal()");
  c.options.rule = rule;
  auto made = plan(c.q, c.k, c.v, c.options);
  const Plan kept = std::move(made);
  c.options.plan = &made;
  EXPECT_NO_THROW(c.forward());
  c.options.plan = &kept;
  EXPECT_NO_THROW(c.backward());
  const Options options = std::move(c.options);
  EXPECT_EQ(options.rule.text(), "causal()");
  EXPECT_EQ(c.options.rule.text(), "causal()");
}

TEST(WrongInputPlan, WrongShapes) {
  wrong_input::expect_errors(
      {
          {Kind::value, "query: not given", [](Call& c) { c.q = {}; }},
          {Kind::value, "key: head size 8, expected 16 as in query", [](Call& c) { c.k = c.input({2, 2, 12, 8}); }},
          {Kind::device, "key: on cuda:0, expected cpu", [](Call& c) { c.k.device.kind = DeviceKind::cuda; }},
          {Kind::value, "key_lengths: 40 for batch entry 0, expected 0 to 12",
           [](Call& c) { c.options.key_lengths = c.integers({40, 1}); }},
          {Kind::value, "threads: -4, expected 0 (all) to 65536", [](Call& c) { c.options.threads = -4; }},
      },
      &Call::make_plan);
}

TEST(WrongInputTensor, Views) {
  float data[4];
  expect_errors({
      {Kind::value, "tensor: rank 9, expected at most 8",
       [&] { TensorView(data, ElementType::float32, {1, 1, 1, 1, 1, 1, 1, 1, 1}); }},
      {Kind::value, "tensor: 1 strides, expected 2 as in its shape",
       [&] { TensorView(data, ElementType::float32, {2, 2}, {2}); }},
      {Kind::value, "tensor: a shape of more than 2^63 elements",
       [&] { TensorView(data, ElementType::float32, {1L << 32, 1L << 32, 2}); }},
  });
}

/// A contiguous float32 DLTensor of shape (2, 2).
struct Exchanged {
  std::array<float, 4> data{1, 2, 3, 4};
  std::array<std::int64_t, 16> shape{2, 2}, strides{2, 1};
  DLTensor tensor{};
  Exchanged() {
    tensor.data = data.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 2;
    tensor.dtype = {kDLFloat, 32, 1};
    tensor.shape = shape.data();
  }
};

TEST(WrongInputDlpack, Refused) {
  const auto with = [](void (*spoil)(DLTensor&)) {
    return [spoil] {
      Exchanged given;
      spoil(given.tensor);
      from_dlpack(given.tensor, "key");
    };
  };
  expect_errors({
      {Kind::type, "key: DLPack type of 4 lanes, expected 1", with([](DLTensor& t) { t.dtype.lanes = 4; })},
      {Kind::type, "key: DLPack type of 0 lanes, expected 1", with([](DLTensor& t) { t.dtype.lanes = 0; })},
      {Kind::type, "key: DLPack type code 5 of 64 bits, expected a type of anyflash::ElementType",
       with([](DLTensor& t) { t.dtype = {kDLComplex, 64, 1}; })},
      {Kind::type, "key: DLPack type code 2 of 8 bits, expected a type of anyflash::ElementType",
       with([](DLTensor& t) { t.dtype.bits = 8; })},
      {Kind::type, "key: DLPack type code 0 of 16 bits, expected a type of anyflash::ElementType",
       with([](DLTensor& t) { t.dtype = {kDLInt, 16, 1}; })},
      {Kind::device, "key: DLPack device type 8, expected the cpu or cuda",
       with([](DLTensor& t) { t.device.device_type = kDLMetal; })},
      {Kind::value, "key: rank 9, expected 0 to 8", with([](DLTensor& t) { t.ndim = 9; })},
      {Kind::value, "key: rank -1, expected 0 to 8", with([](DLTensor& t) { t.ndim = -1; })},
      {Kind::value, "key: DLPack shape pointer null", with([](DLTensor& t) { t.shape = nullptr; })},
      {Kind::value, "tensor: a shape of more than 2^63 elements",
       with([](DLTensor& t) { t.shape[0] = t.shape[1] = std::int64_t{1} << 40; })},
      {Kind::value, "tensor: not given, expected one to describe in DLPack",
       [] {
         TensorView none;
         DLTensor tensor;
         to_dlpack(none, tensor);
       }},
  });
}

TEST(Dlpack, ThereAndBack) {
  Exchanged given;
  given.tensor.byte_offset = 4;
  auto view = from_dlpack(given.tensor);
  EXPECT_EQ(view.data, given.data.data() + 1);
  EXPECT_EQ(view.strides[0], 2);
  EXPECT_EQ(view.strides[1], 1);
  given.tensor.strides = given.strides.data();
  given.strides = {1, 2};
  EXPECT_EQ(from_dlpack(given.tensor).strides[1], 2);

  const ElementType types[] = {ElementType::float16, ElementType::bfloat16, ElementType::float32, ElementType::float64,
                               ElementType::boolean, ElementType::uint8,    ElementType::int32,   ElementType::int64};
  for (const auto type : types) {
    view.type = type;
    DLTensor described;
    to_dlpack(view, described);
    const auto back = from_dlpack(described);
    EXPECT_EQ(back.type, type);
    EXPECT_EQ(back.data, view.data);
    EXPECT_EQ(back.rank, 2);
    EXPECT_EQ(back.shape, view.shape);
    EXPECT_EQ(back.strides, view.strides);
    EXPECT_EQ(described.dtype.bits, 8 * element_size(type));
  }
  view.device = {DeviceKind::cuda, 3};
  DLTensor described;
  to_dlpack(view, described);
  EXPECT_EQ(described.device.device_type, kDLCUDA);
  EXPECT_EQ(from_dlpack(described).device, view.device);
}

}  // namespace
}  // namespace anyflash::wrong_input
