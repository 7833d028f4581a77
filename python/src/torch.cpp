// PyTorch's tensors by DLPack's C functions, or, in versions of PyTorch without them, by their attributes: for small
// calls faster than a DLPack capsule. Nothing of PyTorch is linked. Unusual tensors are left to DLPack's capsules,
// whose Python side has the error messages.
#include <anyflash/dlpack.h>

#include <algorithm>

#include "arrays.h"
#include "dlpack_exchange.h"

namespace anyflash::python {
namespace {

// Kept as long as the process, as in arrays.cpp.
struct Torch {
  nb::object tensor, parameter, empty_like;
  const dlpack::ExchangeApi* exchange;  // null in PyTorch before 2.10
  nb::object dtype[8];                  // by ElementType
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

/// The capsule's functions of the known major version; null if there are none.
const dlpack::ExchangeApi* exchange_of(nb::handle capsule) {
  if (capsule.is_none()) return nullptr;
  auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::capsule_name));
  if (api == nullptr) throw nb::python_error();
  while (api != nullptr && api->version.major != dlpack::known_major) api = api->previous;
  return api != nullptr && api->view_of_object != nullptr ? api : nullptr;
}

/// Reads by DLPack's C functions, which ignore subclasses and lazy negation.
bool read_quickly(nb::handle array, TensorView& view) {
  if (torch->exchange == nullptr || !is_plain_tensor(array)) return false;
  dlpack::Tensor tensor{};
  if (torch->exchange->view_of_object(array.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  try {
    view = from_dlpack(tensor);
  } catch (const Error&) {
    return false;
  }
  return array.attr(torch->is_neg)().is(Py_False);
}

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

/// A tensor with memory of its own on the CPU.
bool cpu_view(nb::handle array, TensorView& view) {
  return is_plain_tensor(array) && torch_view(array, view) && view.device.kind == DeviceKind::cpu &&
         (view.data != nullptr || view.elements() == 0);
}

/// Prepends axes of size 1 until there are four; the strides stay.
void pad_shape(TensorView& view) {
  const auto end = view.shape.begin() + view.rank;
  std::fill(view.shape.begin(), std::copy_backward(view.shape.begin(), end, view.shape.begin() + 4), 1);
  view.rank = 4;
}

}  // namespace

void use_torch(nb::handle module, nb::handle exchange) {
  auto* found = new Torch{
      module.attr("Tensor"), module.attr("nn").attr("Parameter"), module.attr("empty_like"), exchange_of(exchange), {}};
  const char* names[] = {"float16", "bfloat16", "float32", "float64", "bool", "uint8", "int32", "int64"};
  for (int i = 0; i < 8; ++i) found->dtype[i] = module.attr(names[i]);
  torch = found;
}

bool is_plain_tensor(nb::handle array) {
  if (torch == nullptr) return false;
  const nb::handle type(reinterpret_cast<PyObject*>(Py_TYPE(array.ptr())));
  return type.is(torch->tensor) || type.is(torch->parameter);
}

bool torch_view(nb::handle array, TensorView& view) {
  if (torch == nullptr || PyObject_IsInstance(array.ptr(), torch->tensor.ptr()) != 1) return false;
  if (read_quickly(array, view)) return true;
  TensorView made;
  try {
    if (!read(array, made)) {
      PyErr_Clear();
      return false;
    }
  } catch (const nb::python_error&) {  // a tensor without memory of its own: sparse, batched, traced
    return false;
  }
  view = made;
  return true;
}

bool torch_covers(nb::handle query, nb::handle key, nb::handle value, nb::handle mask, nb::handle causal,
                  nb::handle enable_gqa) {
  TensorView q, k, v, m;
  if (!cpu_view(query, q) || !cpu_view(key, k) || !cpu_view(value, v)) return false;
  if (q.rank < 2 || q.rank > 4 || k.rank != q.rank || v.rank != q.rank || q.type > ElementType::float64 ||
      k.type != q.type || v.type != q.type || !PyBool_Check(causal.ptr()) || !PyBool_Check(enable_gqa.ptr())) {
    return false;
  }
  const int most_rank = q.rank;
  for (auto* view : {&q, &k, &v}) pad_shape(*view);
  const bool heads = enable_gqa.is(Py_True) ? k.shape[1] > 0 && q.shape[1] % k.shape[1] == 0 : q.shape[1] == k.shape[1];
  if (q.shape[0] != k.shape[0] || q.shape[0] != v.shape[0] || !heads || k.shape[1] != v.shape[1] ||
      k.shape[2] != v.shape[2] || q.shape[3] != k.shape[3]) {
    return false;
  }
  if (q.shape[3] < 1 || q.shape[3] > 256 || v.shape[3] < 1 || v.shape[3] > 512) return false;
  if (mask.is_none()) return true;
  if (causal.is(Py_True) || !cpu_view(mask, m) || m.type != ElementType::boolean) return false;
  if (m.rank < 2 || m.rank > most_rank) return false;
  pad_shape(m);
  const std::int64_t full[] = {q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  for (int i = 0; i < 4; ++i) {
    if (m.shape[i] != 1 && m.shape[i] != full[i]) return false;
  }
  return true;
}

nb::object new_tensor(std::span<const std::int64_t> shape, ElementType type, nb::handle example,
                      const TensorView& of_example) {
  if (torch == nullptr) throw Error(Error::Kind::value, "anyflash.torch: not imported, expected it before the call");
  const std::span like(of_example.shape.data(), std::size_t(of_example.rank));
  if (type == of_example.type && std::equal(shape.begin(), shape.end(), like.begin(), like.end())) {
    return torch->empty_like(example);
  }
  const nb::object sizes = nb::steal(PyTuple_New(Py_ssize_t(shape.size())));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SetItem(sizes.ptr(), Py_ssize_t(i), PyLong_FromLongLong(shape[i]));
  }
  const auto make = example.attr(torch->new_empty);
  return type == of_example.type ? make(sizes) : make(sizes, nb::arg("dtype") = torch->dtype[int(type)]);
}

}  // namespace anyflash::python
