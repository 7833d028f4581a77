#include "arrays.h"

#include <anyflash/names.h>

#include <bit>
#include <cstring>

namespace anyflash::python {
namespace {

// Kept as long as the process: the interpreter may be gone when static objects are destroyed.
struct NumPy {
  nb::object ndarray, masked_array, empty, uint16, truth;
  nb::object dtype[8];  // by ElementType; bfloat16 is uint16, since NumPy has none
};
NumPy* numpy = nullptr;

/// Raises the Python error. A line begins with the argument's name and a colon, unless it is about a part of a rule
/// ("rule local: window"), which has its own.
[[noreturn]] void fail(Error::Kind kind, const char* name, const std::string& line) {
  throw Error(kind, std::string(name) + (std::strchr(name, ':') ? " " : ": ") + line);
}

[[noreturn]] void wrong_type(const char* name, const std::string& came, Elements elements) {
  static constexpr const char* expected[] = {"float16, bfloat16, float32 or float64", "int32 or int64",
                                             "boolean or uint8", "boolean, uint8, int32 or int64"};
  fail(Error::Kind::type, name, "type " + came + ", expected " + expected[int(elements)]);
}

/// The element type of a buffer; false if it is not supported. `format` is in the language of Python's struct module.
bool type_of_format(std::string_view format, std::int64_t size, ElementType& type) {
  static_assert(std::endian::native == std::endian::little);
  if (format.find_first_of("@=<^") == 0) format.remove_prefix(1);
  if (format.size() != 1) return false;
  switch (format[0]) {
    case 'e': type = ElementType::float16; return true;
    case 'f': type = ElementType::float32; return true;
    case 'd': type = ElementType::float64; return true;
    case '?': type = ElementType::boolean; return true;
    case 'B': type = ElementType::uint8; return true;
    case 'i':
    case 'l':
    case 'q': type = size == 4 ? ElementType::int32 : ElementType::int64; return true;
    default: return false;
  }
}

bool type_of_dlpack(nb::dlpack::dtype dtype, ElementType& type) {
  struct Known {
    nb::dlpack::dtype_code code;
    int bits;
    ElementType type;
  };
  using Code = nb::dlpack::dtype_code;
  static constexpr Known table[] = {
      {Code::Float, 16, ElementType::float16}, {Code::Bfloat, 16, ElementType::bfloat16},
      {Code::Float, 32, ElementType::float32}, {Code::Float, 64, ElementType::float64},
      {Code::Bool, 8, ElementType::boolean},   {Code::UInt, 8, ElementType::uint8},
      {Code::Int, 32, ElementType::int32},     {Code::Int, 64, ElementType::int64},
  };
  for (const auto& known : table) {
    if (dtype.code == std::uint8_t(known.code) && dtype.bits == known.bits && dtype.lanes == 1) {
      type = known.type;
      return true;
    }
  }
  return false;
}

/// Pinned host memory counts as CPU memory, managed memory as GPU memory.
Device device_of(int type, int index, const char* name) {
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return {};
  if (type == nb::device::cuda::value || type == nb::device::cuda_managed::value) return {DeviceKind::cuda, index};
  fail(Error::Kind::device, name, "on a device of DLPack type " + std::to_string(type) + ", expected the CPU or CUDA");
}

void check_rank(std::int64_t rank, const char* name) {
  if (rank > TensorView::max_rank) {
    fail(Error::Kind::value, name,
         "rank " + std::to_string(rank) + ", expected at most " + std::to_string(TensorView::max_rank));
  }
}

void check_aligned(const TensorView& view, const char* name) {
  const auto size = element_size(view.type);
  if (reinterpret_cast<std::uintptr_t>(view.data) % size != 0 && view.elements() != 0) {
    fail(Error::Kind::value, name,
         std::string("data pointer misaligned, expected a multiple of ") + std::to_string(size) + " bytes for " +
             element_name(view.type));
  }
}

/// Lengths and tables stay on the CPU.
TensorView on_tiles(TensorView view, Elements elements = Elements::numbers) {
  if (tiles_of_arrays && elements == Elements::numbers && view.device.kind == DeviceKind::cpu)
    view.device = {DeviceKind::tiles, 0};
  return view;
}

}  // namespace

thread_local TileContext* tiles_of_arrays = nullptr;

void find_numpy() {
  const auto module = nb::module_::import_("numpy");
  numpy = new NumPy{module.attr("ndarray"), module.attr("ma").attr("MaskedArray"),
                    module.attr("empty"),   module.attr("uint16"),
                    module.attr("bool_"),   {}};
  const char* names[] = {"float16", "uint16", "float32", "float64", "bool", "uint8", "int32", "int64"};
  for (int i = 0; i < 8; ++i) numpy->dtype[i] = module.attr("dtype")(names[i]);
}

bool is_numpy(nb::handle array) {
  return nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))).is(numpy->ndarray) ||
         PyObject_IsInstance(array.ptr(), numpy->ndarray.ptr()) == 1;
}

