// Rows between a tensor's memory (any type, any strides) and a thread's own memory (T, whole vectors, aligned): load,
// store, transpose, and removal of rows that hold a NaN or an infinity.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/numbers.h"
#include "cpu/tuning.h"
#include "cpu/workspace.h"
#include "hwy/highway.h"
#include "plan/plan.h"
#include "rules/coordinates.h"

#if defined(ANYFLASH_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_ROWS_INL_H_
#undef ANYFLASH_CPU_ROWS_INL_H_
#else
#define ANYFLASH_CPU_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Element type in memory -> how a vector of T is read from it and written to it, whole or in part.
template <class T, class Memory>
struct Convert {  // float16 or bfloat16 in memory, float in registers
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const Memory* from) {
    return Widen(d, hn::LoadU(hn::Rebind<Memory, D>(), from));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> LoadN(D d, const Memory* from, std::int64_t count) {
    return Widen(d, hn::LoadN(hn::Rebind<Memory, D>(), from, static_cast<std::size_t>(count)));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> x, Memory* to) {
    const hn::Rebind<Memory, D> narrow;
    hn::StoreU(ToNearest(d, narrow, x), narrow, to);
    KeepNan(d, x, to, static_cast<std::int64_t>(hn::Lanes(d)));
  }
  template <class D>
  static HWY_INLINE void StoreN(D d, hn::Vec<D> x, Memory* to, std::int64_t count) {
    const hn::Rebind<Memory, D> narrow;
    hn::StoreN(ToNearest(d, narrow, x), narrow, to, static_cast<std::size_t>(count));
    KeepNan(d, x, to, count);
  }
  static T One(Memory x) { return hwy::ConvertScalarTo<T>(x); }

 private:
  /// Without an instruction for it, Highway's float16 conversion treats the highest exponent as an ordinary one: a
  /// result at or above 2^16 stands for an infinity or a NaN.
  template <class D>
  static HWY_INLINE hn::Vec<D> Widen(D d, hn::Vec<hn::Rebind<Memory, D>> narrow) {
    const auto x = hn::PromoteTo(d, narrow);
    if constexpr (std::is_same_v<Memory, hwy::float16_t>) {
      const auto special = hn::Not(hn::Lt(hn::Abs(x), hn::Set(d, T(65536))));
      return hn::IfThenElse(special, hn::Or(x, hn::Set(d, std::numeric_limits<T>::infinity())), x);
    } else {
      return x;
    }
  }
  /// The bfloat16 instruction flushes numbers below 2^-126 to 0.
  template <class D, class DN>
  static HWY_INLINE hn::Vec<DN> ToNearest(D d, DN narrow, hn::Vec<D> x) {
#if HWY_NATIVE_DOT_BF16
    if constexpr (std::is_same_v<Memory, hwy::bfloat16_t>) {
      const hn::RebindToUnsigned<D> words;
      const auto bits = hn::BitCast(words, x), odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1));
      const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(words, 0x7fff))));
      const auto nan = hn::Set(words, 0x7fc0);
      const auto kept = hn::IfThenElse(hn::RebindMask(words, hn::IsNaN(x)), nan, rounded);
      return hn::BitCast(narrow, hn::TruncateTo(hn::RebindToUnsigned<DN>(), kept));
    }
#endif
    static_cast<void>(d);
    return hn::DemoteTo(narrow, x);
  }
  /// Without an instruction for float16, Highway also turns a NaN into an infinity on the way back.
  template <class D>
  static HWY_INLINE void KeepNan(D d, hn::Vec<D> x, Memory* to, std::int64_t count) {
    if (!std::is_same_v<Memory, hwy::float16_t> || hn::AllFalse(d, hn::IsNaN(x))) return;
    HWY_ALIGN T numbers[hn::MaxLanes(d)];
    hn::Store(x, d, numbers);
    for (std::int64_t i = 0; i < count; ++i)
      if (numbers[i] != numbers[i]) to[i] = Narrow<Memory>(numbers[i]);
  }
};
template <class T>
struct Convert<T, T> {
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const T* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> LoadN(D d, const T* from, std::int64_t count) {
    return hn::LoadN(d, from, static_cast<std::size_t>(count));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> x, T* to) {
    hn::StoreU(x, d, to);
  }
  template <class D>
  static HWY_INLINE void StoreN(D d, hn::Vec<D> x, T* to, std::int64_t count) {
    hn::StoreN(x, d, to, static_cast<std::size_t>(count));
  }
  static T One(T x) { return x; }
};

