// Rule -> Program: numbers brought to the sequence's dimensions and to 32 bits, `~` pushed down to the parts, constant
// parts folded away, tables looked up.
#include "rules/compile.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "problem/tensor.h"
#include "rules/documents.h"
#include "rules/node.h"
#include "rules/part.h"
#include "rules/ranges.h"

namespace anyflash::rules {
namespace {

constexpr std::int64_t int32_max = std::numeric_limits<std::int32_t>::max();

/// Clamps to 32 bits. Larger numbers have the same meaning: no coordinate, nor a difference of two, is larger.
std::int32_t narrow(std::int64_t n) { return std::int32_t(std::min(n, int32_max)); }

/// A rule's tree with `~` only at the leaves, and leaves ready for the program.
struct Part {
  enum class Kind : std::uint8_t { nothing, everything, atom, both, either } kind;
  Atom atom{};
  std::unique_ptr<Part> left, right;
  int stack = 1;  // values on the stack during its evaluation
};
using Tree = std::unique_ptr<Part>;

Tree constant(bool everything) {
  return std::make_unique<Part>(Part{everything ? Part::Kind::everything : Part::Kind::nothing, {}, {}, {}, 1});
}

class Compiler {
 public:
  Compiler(const Shapes& shapes, std::int64_t batch_index, std::int64_t head_index, Tables& tables,
           std::int64_t key_length, bool late)
      : shapes_(shapes), batch_(batch_index), head_(head_index), keys_(key_length), late_(late), tables_(tables) {}

  Program run(const Rule& rule) {
    program_.dimensions = shapes_.dimensions;
    own_q_ = shapes_.q_size;
    own_k_ = shapes_.k_size;
    if (keys_ >= 0) own_k_[2] = std::int32_t(keys_);
    const bool in_pieces = rule.node().kind == NodeKind::part;
    if (in_pieces) find_whole(rule.node());
    k_size_ = shapes_.k_size;
    if (keys_ >= 0) k_size_[2] = std::int32_t(keys_);
    for (int i = 0; i < 3; ++i) program_.axis[i] = axis_of(shapes_.q_size[i], k_size_[i], shapes_.align);
    const auto& root = in_pieces ? *rule.node().left : rule.node();
    find_documents(root);
    if (in_pieces) cut_frame();
    auto tree = part_of(root, false);
    if (tree->kind == Part::Kind::nothing) {
      tree->kind = Part::Kind::atom;
      tree->atom = {AtomKind::full, true, 0, {}, {}, nullptr, 0, 0};
    }
    program_.conjunction = conjunction(*tree);
    program_.documents_required = tree->kind != Part::Kind::everything && documents_required(*tree);
    program_.rule_restarts = program_.restarts && by_coordinates(*tree);
    if (program_.conjunction) {
      emit_conjunction(*tree);
    } else {
      emit(*tree);
    }
    return program_;
  }

 private:
  /// Turns to the shapes of the whole that the call has pieces of.
  void find_whole(const Node& part) {
    const auto& whole = *part.whole;
    const auto own_keys = own_k_[outermost(shapes_.dimensions)];
    const bool shortened = part.table_k.given() && keys_ >= 0;  // boxes are chosen for all keys
    if (shortened && own_keys != count_before(whole.k, integer_at(part.table_k, batch_))) {
      throw Error(Error::Kind::value, "key_lengths: " + std::to_string(own_keys) + " of the call's keys, expected " +
                                          std::to_string(count_before(whole.k, integer_at(part.table_k, batch_))) +
                                          " as in the rule's part");
    }
    whole_ = &whole;
    keys_ = shortened ? integer_at(part.table_k, batch_) : -1;
    q_pieces_ = flat_pieces(whole.q, whole.q_shape, count_of(whole.q));
    k_pieces_ = flat_pieces(whole.k, whole.k_shape, own_keys);
    shapes_ = whole_shapes(whole, shapes_);
  }

  /// From the frame of the whole to the pieces' entries in it: one piece a side is an offset, several are segments of
  /// one document.
  void cut_frame() {
    const auto o = outermost(shapes_.dimensions);
    const auto whole = program_.axis[o];
    for (int i = 0; i < 3; ++i) program_.axis[i].q_size = own_q_[i], program_.axis[i].k_size = own_k_[i];
    const auto first = [](const Pieces& pieces) { return pieces.empty() ? 0 : std::int32_t(pieces.front().first); };
    program_.axis[o].q_offset = std::int32_t(whole.query(first(whole_->q)));
    program_.axis[o].k_offset = std::int32_t(whole.key(first(whole_->k)));
    program_.pieces = q_pieces_.size() > 1 || k_pieces_.size() > 1;
    if (!program_.pieces || program_.has_documents) return;
    program_.has_documents = program_.restarts = true;
    tables_.documents.push_back(std::make_unique<DocumentTable>(document_of_pieces({&q_pieces_, &k_pieces_}, whole)));
    const auto& table = *tables_.documents.back();
    program_.documents = table.view();
  }

