// Attention as handlers of XLA's foreign function interface, for JAX. Operands are row-major and read in place; results
// are written where XLA wants them. The options are one text, the attribute "call", so that a compiled program contains
// everything it needs and may be saved to disk. A text that was seen before is not parsed again.
#ifdef ANYFLASH_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <array>
#include <cctype>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "call_text.h"
#include "rule_object.h"
#include "xla_ffi.h"

namespace anyflash::python {
namespace {

// ---------------------------------------------------------------------------------------------------------- the call

/// The names of operands or results, and their index. Tables of the rule have the names in the rule's text, after a
/// colon.
struct Names {
  std::vector<std::string> names;

  int place(std::string_view name) const {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i] == name) return int(i);
    }
    return -1;
  }
};

/// The attribute "call", read. python/anyflash/jax/_call.py writes it.
struct Call {
  Names results, operands;
  std::string rule_text;
  bool has_tables = false;
  bool tables_on_host = false;  ///< in a call on a GPU
  Options options;              ///< everything except tensors; without the rule if it has tables
};

[[noreturn]] void fail_call(const std::string& what) {
  throw Error(Error::Kind::value, "call: " + what + ", expected what anyflash.jax writes");
}

/// Is this one of the words of a rule's text?
bool names(std::string_view text, std::string_view word) {
  const auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  for (auto at = text.find(word); at != text.npos; at = text.find(word, at + 1)) {
    const auto end = at + word.size();
    if ((at == 0 || !in_word(text[at - 1])) && (end == text.size() || !in_word(text[end]))) return true;
  }
  return false;
}

Call read_call(std::string_view text) {
  Call call;
  call_text::read_call(text, call.options, [&](const std::string& name, std::string_view value) {
    if (name == "results") call.results.names = call_text::parts_of(value, ' ');
    else if (name == "operands") call.operands.names = call_text::parts_of(value, ' ');
    else if (name == "rule") call.rule_text = value;
    else return false;
    return true;
  });
  for (const auto& name : call.operands.names) call.has_tables |= name[0] == ':';
  // Beside key_lengths the library needs document ids and cumulative lengths on the CPU, and all tables of a call in one
  // place.
  call.tables_on_host = (names(call.rule_text, "documents") || names(call.rule_text, "documents_packed")) &&
                        call.operands.place("key_lengths") >= 0;
  if (!call.has_tables) call.options.rule = parse_rule(call.rule_text);
  return call;
}

struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

/// A cache of calls by their text. A program has few; with many different ones the cache is cleared.
std::shared_ptr<const Call> call_of(std::string_view text) {
  static constexpr std::size_t most = 1024;
  static auto& known = *new std::unordered_map<std::string, std::shared_ptr<const Call>, Hash, std::equal_to<>>;
  static auto& mutex = *new std::shared_mutex;  // both outlive XLA's threads
  {
    const std::shared_lock lock(mutex);
    if (const auto found = known.find(text); found != known.end()) return found->second;
  }
  auto call = std::make_shared<const Call>(read_call(text));
  const std::unique_lock lock(mutex);
  if (known.size() >= most) known.clear();
  known.emplace(text, call);
  return call;
}

// ------------------------------------------------------------------------------------------------------- the tensors

ElementType type_of(int type) {
  switch (type) {
    case xla::f16: return ElementType::float16;
    case xla::bf16: return ElementType::bfloat16;
    case xla::f32: return ElementType::float32;
    case xla::f64: return ElementType::float64;
    case xla::pred: return ElementType::boolean;
    case xla::u8: return ElementType::uint8;
    case xla::s32: return ElementType::int32;
    case xla::s64: return ElementType::int64;
    default: throw Error(Error::Kind::type, "XLA's type " + std::to_string(type) + ", expected one of the library's");
  }
}

