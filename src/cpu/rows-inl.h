// Rows between a tensor's memory (any type, any strides) and a thread's own (T, whole vectors, aligned): load, store, transpose,
// and setting aside rows that hold a NaN or an infinity.

#include "hwy/highway.h"

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

/// Element type in memory -> how a vector of T is read from it and written to it.
template <class T, class Memory>
struct Convert {  // float16 or bfloat16 in memory, float in registers
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const Memory* from) {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<Memory, D>(), from));
  }
  template <class D>
  static HWY_INLINE void Store(D, hn::Vec<D> x, Memory* to) {
    const hn::Rebind<Memory, D> narrow;
    hn::StoreU(hn::DemoteTo(narrow, x), narrow, to);
  }
};
template <class T>
struct Convert<T, T> {
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const T* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> x, T* to) {
    hn::StoreU(x, d, to);
  }
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

template <class T, class Memory>
HWY_INLINE void LoadRow(const Memory* from, std::int64_t stride, std::int64_t channels, T* HWY_RESTRICT to) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= channels; i += lanes) hn::Store(Convert<T, Memory>::Load(d, from + i), d, to + i);
  }
  for (; i < channels; ++i) {
    if constexpr (sizeof(Memory) == 2) {
      to[i] = hwy::ConvertScalarTo<T>(from[i * stride]);
    } else {
      to[i] = from[i * stride];
    }
  }
}

/// Offsets in elements of the rows of a box of (b, h); rows outside `size` are padding.
class RowAddresses {
 public:
  RowAddresses(const Operand& operand, std::int64_t b, std::int64_t h, const Box& box, const Int3& size, const Pages* pages = nullptr)
      : operand_(operand), base_(b * operand.batch + h * operand.head), box_(box), size_(size) {
    if (pages && pages->table) {
      pages_ = pages;
      table_ = pages->table + b * pages->table_batch;
      base_ = h * operand.head;
    }
  }
  /// False for padding.
  bool operator()(std::int32_t row, std::int64_t& offset) const {
    const Int3 c = box_.entry(row);
    if (!rules::inside(c, size_)) return false;
    if (pages_) {
      const std::int64_t page = table_[(c[2] / pages_->page_size) * pages_->table_page];
      offset = base_ + page * operand_.batch + (c[2] % pages_->page_size) * operand_.sequence[2];
    } else {
      offset = base_ + c[0] * operand_.sequence[0] + c[1] * operand_.sequence[1] + c[2] * operand_.sequence[2];
    }
    return true;
  }

 private:
  const Operand& operand_;
  std::int64_t base_;
  const Box box_;
  const Int3 size_;
  const Pages* pages_ = nullptr;
  const std::int32_t* table_ = nullptr;
};

/// to (rows, width): `rows` rows of a box, channels padded with zeros, padding rows zero.
template <class T>
void LoadRows(const Operand& operand, ElementType type, const RowAddresses& address, std::int32_t rows, std::int64_t channels,
              T* to, std::int64_t width) {
  WithMemoryType<T>(type, [&]<class Memory>(Memory*) {
    const auto* data = reinterpret_cast<const Memory*>(operand.data);
    for (std::int32_t r = 0; r < rows; ++r, to += width) {
      std::int64_t offset;
      if (address(r, offset)) {
        LoadRow(data + offset, operand.channel, channels, to);
        std::fill(to + channels, to + width, T(0));
      } else {
        std::fill(to, to + width, T(0));
      }
    }
  });
}

template <class T>
void LoadRows(const Operand& operand, ElementType type, std::int64_t b, std::int64_t h, const Box& box, const Int3& size,
              std::int64_t channels, T* to, std::int64_t width) {
  LoadRows(operand, type, RowAddresses(operand, b, h, box, size), static_cast<std::int32_t>(rules::volume(box.extent)), channels, to,
           width);
}