  void find_documents(const Node& node) {
    if (node.left) find_documents(*node.left);
    if (node.right) find_documents(*node.right);
    if (node.kind != NodeKind::documents && node.kind != NodeKind::documents_packed) return;
    program_.has_documents = true;
    program_.restarts = shapes_.dimensions == 1;
    check_place(node.table_q);
    if (node.table_q.device.kind != DeviceKind::cpu) {
      if (node.kind != NodeKind::documents) return;
      program_.document_ids[0] = row_of(node.table_q).data, program_.document_ids[1] = row_of(node.table_k).data;
      return;
    }
    const auto& table = document_table(node);
    program_.documents = table.view();
  }

  void check_place(const TensorView& table) const {
    if (late_ || table.device.kind == DeviceKind::cpu) return;
    throw Error(Error::Kind::device, "rule: a table on " + device_name(table.device) + ", expected cpu");
  }

  const DocumentTable& document_table(const Node& node) {
    const auto queries = volume(shapes_.q_size), keys = volume(k_size_), own_keys = volume(own_k_);
    const auto q = row_of(node.table_q), k = row_of(node.table_k);
    for (const auto& table : tables_.documents) {
      if (table->made_of_q == q.data && table->made_of_k == k.data && table->keys == keys &&
          table->own_keys == own_keys) {
        return *table;
      }
    }
    const auto own = whole_ ? OwnPieces{&q_pieces_, &k_pieces_} : OwnPieces{};
    auto table = node.kind == NodeKind::documents ? documents_of_ids(q, k, queries, keys, shapes_.align, own)
                                                  : documents_of_lengths(q, k, keys, shapes_.align, own);
    table.made_of_q = q.data;
    table.made_of_k = k.data;
    table.keys = keys;
    table.own_keys = own_keys;
    tables_.documents.push_back(std::make_unique<DocumentTable>(std::move(table)));
    return *tables_.documents.back();
  }

  /// The row of this batch entry in a table of rank 1 or 2.
  TensorView row_of(const TensorView& table) const {
    if (table.rank == 1) return table;
    TensorView row = table;
    const auto offset = table.shape[0] > 1 ? batch_ * table.strides[0] : 0;
    if (table.data != nullptr)
      row.data = static_cast<char*>(table.data) + offset * std::int64_t(element_size(table.type));
    row.rank = 1;
    row.shape[0] = table.shape[1];
    row.strides[0] = table.strides[1];
    return row;
  }

  Tree part_of(const Node& node, bool negated) {
    if (node.kind == NodeKind::negation) return part_of(*node.left, !negated);
    if (node.kind == NodeKind::both || node.kind == NodeKind::either) {
      const bool both = (node.kind == NodeKind::both) != negated;
      return joined(both, part_of(*node.left, negated), part_of(*node.right, negated));
    }
    auto part = leaf_of(node);
    if (part->kind == Part::Kind::atom) {
      part->atom.negated = negated;
    } else if (negated) {
      part = constant(part->kind == Part::Kind::nothing);
    }
    return part;
  }

  static Tree joined(bool both, Tree a, Tree b) {
    const auto absorbing = both ? Part::Kind::nothing : Part::Kind::everything;
    const auto neutral = both ? Part::Kind::everything : Part::Kind::nothing;
    if (a->kind == absorbing || b->kind == neutral) return a;
    if (b->kind == absorbing || a->kind == neutral) return b;
    if (a->stack < b->stack) std::swap(a, b);  // the deeper one goes first
    const auto stack = a->stack == b->stack ? a->stack + 1 : a->stack;
    return std::make_unique<Part>(
        Part{both ? Part::Kind::both : Part::Kind::either, {}, std::move(a), std::move(b), stack});
  }