TensorView view_of(const xla::Buffer& buffer, Device device) {
  if (buffer.rank > TensorView::max_rank) {
    throw Error(Error::Kind::value, "rank " + std::to_string(buffer.rank) + ", expected at most 8");
  }
  TensorView view;
  view.data = buffer.data;
  view.type = type_of(buffer.type);
  view.device = device;
  view.rank = int(buffer.rank);
  for (int i = 0; i < view.rank; ++i) view.shape[i] = buffer.sizes[i];
  view.set_row_major_strides();
  return view;
}

/// The tensors of one execution by name.
class Tensors {
 public:
  Tensors(const Names& names, const xla::Buffers& buffers, Device device)
      : names_(names), buffers_(buffers), device_(device) {
    if (std::size_t(buffers.count) != names.names.size()) fail_call("names of other tensors");
  }
  /// A view that is not given if there is no such name.
  TensorView operator[](std::string_view name) const {
    const int i = names_.place(name);
    return i < 0 ? TensorView() : view_of(*buffers_.buffers[i], device_);
  }

 private:
  const Names& names_;
  const xla::Buffers& buffers_;
  Device device_;
};

/// The place of lengths, page tables and tables of rules: where XLA has them, or copies, if the library needs them on
/// the CPU. The call waits for the stream to make the copies.
class TablePlaces {
 public:
  TablePlaces(const Call& call, void* stream) : on_host_(call.tables_on_host), stream_(stream) {}

  TensorView operator()(TensorView view) {
    if (!on_host_ || !view.given() || view.device.kind == DeviceKind::cpu) return view;
#ifdef ANYFLASH_HAS_CUDA
    const auto bytes = std::size_t(view.elements()) * element_size(view.type);
    memory_.push_back(std::make_unique<std::int64_t[]>(bytes / sizeof(std::int64_t) + 1));
    const auto stream = static_cast<cudaStream_t>(stream_);
    auto status = cudaMemcpyAsync(memory_.back().get(), view.data, bytes, cudaMemcpyDeviceToHost, stream);
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
    if (status != cudaSuccess) {
      cudaGetLastError();  // clears the error: XLA reads the last error too
      throw Error(Error::Kind::device, std::string("tables: ") + cudaGetErrorString(status));
    }
    view.data = memory_.back().get();
    view.device = {};
#endif
    return view;
  }

 private:
  bool on_host_;
  [[maybe_unused]] void* stream_;
  std::vector<std::unique_ptr<std::int64_t[]>> memory_;
};

Options options_of(const Call& call, const Tensors& operands, TablePlaces& placed, void* stream) {
  Options options = call.options;
  if (call.has_tables) {
    std::vector<std::pair<std::string, TensorView>> tables;  // one that is named twice is one table
    options.rule = parse_rule(call.rule_text, [&](const std::string& name) {
      for (const auto& [known, view] : tables) {
        if (known == name) return view;
      }
      return tables.emplace_back(name, placed(operands[":" + name])).second;
    });
  }
  for_each_tensor([&](const char* name, auto member, bool integers) {
    options.*member = integers ? placed(operands[name]) : operands[name];
  });
  options.stream = stream;
  return options;
}

void run_forward(const Call& call, const Tensors& operands, const Tensors& results, void* stream) {
  TablePlaces placed(call, stream);
  const auto options = options_of(call, operands, placed, stream);
  ForwardOutputs outputs;
  outputs.out = results["out"];
  outputs.lse = results["lse"];
  outputs.row_sum = results["l"];
  outputs.row_max = results["m"];
  forward(operands["q"], operands["k"], operands["v"], outputs, options);
}

void run_backward(const Call& call, const Tensors& operands, const Tensors& results, void* stream) {
  TablePlaces placed(call, stream);
  const auto options = options_of(call, operands, placed, stream);
  const BackwardInputs inputs{operands["dout"], operands["out"], operands["lse"], operands["dlse"]};
  const Gradients gradients{results["dq"], results["dk"], results["dv"], results["dbias"], results["dsink"]};
  backward(inputs, operands["q"], operands["k"], operands["v"], gradients, options);
}

