// The definitions of the ops for TensorFlow: inputs, outputs, attributes, shapes.
//
// AnyflashAttention1D, 2D       batch... + (channels, sequence...), nothing but query, key and value
// AnyflashAttentionLast         the library's layouts bhsd, bshd and thd, with all options
// AnyflashAttentionBhds         the layout bhds, likewise
// AnyflashAttentionBackward     of all of them
//
// A call's numbers and words are in one attribute, its text (see call.h), because each attribute costs an eager call a
// microsecond. Shape inference sees neither the text nor any number: hence one op per kind of layout.
#include "definitions.h"

#include <initializer_list>

#include "tensors.h"

namespace anyflash::tensorflow {
namespace {

struct DeleteShape {
  void operator()(TF_ShapeHandle* shape) const { TF_DeleteShapeHandle(shape); }
};
using Shape = std::unique_ptr<TF_ShapeHandle, DeleteShape>;

/// The shapes of one op. Unknown shapes stay unknown; errors are found when the kernel runs.
class Shapes {
 public:
  explicit Shapes(TF_ShapeInferenceContext* context) : context_(context) {
    TF_ShapeInferenceContextSetUnknownShape(context_, status_);
  }

  /// Null if there is no such input.
  Shape input(int index) {
    Shape shape(TF_NewShapeHandle());
    Status found;
    TF_ShapeInferenceContextGetInput(context_, index, shape.get(), found);
    return found.ok() ? std::move(shape) : nullptr;
  }

  /// Whether its rank is known to be at least `least`.
  bool has_rank(const Shape& shape, int least) {
    return shape && TF_ShapeInferenceContextRankKnown(context_, shape.get()) &&
           TF_ShapeInferenceContextRank(context_, shape.get()) >= least;
  }

  /// Negative numbers count from the end; end 0 is the end.
  Shape part(const Shape& shape, int first, int end) {
    Shape result(TF_NewShapeHandle());
    const auto rank = TF_ShapeInferenceContextRank(context_, shape.get());
    TF_ShapeInferenceContextSubshape(context_, shape.get(), first < 0 ? rank + first : first,
                                     end <= 0 ? rank + end : end, result.get(), status_);
    return result;
  }

  Shape joined(const Shape& first, const Shape& second) {
    Shape result(TF_NewShapeHandle());
    TF_ShapeInferenceContextConcatenateShapes(context_, first.get(), second.get(), result.get(), status_);
    return result;
  }

  /// False if there is no such output.
  bool set(int index, const Shape& shape) {
    Status set;
    TF_ShapeInferenceContextSetOutput(context_, index, shape.get(), set);
    return set.ok();
  }

 private:
  TF_ShapeInferenceContext* context_;
  Status status_;
};

/// out, with the value's channels, and statistics, with the query's shape without channels. channel: the axis, from the
/// end if negative.
template <int channel, bool has_rows>
void forward_shapes(TF_ShapeInferenceContext* context, TF_Status*) {
  constexpr int least = channel < 0 ? -channel : channel + 1;
  Shapes shapes(context);
  const auto q = shapes.input(0), v = shapes.input(2);
  if (!shapes.has_rank(q, least)) return;
  const auto with_sequence = [&](Shape shape) {
    return channel == -1 ? std::move(shape) : shapes.joined(shape, shapes.part(q, channel + 1, 0));
  };
  if (has_rows) {
    const auto rows = with_sequence(shapes.part(q, 0, channel));
    for (int i = 1; shapes.set(i, rows); ++i) {
    }
  }
  if (!shapes.has_rank(v, least)) return;
  shapes.set(0, with_sequence(shapes.joined(shapes.part(q, 0, channel), shapes.part(v, channel, channel + 1))));
}

/// Gradients have the shapes of the first inputs, in the same order.
void backward_shapes(TF_ShapeInferenceContext* context, TF_Status*) {
  Shapes shapes(context);
  for (int i = 0;; ++i) {
    const auto shape = shapes.input(i);
    if (!shape || !shapes.set(i, shape)) return;
  }
}

using Specs = std::initializer_list<const char*>;
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

constexpr Specs common = {"T: {half, bfloat16, float, double}", "S: {float, double} = DT_FLOAT", "call: string"};
constexpr Specs extra_types = {"term_types: list({half, bfloat16, float, double}) >= 0 = []",
                               "slope_types: list({half, bfloat16, float, double}) >= 0 = []",
                               "table_types: list({bool, uint8, int32, int64}) >= 0 = []"};
constexpr Specs tensors = {"query: T", "key: T", "value: T"};
constexpr Specs extras = {"terms: term_types", "slopes: slope_types", "tables: table_types"};

class Definition {
 public:
  Definition(const char* name, InferShapes shapes) : builder_(TF_NewOpDefinitionBuilder(name)) {
    TF_OpDefinitionBuilderSetShapeInferenceFunction(builder_, shapes);
  }
  Definition& attributes(Specs specs) {
    for (const auto* spec : specs) TF_OpDefinitionBuilderAddAttr(builder_, spec);
    return *this;
  }
  Definition& inputs(Specs specs) {
    for (const auto* spec : specs) TF_OpDefinitionBuilderAddInput(builder_, spec);
    return *this;
  }
  Definition& outputs(Specs specs) {
    for (const auto* spec : specs) TF_OpDefinitionBuilderAddOutput(builder_, spec);
    return *this;
  }
  void add() {
    Status status;
    TF_RegisterOpDefinition(builder_, status);
    status.check("registering an op");
  }

 private:
  TF_OpDefinitionBuilder* builder_;
};

/// `rows` has no default: saved models leave out attributes that have the default, and then count no outputs.
void define_forward(const ForwardOp& op, InferShapes shapes) {
  Definition definition(op.name, shapes);
  definition.attributes(common).attributes({"rows: int >= 0"}).inputs(tensors);
  if (op.has_extras) definition.attributes(extra_types).inputs(extras);
  definition.outputs({"out: T", "statistics: rows * S"}).add();
}

}  // namespace

void define_ops() {
  define_forward(forward_ops[0], &forward_shapes<-2, true>);
  define_forward(forward_ops[1], &forward_shapes<-3, true>);
  define_forward(forward_ops[2], &forward_shapes<-1, false>);
  define_forward(forward_ops[3], &forward_shapes<2, false>);
  Definition(backward_op, &backward_shapes)
      .attributes(common)
      .attributes(extra_types)
      .attributes({"dlse_given: int >= 0 = 0"})
      .inputs(tensors)
      .inputs(extras)
      .inputs({"dout: T", "out: T", "lse: S", "dlse: dlse_given * S"})
      .outputs({"dquery: T", "dkey: T", "dvalue: T", "dterms: term_types"})
      .add();
}

}  // namespace anyflash::tensorflow