/// Calls f with a null pointer of the type in memory, for tensors whose numbers are computed in T.
template <class T, class F>
HWY_INLINE void WithMemoryType(ElementType type, const F& f) {
  if constexpr (sizeof(T) == 8) {
    f(static_cast<double*>(nullptr));
  } else {
    if (type == ElementType::float32) return f(static_cast<float*>(nullptr));
    if (type == ElementType::bfloat16) return f(static_cast<hwy::bfloat16_t*>(nullptr));
    f(static_cast<hwy::float16_t*>(nullptr));
  }
}

/// The rows of a box of (b, h): offsets in elements. Rows outside `size` are padding, and are never read.
class RowAddresses {
 public:
  HWY_NOINLINE RowAddresses(const Operand& operand, std::int64_t b, std::int64_t h, const Box& box, const Int3& size,
                            const Pages* pages = nullptr) {
    if (pages && pages->table) {
      find_in_pages(operand, b, h, box, size, *pages);
      return;
    }
    const auto base = b * operand.batch + h * operand.head;
    for (int z = 0; z < box.extent[0]; ++z) {
      const auto c0 = box.origin[0] + z * box.step[0];
      for (int y = 0; y < box.extent[1]; ++y) {
        const auto c1 = box.origin[1] + y * box.step[1];
        const auto line =
            base + c0 * operand.sequence[0] + c1 * operand.sequence[1] + box.origin[2] * operand.sequence[2];
        const auto step = box.step[2] * operand.sequence[2];
        const bool inside = c0 < size[0] && c1 < size[1];
        const std::int64_t exist = inside ? (size[2] - box.origin[2] + box.step[2] - 1) / box.step[2] : 0;
        for (int x = 0; x < box.extent[2]; ++x) at_[count_++] = x < exist ? line + x * step : kPadding;
      }
    }
  }

  std::int32_t count() const { return count_; }
  std::int64_t operator[](std::int32_t row) const { return at_[row]; }
  bool exists(std::int32_t row) const { return at_[row] != kPadding; }
  /// The rows up to the last that exists, rounded up to kSpanStep: no others need be loaded.
  std::int32_t used() const {
    auto rows = count_;
    while (rows > 0 && !exists(rows - 1)) --rows;
    return (rows + tuning::kSpanStep - 1) / tuning::kSpanStep * tuning::kSpanStep;
  }
  /// Rows row .. row + n - 1 exist and are one element apart.
  bool neighbours(std::int32_t row, int n) const {
    bool all = row + n <= count_ && exists(row);
    for (int i = 1; all && i < n; ++i) all = at_[row + i] == at_[row] + i;
    return all;
  }

 private:
  void find_in_pages(const Operand& operand, std::int64_t b, std::int64_t h, const Box& box, const Int3& size,
                     const Pages& pages) {
    const auto* table = pages.table + b * pages.table_batch;
    for (int x = 0; x < box.extent[2]; ++x) {
      const auto c = box.origin[2] + std::int64_t{x} * box.step[2];
      at_[count_++] = c >= size[2] ? kPadding
                                   : table[c / pages.page_size * pages.table_page] * operand.batch + h * operand.head +
                                         c % pages.page_size * operand.sequence[2];
    }
  }

  static constexpr std::int64_t kPadding = std::numeric_limits<std::int64_t>::min();
  std::int32_t count_ = 0;
  std::int64_t at_[kMaxQueryRows];
};

/// The first rows of a box of (b, h) in one dimension, if they exist and are `line` elements apart; else line is 0.
struct EvenRows {
  std::int64_t first = 0, line = 0;

  EvenRows() = default;
  EvenRows(const Operand& operand, std::int64_t b, std::int64_t h, const Box& box, int rows, const Int3& size,
           const Pages& pages) {
    const std::int64_t last = box.origin[2] + std::int64_t{rows - 1} * box.step[2];
    if (pages.table || rules::volume(box.extent) != box.extent[2] || last >= size[2]) return;
    first = b * operand.batch + h * operand.head + box.origin[2] * operand.sequence[2];
    line = box.step[2] * operand.sequence[2];
  }
};

