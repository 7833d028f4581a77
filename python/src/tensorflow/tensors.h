// TensorFlow's tensors as views, and its status as the library's errors.
#pragma once

#include <anyflash/anyflash.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c_abi.h"

namespace anyflash::tensorflow {

class Status {
 public:
  Status() : status_(TF_NewStatus()) {}
  ~Status() { TF_DeleteStatus(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  operator TF_Status*() { return status_; }
  bool ok() const { return TF_GetCode(status_) == TF_OK; }
  void check(const char* what) const;  ///< throws Error unless it is ok
  /// Sets the exception being thrown; for a catch (...) block.
  void set_to_what_was_thrown();

 private:
  TF_Status* status_;
};

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

/// A tensor of any rank, row-major. If the rank is more than a view supports, the view's leading axes are joined.
struct Shaped {
  TensorView view;
  std::vector<std::int64_t> shape;
  TensorView whole(const char* name) const;  ///< the view; throws Error if axes were joined
};

/// Throws Error if views do not support the type.
Shaped shaped_of(const TF_Tensor* tensor, Device device, const char* name);

/// The inputs of a kernel call, and the outputs that it makes.
class Context {
 public:
  Context(TF_OpKernelContext* context, DeviceKind kind);

  /// The next input. `host`: it is in the host's memory on every device.
  Shaped next_shaped(const char* name, bool host = false);
  TensorView next(const char* name, bool host = false);  ///< throws Error if no view has its rank
  bool has_more() const { return next_ < inputs_; }
  int outputs() const { return TF_NumOutputs(context_); }
  /// The next output, uninitialised.
  Shaped make(const std::vector<std::int64_t>& shape, ElementType type, const char* name);

 private:
  TF_OpKernelContext* context_;
  Device device_;
  int inputs_, next_ = 0, made_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace anyflash::tensorflow
