#include "cuda/hopper/maps.h"

#include "cuda/common/driver.h"
#include "problem/tensor.h"

namespace anyflash::cuda {
namespace {

struct Axis {
  std::int64_t size, stride;  // in elements
  int box = 1, step = 1;
};

/// The elements of axis 0 are contiguous.
bool encode(CUtensorMap& map, char* data, CUtensorMapDataType type, int bytes, const Axis (&axes)[5],
            CUtensorMapL2promotion ahead = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static const auto function = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (!function || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return false;
  cuuint64_t sizes[5], strides[4];
  cuuint32_t boxes[5], steps[5];
  for (int i = 0; i < 5; ++i) {
    const auto& axis = axes[i];
    if (axis.box * axis.step > 256 || axis.step > 8) return false;
    sizes[i] = static_cast<cuuint64_t>(axis.size);
    boxes[i] = static_cast<cuuint32_t>(axis.box * axis.step), steps[i] = static_cast<cuuint32_t>(axis.step);
    if (i == 0) continue;
    const auto stride = axis.size == 1 ? 16 : axis.stride * bytes;
    if (stride <= 0 || stride % 16 != 0) return false;
    strides[i - 1] = static_cast<cuuint64_t>(stride);
  }
  return function(&map, type, 5, data, sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, ahead, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool map_rows(RowMap& map, const Rows& rows, std::int64_t channels, const Grid& grid, std::int64_t heads,
              std::int64_t batch, bool once) {
  if (!rows.vectors) return false;
  const auto along = [&](int i) { return Axis{grid.size[i], rows.sequence[i], grid.extent[i], grid.step[i]}; };
  const Axis channel{channels, 1, 64};
  map.heads = map.log_step = 0;
  const auto step = grid.step[2];
  if (grid.size[0] == 1 && grid.size[1] == 1 && grid.extent[2] == 64 && step > 1 && (step & (step - 1)) == 0 &&
      grid.size[2] % step == 0) {
    // Two axes: for a box that takes every step-th row, TMA would otherwise go through all rows.
    while (1 << map.log_step < step) ++map.log_step;
    return encode(map.map, rows.data, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
                  {channel,
                   {grid.size[2] / step, rows.sequence[2] * step, 64},
                   {step, rows.sequence[2]},
                   {heads, rows.head},
                   {batch, rows.batch}});
  }
  if (grid.size[0] == 1 && grid.extent[0] == 1) {
    return encode(map.map, rows.data, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
                  {channel, along(2), along(1), {heads, rows.head}, {batch, rows.batch}},
                  once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  }
  if (heads > 1 && batch > 1 && rows.batch != heads * rows.head) return false;
  map.heads = static_cast<std::int32_t>(heads);
  return encode(map.map, rows.data, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
                {channel, along(2), along(1), along(0), {heads * batch, heads > 1 ? rows.head : rows.batch}});
}

bool map_double_rows(CUtensorMap& map, const Rows& rows, std::int64_t channels, std::int64_t length, int box_rows,
                     std::int64_t heads, std::int64_t batch) {
  return rows.vectors && encode(map, rows.data, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8,
                                {{channels, 1, 16},
                                 {length, rows.sequence[2], box_rows},
                                 {1, 1},
                                 {heads, rows.head},
                                 {batch, rows.batch}});
}

bool map_bias(CUtensorMap& map, const Bias& bias) {
  const int bytes = static_cast<int>(element_size(bias.type));
  if (bytes > 4 || bias.stride[3] != 1) return false;
  const auto along = [&](int i) { return Axis{bias.stride[i] == 0 ? 1 : bias.size[i], bias.stride[i]}; };
  auto query = along(2);
  query.box = 64;
  return encode(map, bias.data, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, bytes,
                {{bias.size[3], 1, 128 / bytes}, query, along(1), along(0), {1, 1}});
}

}  // namespace anyflash::cuda