Arrays::~Arrays() {
  for (int i = 0; i < buffer_count_; ++i) PyBuffer_Release(&buffers_[i]);
}

TensorView Arrays::input(nb::handle array, const char* name, Elements elements) {
  return view(array, name, elements, false);
}

TensorView Arrays::table_of_call(nb::handle array, const char* name) {
  TensorView view;
  if (!is_plain_tensor(array) || !torch_view(array, view) || view.device.kind != DeviceKind::cpu ||
      view.type < ElementType::boolean) {  // floating-point types are refused there, after the check for a gradient
    return input(array, name, Elements::table);
  }
  held_.push_back(nb::borrow(array));
  check_aligned(view, name);
  return view;
}

TensorView Arrays::output(nb::handle array, const char* name) { return view(array, name, Elements::numbers, true); }

TensorView Arrays::view(nb::handle array, const char* name, Elements elements, bool writable) {
  if (array.is_none()) return {};
  return on_tiles(view_of(array, name, elements, writable), elements);
}

TensorView Arrays::view_of(nb::handle array, const char* name, Elements elements, bool writable) {
  TensorView view;
  if (caller_ == Caller::torch && torch_view(array, view)) {
    check_aligned(view, name);
    return view;
  }
  if (is_numpy(array)) {
    view = numpy_view(array, name, elements, writable);
  } else if (caller_ == Caller::anyone) {
    view = dlpack_view(array, name, elements, writable);
  } else {
    const bool tensor = nb::hasattr(array, "detach") && !nb::isinstance<nb::type_object>(array);
    view = dlpack_view(tensor ? nb::object(array.attr("detach")()) : nb::borrow(array), name, elements, writable);
  }
  check_aligned(view, name);
  return view;
}

TensorView Arrays::numpy_view(nb::handle array, const char* name, Elements elements, bool writable) {
  if (PyObject_IsInstance(array.ptr(), numpy->masked_array.ptr()) == 1) {
    fail(Error::Kind::type, name, "type MaskedArray, expected a plain array (a mask goes into the rule)");
  }
  auto& buffer = buffers_[buffer_count_];
  TensorView view;
  bool known = false;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_STRIDES | PyBUF_FORMAT) == 0) {
    ++buffer_count_;
    known = type_of_format(buffer.format, buffer.itemsize, view.type);
  } else {  // NumPy exports only its own types; bfloat16 is from ml_dtypes
    PyErr_Clear();
    if (nb::str(array.attr("dtype").attr("name")).equal(nb::str("bfloat16"))) {
      const nb::object bits = array.attr("view")(numpy->uint16);
      if (PyObject_GetBuffer(bits.ptr(), &buffer, PyBUF_STRIDES | PyBUF_FORMAT) != 0) throw nb::python_error();
      ++buffer_count_;
      view.type = ElementType::bfloat16;
      known = true;
    }
  }
  if (!known) {
    const nb::object dtype = array.attr("dtype");
    const bool swapped = !nb::cast<bool>(dtype.attr("isnative"));
    wrong_type(name, echoed(dtype) + (swapped ? " (bytes swapped)" : ""), elements);
  }
  if (writable && buffer.readonly) fail(Error::Kind::value, name, "read-only, expected a writable array");
  return buffer_view(name, view.type);
}

TensorView Arrays::buffer_view(const char* name, ElementType type) {
  const auto& buffer = buffers_[buffer_count_ - 1];
  check_rank(buffer.ndim, name);
  TensorView view;
  view.type = type;
  view.data = buffer.buf;
  view.rank = buffer.ndim;
  for (int i = 0; i < buffer.ndim; ++i) {
    view.shape[i] = buffer.shape[i];
    if (buffer.shape[i] > 1 && buffer.strides[i] % buffer.itemsize != 0) {
      fail(Error::Kind::value, name,
           "stride " + std::to_string(buffer.strides[i]) + " bytes, expected a multiple of " +
               std::to_string(buffer.itemsize) + " for " + element_name(type));
    }
    view.strides[i] = buffer.strides[i] / buffer.itemsize;
  }
  return view;
}