/// Transposes a square of n x n numbers in each 16 bytes of n vectors (n = 16 / sizeof(T)).
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void TransposeSquares(D d, hn::Vec<D> (&rows)[16 / sizeof(T)]) {
  const auto low = hn::InterleaveLower(d, rows[0], rows[1]), high = hn::InterleaveUpper(d, rows[0], rows[1]);
  if constexpr (sizeof(T) == 4) {
    const hn::Repartition<double, D> wide;
    const auto low01 = hn::BitCast(wide, low), high01 = hn::BitCast(wide, high);
    const auto low23 = hn::BitCast(wide, hn::InterleaveLower(d, rows[2], rows[3]));
    const auto high23 = hn::BitCast(wide, hn::InterleaveUpper(d, rows[2], rows[3]));
    rows[0] = hn::BitCast(d, hn::InterleaveLower(wide, low01, low23));
    rows[1] = hn::BitCast(d, hn::InterleaveUpper(wide, low01, low23));
    rows[2] = hn::BitCast(d, hn::InterleaveLower(wide, high01, high23));
    rows[3] = hn::BitCast(d, hn::InterleaveUpper(wide, high01, high23));
  } else {
    rows[0] = low, rows[1] = high;
  }
}

/// Transposes n x n numbers at `from`, lines `from_line` apart, into `to`.
template <class T, class From, class To>
HWY_INLINE void TransposeSquare(const From* HWY_RESTRICT from, std::int64_t from_line, To* HWY_RESTRICT to,
                                std::int64_t to_line) {
  const hn::Full128<T> d;
  constexpr int n = 16 / sizeof(T);
  hn::Vec<decltype(d)> rows[n];
  for (int i = 0; i < n; ++i) rows[i] = Convert<T, From>::Load(d, from + i * from_line);
  TransposeSquares(d, rows);
  for (int i = 0; i < n; ++i) Convert<T, To>::Store(d, rows[i], to + i * to_line);
}

template <class T, class Memory>
HWY_INLINE void LoadRow(const Memory* HWY_RESTRICT from, std::int64_t stride, std::int64_t channels, T* HWY_RESTRICT to,
                        std::int64_t width) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= channels; i += lanes) hn::Store(Convert<T, Memory>::Load(d, from + i), d, to + i);
    if (i < channels) hn::Store(Convert<T, Memory>::LoadN(d, from + i, channels - i), d, to + i), i += lanes;
  } else {
    for (; i < channels; ++i) to[i] = Convert<T, Memory>::One(from[i * stride]);
  }
  for (; i < width; ++i) to[i] = T(0);
}

template <class T, class Memory>
HWY_INLINE void StoreRow(const T* HWY_RESTRICT from, std::int64_t stride, std::int64_t channels,
                         Memory* HWY_RESTRICT to) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= channels; i += lanes) Convert<T, Memory>::Store(d, hn::Load(d, from + i), to + i);
    if (i < channels) Convert<T, Memory>::StoreN(d, hn::Load(d, from + i), to + i, channels - i);
  } else {
    for (; i < channels; ++i) to[i * stride] = Narrow<Memory>(from[i]);
  }
}

/// Loads the first `rows` rows into to (rows, width); channels are padded with zeros, padding rows are zero. If the
/// rows are contiguous but the channels are not (bhds), squares are transposed.
template <class T>
HWY_NOINLINE void LoadRows(const Operand& operand, ElementType type, const RowAddresses& address, std::int32_t rows,
                           std::int64_t channels, T* to, std::int64_t width) {
  WithMemoryType<T>(type, [&]<class Memory>(Memory*) HWY_ATTR {
    constexpr int n = 16 / sizeof(T);
    const auto* data = reinterpret_cast<const Memory*>(operand.data);
    for (std::int32_t r = 0; r < rows;) {
      T* row = to + r * width;
      if (operand.channel != 1 && r + n <= rows && address.neighbours(r, n)) {
        const Memory* from = data + address[r];
        const auto whole = channels / n * n;
        for (std::int64_t c = 0; c < whole; c += n)
          TransposeSquare<T>(from + c * operand.channel, operand.channel, row + c, width);
        for (int i = 0; i < n; ++i)
          LoadRow(from + i + whole * operand.channel, operand.channel, channels - whole, row + i * width + whole,
                  width - whole);
        r += n;
      } else {
        if (address.exists(r)) {
          LoadRow(data + address[r], operand.channel, channels, row, width);
        } else {
          std::fill_n(row, width, T(0));
        }
        ++r;
      }
    }
  });
}