  Tree leaf_of(const Node& node) {
    if (node.kind == NodeKind::full) return constant(true);
    auto part = std::make_unique<Part>(Part{Part::Kind::atom, {}, {}, {}, 1});
    auto& atom = part->atom;
    switch (node.kind) {
      case NodeKind::causal: atom.kind = AtomKind::causal; break;
      case NodeKind::local:
        atom.kind = AtomKind::local;
        atom.causal = node.causal;
        for (int i = 0; i < 3; ++i) {
          const auto stride = std::int64_t{1} << node.log2_stride;
          atom.a[i] = node.n - 1 > int32_max / stride ? std::int32_t(int32_max) : std::int32_t((node.n - 1) * stride);
          atom.b[i] = std::int32_t(stride);
        }
        break;
      case NodeKind::window: {
        const auto bound = [](std::int64_t n) { return n < 0 ? std::int32_t(int32_max) : narrow(n); };
        per_dimension(atom, AtomKind::window, node, bound);
        break;
      }
      case NodeKind::tiles: per_dimension(atom, AtomKind::tiles, node, narrow); break;
      case NodeKind::neighbourhood:
        per_dimension(atom, AtomKind::neighbourhood, node, narrow);
        for (int i = 0; i < 3; ++i) atom.causal |= std::uint8_t(value(node.c, i) << i);
        break;
      case NodeKind::prefix:
      case NodeKind::prefix_queries:
      case NodeKind::sink: return first_entries(node);
      case NodeKind::documents:
      case NodeKind::documents_packed: atom.kind = AtomKind::documents; break;
      default: place(atom, node); break;
    }
    return part;
  }

  /// The number for dimension i of the three; not called for dimensions that the sequence does not have.
  std::int64_t value(const PerDimension& values, int i) const {
    return values.value[values.count == 1 ? 0 : std::max(0, i - (3 - shapes_.dimensions))];
  }

  template <class Bound>
  void per_dimension(Atom& atom, AtomKind kind, const Node& node, const Bound& bound) const {
    atom.kind = kind;
    for (int i = 0; i < 3; ++i) {
      atom.a[i] = bound(value(node.a, i));
      atom.b[i] = bound(value(node.b, i));
    }
  }

  /// prefix, prefix_queries and sink: the last of the first n entries, as a coordinate.
  Tree first_entries(const Node& node) const {
    if (node.n == 0) return constant(false);
    const bool raw = node.kind == NodeKind::sink;
    auto part = std::make_unique<Part>(Part{Part::Kind::atom, {}, {}, {}, 1});
    part->atom.kind = raw                                     ? AtomKind::sink
                      : node.kind == NodeKind::prefix_queries ? AtomKind::prefix_queries
                                                              : AtomKind::prefix;
    auto last = node.n - 1;
    if (raw && whole_ && shapes_.dimensions == 1) last = count_before(k_pieces_, node.n) - 1;
    if (last < 0) return constant(false);
    if (shapes_.dimensions == 1) {
      part->atom.a = {{0, 0, narrow(last)}};
      return part;
    }
    Int3 size = k_size_;
    for (int i = 0; i < 3 && !raw; ++i) size[i] = program_.axis[i].r;
    if (size[0] == 0 || size[1] == 0 || size[2] == 0) return constant(true);  // there are no pairs
    const auto row = last / size[2], plane = row / size[1];
    if (plane >= size[0]) return constant(true);
    auto& entry = part->atom.a = {{std::int32_t(plane), std::int32_t(row % size[1]), std::int32_t(last % size[2])}};
    if (raw && whole_ && !whole_->k.empty()) {  // counted from the first entry of the piece
      auto& outer = entry[outermost(shapes_.dimensions)];
      outer -= std::int32_t(whole_->k.front().first);
      if (outer < 0) return constant(false);
    }
    return part;
  }

  /// blocks and dense: points the atom at the rows of this batch entry and head.
  void place(Atom& atom, const Node& node) const {
    const auto& table = node.table_q;
    check_place(table);
    const auto stride = [&](int axis) { return axis >= 0 && table.shape[axis] > 1 ? table.strides[axis] : 0; };
    atom.kind = node.kind == NodeKind::blocks ? AtomKind::blocks : AtomKind::dense;
    atom.stride_q = stride(table.rank - 2);
    atom.stride_k = stride(table.rank - 1);
    atom.data = static_cast<const std::uint8_t*>(table.data);
    if (table.data != nullptr) atom.data += head_ * stride(table.rank - 3) + batch_ * stride(table.rank - 4);
    atom.a = {{1, 1, narrow(node.n)}};
    atom.b = {{1, 1, narrow(node.m)}};
    if (whole_ && table.data != nullptr) gather(atom);
  }

