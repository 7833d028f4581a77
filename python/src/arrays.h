// Arrays of Python as tensor views, without copies: NumPy by the buffer protocol, everything else by DLPack.
#pragma once

#include <anyflash/anyflash.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <span>
#include <vector>

namespace anyflash::python {

namespace nb = nanobind;

/// Which element types an argument may have, for the error on a type that a view cannot express. Of those that it can,
/// the library's own checks choose.
enum class Elements : std::uint8_t { numbers, indices, mask, table };

/// Who calls: a user with arrays of any kind, or the PyTorch front end, whose tensors may require a gradient.
enum class Caller : std::uint8_t { anyone, torch };

/// The views of one call (or one rule), and what keeps their memory in place: with Caller::torch, the caller's own
/// references. Made and destroyed with the GIL held.
class Arrays {
 public:
  explicit Arrays(Caller caller = Caller::anyone) : caller_(caller) {}
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays();

  /// None gives a view that is not given. `name` is the argument's name in errors.
  TensorView input(nb::handle array, const char* name, Elements elements = Elements::numbers);
  /// As input, of a rule's table. A tensor of PyTorch is held, not its memory: for a rule that lives as long as a call.
  TensorView table_of_call(nb::handle array, const char* name);
  /// As input, but the memory must be writable.
  TensorView output(nb::handle array, const char* name);
  /// Of an array that new_array made.
  TensorView made(nb::handle array, ElementType type);

  /// Those of the inputs that are on a GPU.
  const std::vector<nb::object>& on_gpus() const { return on_gpus_; }

 private:
  static constexpr int most = 20;  // backward has 19

  TensorView view(nb::handle array, const char* name, Elements elements, bool writable);
  TensorView numpy_view(nb::handle array, const char* name, Elements elements, bool writable);
  TensorView buffer_view(const char* name, ElementType type);  // of the last buffer
  TensorView dlpack_view(nb::handle array, const char* name, Elements elements, bool writable);

  Caller caller_;
  std::array<Py_buffer, most> buffers_;
  int buffer_count_ = 0;
  std::vector<nb::ndarray<nb::ro>> tensors_;
  std::vector<nb::object> on_gpus_, held_;
};

/// Finds NumPy's types; called once, when the module is made.
void find_numpy();

bool is_numpy(nb::handle array);

/// Tells the PyTorch front end's calls of the module `torch`, and of the capsule of dlpack_exchange.h or None.
void use_torch(nb::handle module, nb::handle exchange);
/// A torch.Tensor or torch.nn.Parameter, not of a class that is derived from them.
bool is_plain_tensor(nb::handle array);
/// A view of a tensor of PyTorch; false if it is none, or one that takes DLPack to read or to refuse.
bool torch_view(nb::handle array, TensorView& view);
/// Is this a usual call of torch.nn.functional.scaled_dot_product_attention that attention covers as it is: plain
/// tensors of rank 4 on the CPU, the mask boolean or None? False too where it takes another look to know.
bool torch_covers(nb::handle query, nb::handle key, nb::handle value, nb::handle mask, nb::handle causal,
                  nb::handle enable_gqa);
/// An uninitialised tensor on the example's device, with its order of strides where the shape is the same.
nb::object new_tensor(std::span<const std::int64_t> shape, ElementType type, nb::handle example,
                      const TensorView& of_example);

/// An uninitialised NumPy array for the result `name` that will be of `example`'s kind; bfloat16 is uint16 for now. For
/// an example that is not NumPy's it starts on a 64-byte boundary: JAX and TensorFlow then take it without a copy. On a
/// GPU it is an array of the example's framework.
nb::object new_array(const char* name, std::span<const std::int64_t> shape, ElementType type, nb::handle example,
                     Device device);

/// A finished result for the caller: bfloat16 in the dtype of a NumPy example; for others the Python side does it.
nb::object finished(nb::object array, ElementType type, nb::handle example);

/// The table of a rule (boolean, uint8, int32 or int64) as a NumPy array; `owner` keeps the table's memory.
nb::object shared(const TensorView& table, nb::handle owner);

/// A uint16 NumPy array as an exporter of bfloat16 (`__dlpack__`).
nb::object as_bfloat16(nb::handle array);

/// Numbers and words among the arguments; ValueError or TypeError with the argument's name.
double real(nb::handle number, const char* name);
std::int64_t integer(nb::handle number, const char* name, const char* expected = "an integer");
PerDimension per_dimension(nb::handle value, const char* name);  ///< an integer, or a sequence of 1 to 3
bool flag(nb::handle value, const char* name);
std::string_view utf8(nb::handle text, const char* name);      ///< valid as long as `text`
std::string echoed(nb::handle object, std::size_t most = 40);  ///< str(object) as anyflash::shown
std::string class_name(nb::handle object);
Align align_of(nb::handle word);
Layout layout_of(nb::handle word);

}  // namespace anyflash::python