// ------------------------------------------------------------------------------------------------------ the handlers

xla::Error* error(const xla::Api& api, const char* line, xla::ErrorCode code) {
  xla::ErrorCreateArgs args{sizeof(args), nullptr, line, code};
  return api.error_create(&args);
}

/// When a handler is registered, XLA asks for its version: the answer is the caller's own, if it is supported. The
/// first XLA that asks does not tell its version.
bool answer_metadata(const xla::CallFrame& frame) {
  if (frame.extensions == nullptr || frame.extensions->type != xla::metadata_extension) return false;
  auto& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  metadata.version.major = 0;
  metadata.version.minor = frame.api ? std::min(frame.api->version.minor, xla::newest_minor) : xla::oldest_minor;
  return true;
}

std::string_view call_text(const xla::Attributes& attributes) {
  for (std::int64_t i = 0; i < attributes.count; ++i) {
    const auto& name = *attributes.names[i];
    if (std::string_view(name.data, name.size) != "call" || attributes.types[i] != xla::text_attribute) continue;
    const auto& text = *static_cast<const xla::Text*>(attributes.values[i]);
    return {text.data, text.size};
  }
  fail_call("no such attribute");
}

Device device_of(DeviceKind kind, [[maybe_unused]] const xla::Buffers& operands) {
#ifdef ANYFLASH_HAS_CUDA
  if (kind == DeviceKind::cuda) {
    int index = 0;
    cudaPointerAttributes found{};
    for (std::int64_t i = 0; i < operands.count; ++i) {
      const void* const data = operands.buffers[i]->data;
      if (data && cudaPointerGetAttributes(&found, data) == cudaSuccess && found.type == cudaMemoryTypeDevice) {
        return {kind, found.device};
      }
    }
    if (cudaGetDevice(&index) == cudaSuccess) return {kind, index};
    cudaGetLastError();  // clears the error: XLA reads the last error too
    throw Error(Error::Kind::device, "query: on no GPU that can be found");
  }
#endif
  return {kind, 0};
}

using Run = void (*)(const Call&, const Tensors& operands, const Tensors& results, void* stream);

template <Run run, DeviceKind kind>
xla::Error* handler(xla::CallFrame* frame) {
  if (answer_metadata(*frame)) return nullptr;
  try {
    void* stream = nullptr;
    if constexpr (kind == DeviceKind::cuda) {
      xla::StreamGetArgs args{sizeof(args), nullptr, frame->context, nullptr};
      if (auto* const failed = frame->api->stream_get(&args)) return failed;
      stream = args.stream;
    }
    const auto call = call_of(call_text(frame->attributes));
    const auto device = device_of(kind, frame->arguments);
    run(*call, Tensors(call->operands, frame->arguments, device), Tensors(call->results, frame->results, device),
        stream);
    return nullptr;
  } catch (const Error& failed) {
    const bool memory = failed.kind() == Error::Kind::memory;
    return error(*frame->api, failed.what(), memory ? xla::resource_exhausted : xla::invalid_argument);
  } catch (const std::exception& failed) {
    return error(*frame->api, failed.what(), xla::internal);
  }
}

template <DeviceKind kind>
nb::dict handlers() {
  nb::dict made;
  made["anyflash_forward"] = nb::capsule(reinterpret_cast<void*>(&handler<&run_forward, kind>));
  made["anyflash_backward"] = nb::capsule(reinterpret_cast<void*>(&handler<&run_backward, kind>));
  return made;
}

}  // namespace

/// jax_handlers(): {platform: {name: capsule}}, as jax.ffi.register_ffi_target takes them.
void add_jax(nb::module_& module) {
  module.def("jax_handlers", [] {
    nb::dict platforms;
    platforms["cpu"] = handlers<DeviceKind::cpu>();
#ifdef ANYFLASH_HAS_CUDA
    platforms["CUDA"] = handlers<DeviceKind::cuda>();
#endif
    return platforms;
  });
}

}  // namespace anyflash::python
