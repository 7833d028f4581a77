// PyTorch's tensors by their own attributes: quicker on small calls than a DLPack capsule, and the same in any version
// of PyTorch, of which nothing is linked. What is unusual here is left to DLPack, which knows what to say about it.
#include "arrays.h"

namespace anyflash::python {
namespace {

// Kept for the life of the process, as in arrays.cpp.
struct Torch {
  nb::object tensor, empty_like;
  nb::object dtype[8];  // by ElementType
  nb::str data_ptr{"data_ptr"}, shape{"shape"}, stride{"stride"}, element{"dtype"}, is_cpu{"is_cpu"},
      is_cuda{"is_cuda"}, get_device{"get_device"}, is_neg{"is_neg"}, new_empty{"new_empty"};
};
Torch* torch = nullptr;

bool type_of(nb::handle dtype, ElementType& type) {
  for (int i = 0; i < 8; ++i) {
    if (!dtype.is(torch->dtype[i])) continue;
    type = ElementType(i);
    return true;
  }
  return false;
}

std::int64_t item(nb::handle tuple, int i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple.ptr(), i)); }

bool read(nb::handle array, TensorView& view) {
  if (!type_of(array.attr(torch->element), view.type) || array.attr(torch->is_neg)().is(Py_True)) return false;
  if (!array.attr(torch->is_cpu).is(Py_True)) {
    if (!array.attr(torch->is_cuda).is(Py_True)) return false;
    view.device = {DeviceKind::cuda, nb::cast<int>(array.attr(torch->get_device)())};
  }
  const nb::object shape = array.attr(torch->shape), strides = array.attr(torch->stride)();
  const auto rank = PyTuple_Size(shape.ptr());
  if (rank > TensorView::max_rank) return false;
  view.rank = int(rank);
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = item(shape, i);
    view.strides[i] = item(strides, i);
  }
  view.data = PyLong_AsVoidPtr(nb::object(array.attr(torch->data_ptr)()).ptr());
  return PyErr_Occurred() == nullptr;
}

}  // namespace

void use_torch(nb::handle module) {
  auto* found = new Torch{module.attr("Tensor"), module.attr("empty_like"), {}};
  const char* names[] = {"float16", "bfloat16", "float32", "float64", "bool", "uint8", "int32", "int64"};
  for (int i = 0; i < 8; ++i) found->dtype[i] = module.attr(names[i]);
  torch = found;
}

bool torch_view(nb::handle array, TensorView& view) {
  if (torch == nullptr || PyObject_IsInstance(array.ptr(), torch->tensor.ptr()) != 1) return false;
  TensorView made;
  try {
    if (!read(array, made)) {
      PyErr_Clear();
      return false;
    }
  } catch (const nb::python_error&) {  // it has no memory of its own: sparse, batched, traced
    return false;
  }
  view = made;
  return true;
}

nb::object new_tensor(std::span<const std::int64_t> shape, ElementType type, nb::handle example) {
  const nb::object like = example.attr(torch->shape);
  bool same = example.attr(torch->element).is(torch->dtype[int(type)]) &&
              std::size_t(PyTuple_Size(like.ptr())) == shape.size();
  for (std::size_t i = 0; same && i < shape.size(); ++i) same = item(like, int(i)) == shape[i];
  if (same) return torch->empty_like(example);
  const nb::object sizes = nb::steal(PyTuple_New(Py_ssize_t(shape.size())));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SetItem(sizes.ptr(), Py_ssize_t(i), PyLong_FromLongLong(shape[i]));
  }
  return example.attr(torch->new_empty)(sizes, nb::arg("dtype") = torch->dtype[int(type)]);
}

}  // namespace anyflash::python
