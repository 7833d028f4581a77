// Python arrays as tensor views, without copies: NumPy by the buffer protocol, all others by DLPack.
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

/// The element types of an argument, for the error about a type that a view cannot express. All other types are left to
/// the library's own checks.
enum class Elements : std::uint8_t { numbers, indices, mask, table };

/// The caller: a user with arrays of any kind, or the PyTorch front end, whose tensors may require a gradient.
enum class Caller : std::uint8_t { anyone, torch };

/// The views of one call (or one rule), and the owners of their memory: with Caller::torch, the caller's own
/// references. Constructed and destroyed with the GIL held.
class Arrays {
 public:
  explicit Arrays(Caller caller = Caller::anyone) : caller_(caller) {}
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays();

  /// None gives a view that is not given. Errors call the argument `name`.
  TensorView input(nb::handle array, const char* name, Elements elements = Elements::numbers);
  /// As input, for a rule's table. It holds a PyTorch tensor, not its memory: for a rule that lives as long as a call.
  TensorView table_of_call(nb::handle array, const char* name);
  /// As input, but the memory must be writable.
  TensorView output(nb::handle array, const char* name);
  /// The view of an array made by new_array.
  TensorView made(nb::handle array, ElementType type);

  /// The inputs that are on a GPU.
  const std::vector<nb::object>& on_gpus() const { return on_gpus_; }

 private:
  static constexpr int most = 20;  // backward has 19

  TensorView view(nb::handle array, const char* name, Elements elements, bool writable);
  TensorView view_of(nb::handle array, const char* name, Elements elements, bool writable);
  TensorView numpy_view(nb::handle array, const char* name, Elements elements, bool writable);
  TensorView buffer_view(const char* name, ElementType type);  // of the last buffer
  TensorView dlpack_view(nb::handle array, const char* name, Elements elements, bool writable);

  Caller caller_;
  std::array<Py_buffer, most> buffers_;
  int buffer_count_ = 0;
  std::vector<nb::ndarray<nb::ro>> tensors_;
  std::vector<nb::object> on_gpus_, held_;
};

/// The tile machine on which the calling thread's arrays on the CPU run, or null.
extern thread_local TileContext* tiles_of_arrays;
/// Calls begin with it: one that computes nothing has no report.
inline void forget_tile_report() {
  if (tiles_of_arrays) tiles_of_arrays->report.reset();
}

/// Finds NumPy's types; called once, when the module is made.
void find_numpy();

bool is_numpy(nb::handle array);

/// Tells the PyTorch front end's calls the module `torch`, and the capsule of dlpack_exchange.h or None.
void use_torch(nb::handle module, nb::handle exchange);
/// A torch.Tensor or torch.nn.Parameter, but not of a derived class.
bool is_plain_tensor(nb::handle array);
/// A view of a PyTorch tensor; false if it is not one, or if only DLPack can read or refuse it.
bool torch_view(nb::handle array, TensorView& view);
/// Is this a usual call of torch.nn.functional.scaled_dot_product_attention that attention supports as it is: plain
/// tensors of rank 4 on the CPU, the mask boolean or None? Also false if more has to be checked to know.
bool torch_covers(nb::handle query, nb::handle key, nb::handle value, nb::handle mask, nb::handle causal,
                  nb::handle enable_gqa);
/// An uninitialised tensor on the example's device, with its stride order if the shape is the same.
nb::object new_tensor(std::span<const std::int64_t> shape, ElementType type, nb::handle example,
                      const TensorView& of_example);

/// An uninitialised NumPy array for the result `name`, which will be returned as `example`'s kind; bfloat16 is uint16
/// until then. If the example is not NumPy's, it starts on a 64-byte boundary, so that JAX and TensorFlow need no copy.
/// On a GPU it is an array of the example's framework.
nb::object new_array(const char* name, std::span<const std::int64_t> shape, ElementType type, nb::handle example,
                     Device device);

/// A finished result for the caller: for a NumPy example bfloat16 gets its dtype; for others the Python side converts
/// it.
nb::object finished(nb::object array, ElementType type, nb::handle example);

/// The table of a rule (boolean, uint8, int32 or int64) as a NumPy array; `owner` owns the table's memory.
nb::object shared(const TensorView& table, nb::handle owner);

/// A uint16 NumPy array as an exporter of bfloat16 (`__dlpack__`).
nb::object as_bfloat16(nb::handle array);

/// Checked numbers and words among the arguments; ValueError or TypeError with the argument's name.
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