template <class T>
void LoadRows(const Operand& operand, ElementType type, std::int64_t b, std::int64_t h, const Box& box,
              const Int3& size, std::int64_t channels, T* to, std::int64_t width) {
  const RowAddresses address(operand, b, h, box, size);
  LoadRows(operand, type, address, address.count(), channels, to, width);
}

/// The reverse: writes those of the first `rows` rows that exist, rounded to nearest.
template <class T>
HWY_NOINLINE void StoreRows(const T* from, std::int64_t width, const Operand& operand, ElementType type,
                            const RowAddresses& address, std::int32_t rows, std::int64_t channels) {
  WithMemoryType<T>(type, [&]<class Memory>(Memory*) HWY_ATTR {
    constexpr int n = 16 / sizeof(T);
    auto* data = reinterpret_cast<Memory*>(operand.data);
    for (std::int32_t r = 0; r < rows;) {
      const T* row = from + r * width;
      if (operand.channel != 1 && r + n <= rows && address.neighbours(r, n)) {
        Memory* to = data + address[r];
        const auto whole = channels / n * n;
        for (std::int64_t c = 0; c < whole; c += n)
          TransposeSquare<T>(row + c, width, to + c * operand.channel, operand.channel);
        for (int i = 0; i < n; ++i)
          StoreRow(row + i * width + whole, operand.channel, channels - whole, to + i + whole * operand.channel);
        r += n;
      } else {
        if (address.exists(r)) StoreRow(row, operand.channel, channels, data + address[r]);
        ++r;
      }
    }
  });
}

template <class T>
void StoreRows(const T* from, std::int64_t width, const Operand& operand, ElementType type, std::int64_t b,
               std::int64_t h, const Box& box, const Int3& size, std::int64_t channels) {
  const RowAddresses address(operand, b, h, box, size);
  StoreRows(from, width, operand, type, address, address.count(), channels);
}

/// As many rows as a vector has lanes, `line` apart, 16 bytes of each -> columns.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void LoadTransposed(D d, const T* from, std::int64_t line, hn::Vec<D> (&columns)[16 / sizeof(T)]) {
  const hn::BlockDFromD<D> block;
  constexpr int n = 16 / sizeof(T), kBlocks = static_cast<int>(hn::MaxLanes(d)) / n;
  for (int i = 0; i < n; ++i) {  // row i of each n
    const auto at = [&](int b) HWY_ATTR { return hn::LoadU(block, from + (i + n * b) * line); };
    columns[i] = hn::ResizeBitCast(d, at(0));
    if constexpr (kBlocks > 1) columns[i] = hn::InsertBlock<1>(columns[i], at(1));
    if constexpr (kBlocks > 2) columns[i] = hn::InsertBlock<3>(hn::InsertBlock<2>(columns[i], at(2)), at(3));
  }
  TransposeSquares(d, columns);
}

#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86_64
/// Blocks 0 and 2 (kOdd: 1 and 3) of each of two vectors of four 16-byte blocks. Highway has no operation for it.
template <bool kOdd, class D, class V = hn::Vec<D>>
HWY_INLINE V AlternateBlocks(D d, V a, V b) {
  const hn::Repartition<float, D> words;
  const auto x = hn::BitCast(words, a), y = hn::BitCast(words, b);
  return hn::BitCast(d, hn::Vec<decltype(words)>{_mm512_shuffle_f32x4(x.raw, y.raw, kOdd ? 0xdd : 0x88)});
}
#endif

/// A vector of each of as many rows as it has lanes, `line` apart -> columns. A row's cache line is read at once, so
/// that neither the rows' addresses nor the size of the nearest cache matters.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void LoadSquare(D d, const T* from, std::int64_t line, hn::Vec<D> (&columns)[hn::MaxLanes(D())]) {
  constexpr int n = 16 / sizeof(T), kBlocks = static_cast<int>(hn::MaxLanes(d)) / n;
  static_assert(kBlocks == 1 || kBlocks == 2 || kBlocks == 4);
  hn::Vec<D> squares[kBlocks][n];
  asm("" : "+r"(line));  // otherwise the compiler saves each row's address on the stack for the next call
  for (int b = 0; b < kBlocks; ++b) {
    for (int i = 0; i < n; ++i, from += line) squares[b][i] = hn::LoadU(d, from);
    TransposeSquares(d, squares[b]);
  }
  for (int i = 0; i < n; ++i) {  // block b of squares[a][i]: column b * n + i of rows a * n and on
    if constexpr (kBlocks == 1) {
      columns[i] = squares[0][i];
    } else if constexpr (kBlocks == 2) {
      columns[i] = hn::ConcatLowerLower(d, squares[1][i], squares[0][i]);
      columns[n + i] = hn::ConcatUpperUpper(d, squares[1][i], squares[0][i]);
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86_64
    } else {
      const auto lower = hn::ConcatLowerLower(d, squares[1][i], squares[0][i]);
      const auto lower_of_rest = hn::ConcatLowerLower(d, squares[3][i], squares[2][i]);
      const auto upper = hn::ConcatUpperUpper(d, squares[1][i], squares[0][i]);
      const auto upper_of_rest = hn::ConcatUpperUpper(d, squares[3][i], squares[2][i]);
      columns[i] = AlternateBlocks<false>(d, lower, lower_of_rest);
      columns[n + i] = AlternateBlocks<true>(d, lower, lower_of_rest);
      columns[2 * n + i] = AlternateBlocks<false>(d, upper, upper_of_rest);
      columns[3 * n + i] = AlternateBlocks<true>(d, upper, upper_of_rest);
#endif
    }
  }
}