TensorView Arrays::made(nb::handle array, ElementType type) {
  if (!is_numpy(array)) return view(array, "result", Elements::numbers, false);
  if (PyObject_GetBuffer(array.ptr(), &buffers_[buffer_count_], PyBUF_STRIDES | PyBUF_WRITABLE) != 0)
    throw nb::python_error();
  ++buffer_count_;
  return on_tiles(buffer_view("result", type));
}

TensorView Arrays::dlpack_view(nb::handle array, const char* name, Elements elements, bool writable) {
  // The Python side makes the capsule: it knows the frameworks' special cases, and its errors name the argument.
  const nb::object capsule = nb::module_::import_("anyflash._arrays").attr("capsule_of")(array, name, writable);
  nb::ndarray<nb::ro> tensor;
  nb::ndarray<> own;  // nanobind accepts a capsule this way only if it is not marked read-only
  if (writable && nb::try_cast(capsule, own, false)) {
    tensor = nb::ndarray<nb::ro>(own);
  } else if (!nb::try_cast(capsule, tensor, false)) {
    PyErr_Clear();
    fail(Error::Kind::type, name, "its __dlpack__ gave no DLPack tensor");
  } else if (writable) {
    fail(Error::Kind::value, name, "read-only, expected a writable array");
  }
  tensors_.push_back(tensor);
  TensorView view;
  view.device = device_of(tensor.device_type(), tensor.device_id(), name);
  if (view.device.kind == DeviceKind::cuda && !writable) on_gpus_.push_back(nb::borrow(array));
  if (!type_of_dlpack(tensor.dtype(), view.type)) {
    static constexpr const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    const auto dtype = tensor.dtype();
    const auto number = [](int n) { return std::to_string(n); };
    wrong_type(name,
               (dtype.code < 7 ? kinds[dtype.code] : "code " + number(dtype.code) + " of ") + number(dtype.bits) +
                   (dtype.lanes == 1 ? "" : " of " + number(dtype.lanes) + " lanes"),
               elements);
  }
  check_rank(std::int64_t(tensor.ndim()), name);
  view.data = const_cast<void*>(tensor.data());
  view.rank = int(tensor.ndim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = tensor.shape(i);
    view.strides[i] = tensor.stride(i);
    if (view.shape[i] < 0) fail(Error::Kind::value, name, "a negative size in its shape, expected none");
  }
  return view;
}

nb::object new_array(const char* name, std::span<const std::int64_t> shape, ElementType type, nb::handle example,
                     Device device) {
  const nb::object sizes = nb::steal(PyTuple_New(Py_ssize_t(shape.size())));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SetItem(sizes.ptr(), Py_ssize_t(i), PyLong_FromLongLong(shape[i]));
  }
  if (device.kind == DeviceKind::cuda) {
    const auto make = nb::module_::import_("anyflash._arrays").attr("device_empty");
    return make(name, example, device.index, sizes, element_name(type));
  }
  const auto& dtype = numpy->dtype[int(type)];
  const auto make = is_numpy(example) ? numpy->empty : nb::module_::import_("anyflash._arrays").attr("aligned_empty");
  try {
    return make(sizes, dtype);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_MemoryError) && !error.matches(PyExc_ValueError)) throw;  // ValueError: over 2^63 bytes
    fail(Error::Kind::memory, name,
         std::string("not enough memory for ") + element_name(type) + " of shape " + nb::repr(sizes).c_str());
  }
}

nb::object finished(nb::object array, ElementType type, nb::handle example) {
  if (type != ElementType::bfloat16 || !is_numpy(example)) return array;
  return array.attr("view")(example.attr("dtype"));
}