/// The reverse: rows of a box that lie inside are written, rounded to nearest.
template <class T>
void StoreRows(const T* from, std::int64_t width, const Operand& operand, ElementType type, std::int64_t b, std::int64_t h,
               const Box& box, const Int3& size, std::int64_t channels) {
  const RowAddresses address(operand, b, h, box, size);
  const auto rows = static_cast<std::int32_t>(rules::volume(box.extent));
  WithMemoryType<T>(type, [&]<class Memory>(Memory*) {
    const hn::ScalableTag<T> d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    auto* data = reinterpret_cast<Memory*>(operand.data);
    for (std::int32_t r = 0; r < rows; ++r, from += width) {
      std::int64_t offset, i = 0;
      if (!address(r, offset)) continue;
      if (operand.channel == 1) {
        for (; i + lanes <= channels; i += lanes) Convert<T, Memory>::Store(d, hn::Load(d, from + i), data + offset + i);
      }
      for (; i < channels; ++i) data[offset + i * operand.channel] = hwy::ConvertScalarTo<Memory>(from[i]);
    }
  });
}

/// A square of 128-bit blocks, transposed: rows r .. r + n - 1 (n = 16 / sizeof(T)) of `channels` numbers each, `width` apart,
/// become n numbers side by side in every row of `to`.
template <class T>
HWY_INLINE void TransposeStrip(const T* HWY_RESTRICT rows, std::int64_t width, std::int64_t channels, T* HWY_RESTRICT to,
                               std::int64_t to_width) {
  const hn::Full128<T> d;
  if constexpr (sizeof(T) == 4) {
    const hn::Repartition<double, decltype(d)> wide;
    for (std::int64_t c = 0; c < channels; c += 4) {
      const auto a0 = hn::Load(d, rows + c), a1 = hn::Load(d, rows + width + c);
      const auto a2 = hn::Load(d, rows + 2 * width + c), a3 = hn::Load(d, rows + 3 * width + c);
      const auto low01 = hn::BitCast(wide, hn::InterleaveLower(d, a0, a1)), low23 = hn::BitCast(wide, hn::InterleaveLower(d, a2, a3));
      const auto high01 = hn::BitCast(wide, hn::InterleaveUpper(d, a0, a1)), high23 = hn::BitCast(wide, hn::InterleaveUpper(d, a2, a3));
      T* out = to + c * to_width;
      hn::Store(hn::BitCast(d, hn::InterleaveLower(wide, low01, low23)), d, out);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(wide, low01, low23)), d, out + to_width);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(wide, high01, high23)), d, out + 2 * to_width);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(wide, high01, high23)), d, out + 3 * to_width);
    }
  } else {
    for (std::int64_t c = 0; c < channels; c += 2) {
      const auto a0 = hn::Load(d, rows + c), a1 = hn::Load(d, rows + width + c);
      hn::Store(hn::InterleaveLower(d, a0, a1), d, to + c * to_width);
      hn::Store(hn::InterleaveUpper(d, a0, a1), d, to + (c + 1) * to_width);
    }
  }
}

/// rows (64, width) -> to (width, 64). width is whole vectors.
template <class T>
void TransposeRows(const T* rows, std::int64_t width, T* to) {
  constexpr int strip = 16 / sizeof(T);
  for (int r = 0; r < kTile; r += strip) TransposeStrip(rows + r * width, width, width, to + r, kTile);
}

/// Which of 64 rows hold a NaN or an infinity. If any, `clean` becomes the rows with zeros in the place of those; it may be
/// `rows` itself.
template <class T>
std::uint64_t CleanRows(const T* rows, std::int64_t width, T* clean) {
  const hn::ScalableTag<T> d;
  std::uint64_t bad = 0;
  for (int row = 0; row < kTile; ++row) {
    auto sum = hn::Zero(d);  // of x - x: 0, or NaN if any x is not finite
    for (std::int64_t i = 0; i < width; i += hn::Lanes(d)) {
      const auto x = hn::Load(d, rows + row * width + i);
      sum = hn::Add(sum, hn::Sub(x, x));
    }
    bad |= std::uint64_t{!hn::AllFalse(d, hn::IsNaN(sum))} << row;
  }
  if (!bad) return 0;
  if (clean != rows) std::copy_n(rows, kTile * width, clean);
  for (auto left = bad; left; left &= left - 1) std::fill_n(clean + std::countr_zero(left) * width, width, T(0));
  return bad;
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_ROWS_INL_H_