/// kColumns: of a whole vector, or of 16 bytes.
template <int kColumns, class D, class T = hn::TFromD<D>>
HWY_INLINE void LoadColumns(D d, const T* from, std::int64_t line, hn::Vec<D> (&columns)[kColumns]) {
  if constexpr (kColumns * sizeof(T) == 16) {
    LoadTransposed(d, from, line, columns);
  } else {
    LoadSquare(d, from, line, columns);
  }
}
template <int kColumns, class T>
HWY_INLINE void TransposeColumns(const T* from, std::int64_t line, T* to, std::int64_t to_line) {
  const hn::ScalableTag<T> d;
  hn::Vec<decltype(d)> columns[kColumns];
  LoadColumns(d, from, line, columns);
#pragma GCC unroll 16
  for (int i = 0; i < kColumns; ++i) hn::Store(columns[i], d, to + i * to_line);
}
/// As many rows as a vector has lanes, `line` apart; width is a multiple of 16 bytes.
template <class T>
HWY_INLINE void TransposeVectorOfRows(const T* rows, std::int64_t line, std::int64_t width, T* to,
                                      std::int64_t to_line) {
  constexpr int lanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>())), n = 16 / sizeof(T);
  std::int64_t c = 0;
  for (; c + lanes <= width; c += lanes) TransposeColumns<lanes>(rows + c, line, to + c * to_line, to_line);
  for (; c < width; c += n) TransposeColumns<n>(rows + c, line, to + c * to_line, to_line);
}

/// `count` rows, whole vectors of them and of their width -> to (width, count).
template <class T>
void TransposeRows(std::int64_t count, const T* rows, std::int64_t width, T* to) {
  constexpr int lanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
  for (std::int64_t r = 0; r < count; r += lanes) TransposeVectorOfRows(rows + r * width, width, width, to + r, count);
}
/// rows (kRows, width) -> to (width, kRows).
template <int kRows = kTile, class T>
void TransposeRows(const T* rows, std::int64_t width, T* to) {
  TransposeRows(kRows, rows, width, to);
}

/// Which of `count` rows, at most 64, hold a NaN or an infinity.
template <class T>
std::uint64_t RowsNotFinite(const T* rows, std::int64_t width, int count = kTile) {
  const hn::ScalableTag<T> d;
  std::uint64_t bad = 0;
  for (int row = 0; row < count; ++row) {
    auto sum = hn::Zero(d);  // of x - x: 0, or NaN if any x is not finite
    for (std::int64_t i = 0; i < width; i += hn::Lanes(d)) {
      const auto x = hn::Load(d, rows + row * width + i);
      sum = hn::Add(sum, hn::Sub(x, x));
    }
    bad |= std::uint64_t{!hn::AllFalse(d, hn::IsNaN(sum))} << row;
  }
  return bad;
}

/// RowsNotFinite; if there are any, `clean` becomes the rows with those replaced by zeros. It may be `rows` itself.
template <class T>
std::uint64_t CleanRows(const T* rows, std::int64_t width, T* clean, int count = kTile) {
  const auto bad = RowsNotFinite(rows, width, count);
  if (!bad) return 0;
  if (clean != rows) std::copy_n(rows, count * width, clean);
  for (auto left = bad; left; left &= left - 1) std::fill_n(clean + std::countr_zero(left) * width, width, T(0));
  return bad;
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_ROWS_INL_H_