nb::object shared(const TensorView& table, nb::handle owner) {
  const std::vector<std::size_t> shape(table.shape.begin(), table.shape.begin() + table.rank);
  const auto dtype = table.type == ElementType::boolean ? nb::dtype<bool>()
                     : table.type == ElementType::uint8 ? nb::dtype<std::uint8_t>()
                     : table.type == ElementType::int32 ? nb::dtype<std::int32_t>()
                                                        : nb::dtype<std::int64_t>();
  const nb::ndarray<nb::numpy> view(table.data, shape.size(), shape.data(), owner, table.strides.data(), dtype);
  return nb::cast(view);
}

nb::object as_bfloat16(nb::handle array) {
  const auto bits = nb::cast<nb::ndarray<>>(array);
  std::vector<std::size_t> shape(bits.ndim());
  for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = bits.shape(i);
  const nb::dlpack::dtype bfloat16{std::uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
  return nb::cast(nb::ndarray<nb::array_api>(bits.data(), shape.size(), shape.data(), array, nullptr, bfloat16));
}

std::string echoed(nb::handle object, std::size_t most) {
  const nb::str text(object);
  const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return shown({PyBytes_AsString(bytes.ptr()), std::size_t(PyBytes_Size(bytes.ptr()))}, most);
}

std::string class_name(nb::handle object) { return echoed(object.type().attr("__name__")); }

double real(nb::handle number, const char* name) {
  const double value = PyFloat_AsDouble(number.ptr());
  if (value == -1.0 && PyErr_Occurred()) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    if (too_large) fail(Error::Kind::value, name, "expected a number that float64 holds");
    fail(Error::Kind::type, name, "type " + class_name(number) + ", expected a number");
  }
  return value;
}

std::int64_t integer(nb::handle number, const char* name, const char* expected) {
  if (PyLong_Check(number.ptr())) {  // most are, and need no new object
    int beyond = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &beyond);
    if (beyond == 0) return value;
  }
  const bool truth = PyObject_IsInstance(number.ptr(), numpy->truth.ptr()) == 1;  // unlike Python's bool it is no index
  const nb::object index = nb::steal(truth ? PyNumber_Long(number.ptr()) : PyNumber_Index(number.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    fail(Error::Kind::type, name, "type " + class_name(number) + ", expected " + expected);
  }
  const long long value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    fail(Error::Kind::value, name, "expected an integer of 64 bits");
  }
  return value;
}

PerDimension per_dimension(nb::handle value, const char* name) {
  const bool sequence = PySequence_Check(value.ptr()) && !PyUnicode_Check(value.ptr()) && !PyBytes_Check(value.ptr());
  const auto count = sequence ? PySequence_Size(value.ptr()) : -1;
  if (count < 0) {  // an array without axes is one number
    PyErr_Clear();
    return integer(value, name, "an integer or a sequence of 1 to 3");
  }
  if (count < 1 || count > 3) fail(Error::Kind::value, name, "length " + std::to_string(count) + ", expected 1 to 3");
  PerDimension numbers = 0;
  numbers.count = int(count);
  for (int i = 0; i < count; ++i) {
    const nb::object item = nb::steal(PySequence_GetItem(value.ptr(), i));
    if (!item.is_valid()) throw nb::python_error();
    numbers.value[i] = integer(item, name);
  }
  return numbers;
}

bool flag(nb::handle value, const char* name) {
  bool known = PyBool_Check(value.ptr()) || PyObject_IsInstance(value.ptr(), numpy->truth.ptr()) == 1;
  if (!known && PyLong_Check(value.ptr())) {
    int beyond = 0;
    const auto number = PyLong_AsLongAndOverflow(value.ptr(), &beyond);
    known = beyond == 0 && (number == 0 || number == 1);
  }
  if (!known) fail(Error::Kind::type, name, "type " + class_name(value) + ", expected True or False");
  return PyObject_IsTrue(value.ptr()) == 1;
}

std::string_view utf8(nb::handle text, const char* name) {
  if (!PyUnicode_Check(text.ptr())) fail(Error::Kind::type, name, "type " + class_name(text) + ", expected str");
  Py_ssize_t size = 0;
  const char* characters = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (characters) return {characters, std::size_t(size)};
  PyErr_Clear();
  fail(Error::Kind::value, name, "a str with surrogates, expected one that UTF-8 can hold");
}

Align align_of(nb::handle word) { return Align(place_of_name("align", utf8(word, "align"), names_of(align_names))); }

Layout layout_of(nb::handle word) {
  return Layout(place_of_name("layout", utf8(word, "layout"), names_of(layout_names)));
}

}  // namespace anyflash::python
