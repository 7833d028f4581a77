// Tensor views from and to DLPack (https://dmlc.github.io/dlpack). Any version of dlpack.h works, included before or
// after this header: only DLTensor's standard members are used.
#pragma once

#include <string>

#include <anyflash/tensor.h>

namespace anyflash {
namespace detail {

// The standard's numbers. Older headers lack the name of bool, which came with version 0.7.
enum DlpackCode { dlpack_int = 0, dlpack_uint = 1, dlpack_float = 2, dlpack_bfloat = 4, dlpack_bool = 6 };
enum DlpackDevice { dlpack_cpu = 1, dlpack_cuda = 2, dlpack_cuda_host = 3, dlpack_cuda_managed = 13 };

struct DlpackType {
  ElementType type;
  int code, bits;
};
inline constexpr DlpackType dlpack_types[] = {
    {ElementType::float16, dlpack_float, 16}, {ElementType::bfloat16, dlpack_bfloat, 16},
    {ElementType::float32, dlpack_float, 32}, {ElementType::float64, dlpack_float, 64},
    {ElementType::boolean, dlpack_bool, 8},   {ElementType::uint8, dlpack_uint, 8},
    {ElementType::int32, dlpack_int, 32},     {ElementType::int64, dlpack_int, 64},
};

inline ElementType element_type_of_dlpack(const std::string& name, int code, int bits, int lanes) {
  if (lanes != 1)
    throw Error(Error::Kind::type, name + ": DLPack type of " + std::to_string(lanes) + " lanes, expected 1");
  for (const auto& known : dlpack_types) {
    if (known.code == code && known.bits == bits) return known.type;
  }
  throw Error(Error::Kind::type, name + ": DLPack type code " + std::to_string(code) + " of " + std::to_string(bits) +
                                     " bits, expected a type of anyflash::ElementType");
}

inline Device device_of_dlpack(const std::string& name, int type, int index) {
  if (type == dlpack_cpu || type == dlpack_cuda_host) return {};
  if (type == dlpack_cuda || type == dlpack_cuda_managed) return {DeviceKind::cuda, index};
  throw Error(Error::Kind::device,
              name + ": DLPack device type " + std::to_string(type) + ", expected the cpu or cuda");
}

}  // namespace detail

/// A view of a DLTensor's memory. Pinned host memory counts as CPU memory, managed memory as GPU memory. Null strides
/// mean row-major. Errors call the tensor `name`. Throws Error for types and devices that TensorView does not support,
/// for vector types, and for more than TensorView::max_rank axes.
template <typename DlpackTensor>
TensorView from_dlpack(const DlpackTensor& tensor, const std::string& name = "tensor") {
  TensorView view;
  view.type = detail::element_type_of_dlpack(name, tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
  view.device = detail::device_of_dlpack(name, static_cast<int>(tensor.device.device_type), tensor.device.device_id);
  if (tensor.ndim < 0 || tensor.ndim > TensorView::max_rank) {
    throw Error(Error::Kind::value, name + ": rank " + std::to_string(tensor.ndim) + ", expected 0 to " +
                                        std::to_string(TensorView::max_rank));
  }
  if (tensor.ndim > 0 && !tensor.shape) throw Error(Error::Kind::value, name + ": DLPack shape pointer null");
  view.rank = static_cast<int>(tensor.ndim);
  for (int i = 0; i < view.rank; ++i) view.shape[i] = tensor.shape[i];
  if (tensor.strides) {
    for (int i = 0; i < view.rank; ++i) view.strides[i] = tensor.strides[i];
  } else {
    view.set_row_major_strides();
  }
  if (tensor.data) view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return view;
}

/// Fills a DLTensor; its shape and strides point into the view, which must outlive it. The view must be given.
template <typename DlpackTensor>
void to_dlpack(TensorView& view, DlpackTensor& tensor) {
  if (!view.given()) throw Error(Error::Kind::value, "tensor: not given, expected one to describe in DLPack");
  using Type = decltype(tensor.device.device_type);
  const bool cuda = view.device.kind == DeviceKind::cuda;
  tensor.data = view.data;
  tensor.device.device_type = static_cast<Type>(cuda ? detail::dlpack_cuda : detail::dlpack_cpu);
  tensor.device.device_id = view.device.index;
  tensor.ndim = view.rank;
  for (const auto& known : detail::dlpack_types) {
    if (known.type != view.type) continue;
    tensor.dtype.code = static_cast<decltype(tensor.dtype.code)>(known.code);
    tensor.dtype.bits = static_cast<decltype(tensor.dtype.bits)>(known.bits);
  }
  tensor.dtype.lanes = 1;
  tensor.shape = view.shape.data();
  tensor.strides = view.strides.data();
  tensor.byte_offset = 0;
}

}  // namespace anyflash