  /// Brings the rows and columns of the pieces together: a copy, of one entry for each block of either side.
  void gather(Atom& atom) const {
    const std::int64_t block_q = atom.kind == AtomKind::blocks ? atom.a[2] : 1;
    const std::int64_t block_k = atom.kind == AtomKind::blocks ? atom.b[2] : 1;
    const auto common_q = common_block(block_q, q_pieces_), common_k = common_block(block_k, k_pieces_);
    auto rows = blocks_of_pieces(block_q, common_q, q_pieces_),
         columns = blocks_of_pieces(block_k, common_k, k_pieces_);
    if (atom.stride_q == 0) rows.resize(std::min<std::size_t>(rows.size(), 1), 0);
    if (atom.stride_k == 0) columns.resize(std::min<std::size_t>(columns.size(), 1), 0);
    auto& bytes = tables_.gathered.emplace_back();
    bytes.reserve(rows.size() * columns.size() + 1);
    for (const auto row : rows) {
      const auto* from = atom.data + row * atom.stride_q;
      for (const auto column : columns) bytes.push_back(from[column * atom.stride_k]);
    }
    atom.data = bytes.data();
    if (atom.stride_q != 0) atom.stride_q = std::int64_t(columns.size()), atom.a[2] = std::int32_t(common_q);
    if (atom.stride_k != 0) atom.stride_k = 1, atom.b[2] = std::int32_t(common_k);
  }

  static bool conjunction(const Part& part) {
    return part.kind == Part::Kind::both ? conjunction(*part.left) && conjunction(*part.right)
                                         : part.kind != Part::Kind::either;
  }

  /// Is the rule false wherever documents is, whatever its other parts give?
  static bool documents_required(const Part& part) {
    switch (part.kind) {
      case Part::Kind::both: return documents_required(*part.left) || documents_required(*part.right);
      case Part::Kind::either: return documents_required(*part.left) && documents_required(*part.right);
      default: return part.atom.kind == AtomKind::documents && !part.atom.negated;
    }
  }

  static bool by_coordinates(const Part& part) {
    if (part.left) return by_coordinates(*part.left) || by_coordinates(*part.right);
    const auto kind = part.atom.kind;
    return kind == AtomKind::causal || kind == AtomKind::prefix || kind == AtomKind::prefix_queries ||
           by_dimension(kind);
  }

  void emit(const Part& part) {
    if (part.kind == Part::Kind::everything) return;
    if (part.kind == Part::Kind::atom) {
      program_.atoms[program_.atom_count] = part.atom;
      program_.ops[program_.op_count++] = std::uint8_t(program_.atom_count++);
      return;
    }
    emit(*part.left);
    emit(*part.right);
    program_.ops[program_.op_count++] = part.kind == Part::Kind::both ? Program::op_and : Program::op_or;
  }

  static void leaves(const Part& part, std::vector<const Part*>& found) {
    if (part.kind == Part::Kind::atom) found.push_back(&part);
    if (part.left) leaves(*part.left, found);
    if (part.right) leaves(*part.right, found);
  }

  /// Atoms that read memory come last: the others may already have decided.
  void emit_conjunction(const Part& part) {
    std::vector<const Part*> atoms;
    leaves(part, atoms);
    const auto reads = [](const Part* p) {
      return p->atom.kind == AtomKind::blocks || p->atom.kind == AtomKind::dense;
    };
    std::stable_partition(atoms.begin(), atoms.end(), [&](const Part* p) { return !reads(p); });
    for (const auto* atom : atoms) {
      emit(*atom);
      if (program_.atom_count > 1) program_.ops[program_.op_count++] = Program::op_and;
    }
  }

