#include "tensors.h"

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>

namespace anyflash::tensorflow {
namespace {

constexpr std::pair<TF_DataType, ElementType> types[] = {
    {TF_HALF, ElementType::float16},   {TF_BFLOAT16, ElementType::bfloat16}, {TF_FLOAT, ElementType::float32},
    {TF_DOUBLE, ElementType::float64}, {TF_BOOL, ElementType::boolean},      {TF_UINT8, ElementType::uint8},
    {TF_INT32, ElementType::int32},    {TF_INT64, ElementType::int64}};

TF_DataType type_of(ElementType type) {
  for (const auto& [theirs, ours] : types) {
    if (ours == type) return theirs;
  }
  throw Error(Error::Kind::type, "an element type that TensorFlow does not have");
}

TF_Code code_of(Error::Kind kind) { return kind == Error::Kind::memory ? TF_RESOURCE_EXHAUSTED : TF_INVALID_ARGUMENT; }

}  // namespace

void Status::check(const char* what) const {
  if (!ok()) throw Error(Error::Kind::value, std::string(what) + ": " + TF_Message(status_));
}

void Status::set_to_what_was_thrown() {
  try {
    throw;
  } catch (const Error& error) {
    TF_SetStatus(status_, code_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    TF_SetStatus(status_, TF_RESOURCE_EXHAUSTED, "attention: not enough memory");
  } catch (const std::exception& error) {
    TF_SetStatus(status_, TF_INTERNAL, error.what());
  } catch (...) {
    TF_SetStatus(status_, TF_INTERNAL, "attention: an unknown error");
  }
}

Shaped shaped_of(const TF_Tensor* tensor, Device device, const char* name) {
  Shaped shaped;
  auto& [view, shape] = shaped;
  for (int i = 0; i < TF_NumDims(tensor); ++i) shape.push_back(TF_Dim(tensor, i));
  view.rank = std::min(int(shape.size()), TensorView::max_rank);
  const auto theirs = TF_TensorType(tensor);
  bool known = false;
  for (const auto& [type, ours] : types) {
    if (type != theirs) continue;
    view.type = ours;
    known = true;
  }
  if (!known) throw Error(Error::Kind::type, std::string(name) + ": TensorFlow's type " + std::to_string(theirs));
  std::copy(shape.end() - view.rank, shape.end(), view.shape.begin());
  if (view.rank > 0) {
    view.shape[0] = std::accumulate(shape.begin(), shape.end() - view.rank + 1, std::int64_t{1}, std::multiplies<>());
  }
  view.set_row_major_strides();
  view.device = device;
  view.data = TF_TensorData(tensor);
  return shaped;
}

TensorView Shaped::whole(const char* name) const {
  if (int(shape.size()) > view.rank) {
    throw Error(Error::Kind::value, std::string(name) + ": rank " + std::to_string(shape.size()) +
                                        ", expected at most " + std::to_string(TensorView::max_rank));
  }
  return view;
}

Context::Context(TF_OpKernelContext* context, DeviceKind kind)
    : context_(context),
      device_{kind, kind == DeviceKind::cuda ? TF_GetDeviceId(context) : 0},
      inputs_(TF_NumInputs(context)) {
  tensors_.reserve(inputs_ + TF_NumOutputs(context));
}

Shaped Context::next_shaped(const char* name, bool host) {
  if (next_ >= inputs_) throw Error(Error::Kind::value, std::string(name) + ": not given");
  TF_Tensor* tensor = nullptr;
  Status status;
  TF_GetInput(context_, next_++, &tensor, status);
  status.check(name);
  tensors_.emplace_back(tensor);
  return shaped_of(tensor, host ? Device{} : device_, name);
}

TensorView Context::next(const char* name, bool host) { return next_shaped(name, host).whole(name); }

Shaped Context::make(const std::vector<std::int64_t>& shape, ElementType type, const char* name) {
  std::size_t bytes = element_size(type);
  for (const auto size : shape) bytes *= std::size_t(size);
  Status status;
  tensors_.emplace_back(
      TF_AllocateOutput(context_, made_++, type_of(type), shape.data(), int(shape.size()), bytes, status));
  if (!status.ok()) throw Error(Error::Kind::memory, std::string(name) + ": " + TF_Message(status));
  return shaped_of(tensors_.back().get(), device_, name);
}

}  // namespace anyflash::tensorflow
