// A call, in the library's own terms, from an op's text and inputs. The text, for example
//
//     rule=documents(ids, ids) & causal(); align=none_end; layout=bhsd; names=bias @ids; softcap=30.0
//
// has `rule` and the scalar options as anyflash.attention;
//     names       of terms (bias, sink), slopes and tables in the order of these inputs; of a rule's tables with @
//     dimensions  of a sequence, in place of a layout: whatever stands before the channels is the batch
//     sharpening  a factor of the scale
//     returns     for the Python side, which made the op: not read here
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "tensors.h"

namespace anyflash::tensorflow {

/// Parsed once. Immutable: calls of one kernel may run at the same time.
struct Text {
  explicit Text(const std::string& text);  ///< throws Error

  Options options;  ///< without tensors, and without a rule that has tables
  std::string rule;
  bool has_tables = false;
  std::vector<std::string> names;
  int dimensions = 0;  ///< 0: there is a layout
  double sharpening = 1;
};

/// The tensors of a call. Without a layout, the library sees each as one batch with one head.
class Call {
 public:
  Call(const Text& text, Context& context);

  TensorView q, k, v;
  std::array<Shaped, 3> given;  ///< the same as TensorFlow has them
  Options options;
  struct Term {
    std::string name;
    TensorView view;
  };
  std::vector<Term> terms;  ///< bias and sink, in the order of the inputs

  /// A tensor shaped as `out`: the library's view of it.
  TensorView like_out(const Shaped& tensor, const char* name) const;
  /// The shapes of out and of statistics, as TensorFlow sees them.
  std::vector<std::int64_t> shape_of_out(const ResultShapes& shapes) const;
  std::vector<std::int64_t> shape_of_rows(const ResultShapes& shapes) const;

 private:
  void read_extras(Context& context);
  void read_rule(const std::map<std::string, TensorView>& tables);
  TensorView flattened(const Shaped& tensor, const char* name) const;

  const Text& text_;
};

}  // namespace anyflash::tensorflow