  Shapes shapes_;  // of the whole sequences
  const std::int64_t batch_, head_;
  std::int64_t keys_;  // of the whole sequence in this batch entry, -1: all
  const bool late_;
  Tables& tables_;
  Int3 k_size_{};                 // of the whole sequence
  Int3 own_q_{}, own_k_{};        // of the call
  const Whole* whole_ = nullptr;  // null: the call has all of it
  Pieces q_pieces_, k_pieces_;    // flat entries
  Program program_{};
};

/// A table has the axes (batch, heads, rows, columns) or the last of them; document ids have (batch, entries).
bool has_batch_axis(const Node& node) {
  switch (node.kind) {
    case NodeKind::documents: return node.table_q.rank == 2 || node.table_k.rank == 2;
    case NodeKind::blocks:
    case NodeKind::dense: return node.table_q.rank == 4;
    default: return false;
  }
}

void add_axes(const Node& node, TableAxes& axes) {
  if (node.left) add_axes(*node.left, axes);
  if (node.right) add_axes(*node.right, axes);
  const bool ids = node.kind == NodeKind::documents;
  const bool places = node.kind == NodeKind::blocks || node.kind == NodeKind::dense;
  axes.tables |= ids || places || node.kind == NodeKind::documents_packed;
  axes.documents |= ids || node.kind == NodeKind::documents_packed;
  axes.matrices |= places;
  axes.batch_axis |= has_batch_axis(node);
  for (const auto* table : {&node.table_q, &node.table_k}) {
    if (!table->given()) continue;
    (table->device.kind == DeviceKind::cpu ? axes.on_cpu : axes.on_device) = true;
    if ((ids && table->rank == 2) || (places && table->rank == 4)) axes.batch = std::max(axes.batch, table->shape[0]);
    if (places && table->rank >= 3) axes.heads = std::max(axes.heads, table->shape[table->rank - 3]);
  }
}

std::shared_ptr<const Node> without_batch_tables(const std::shared_ptr<const Node>& node) {
  if (has_batch_axis(*node)) return std::make_shared<Node>();
  if (!node->left) return node;
  auto copy = std::make_shared<Node>(*node);
  copy->left = without_batch_tables(node->left);
  if (node->right) copy->right = without_batch_tables(node->right);
  return copy;
}

/// The keys that a query sees are at multiples of this distance in a dimension (the j-th of the sequence's).
std::int64_t stride_of(const Node& node, int j, bool negated) {
  switch (node.kind) {
    case NodeKind::negation: return stride_of(*node.left, j, !negated);
    case NodeKind::both:
    case NodeKind::either: {
      const auto a = stride_of(*node.left, j, negated), b = stride_of(*node.right, j, negated);
      if ((node.kind == NodeKind::either) != negated) return std::gcd(a, b);
      const auto multiple = a / std::gcd(a, b) * b;
      return multiple <= int32_max ? multiple : std::max(a, b);
    }
    case NodeKind::part: return stride_of(*node.left, j, negated);
    case NodeKind::local: return negated ? 1 : std::int64_t{1} << node.log2_stride;
    case NodeKind::neighbourhood: return negated ? 1 : narrow(node.b.value[node.b.count == 1 ? 0 : j]);
    default: return 1;
  }
}

}  // namespace

Tables::Tables() = default;
Tables::~Tables() = default;
Tables::Tables(Tables&&) noexcept = default;
Tables& Tables::operator=(Tables&&) noexcept = default;

Rule with_lengths(const Rule& rule, const Shapes& shapes) {
  if (!shapes.cu_seqlens_q.given() && !shapes.cu_seqlens_k.given()) return rule;
  if (rule.node().kind == NodeKind::part) {
    throw Error(Error::Kind::value,
                "rule part: in a call with cu_seqlens, expected documents_packed in the whole rule");
  }
  return rule & documents_packed(shapes.cu_seqlens_q, shapes.cu_seqlens_k);
}

DocumentTables document_tables(const Rule& rule) {
  const auto& node = rule.node();
  if (node.kind == NodeKind::documents || node.kind == NodeKind::documents_packed)
    return {node.table_q, node.table_k, node.kind == NodeKind::documents};
  for (const auto& part : {node.left, node.right}) {
    if (!part) continue;
    if (auto found = document_tables(Rule(part)); found.q.given()) return found;
  }
  return {};
}

TableAxes table_axes(const Rule& rule) {
  TableAxes axes;
  add_axes(rule.node(), axes);
  return axes;
}

Rule without_batch_tables(const Rule& rule) {
  return Rule(without_batch_tables(std::make_shared<const Node>(rule.node())));
}

Facts facts(const Rule& rule, const Shapes& shapes) {
  const auto whole = with_lengths(rule, shapes);
  const auto axes = table_axes(whole);
  Facts facts;
  facts.tables = axes.tables;
  facts.matrices = axes.matrices;
  facts.batch_varies = axes.batch > 1;
  facts.heads_vary = axes.heads > 1;
  facts.on_device = axes.on_device;
  for (int j = 0; j < shapes.dimensions; ++j) {
    facts.stride[3 - shapes.dimensions + j] = std::int32_t(stride_of(whole.node(), j, false));
  }
  if (!facts.tables) facts.key = rule.text();
  return facts;
}

Program compile(const Rule& rule, const Shapes& shapes, std::int64_t batch_index, std::int64_t head_index,
                Tables& tables, std::int64_t key_length, bool late) {
  return Compiler(shapes, batch_index, head_index, tables, key_length, late).run(with_lengths(rule, shapes));
}

}  // namespace anyflash::rules
