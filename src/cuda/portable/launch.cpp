#include "cuda/portable/launch.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "cuda/common/device.h"
#include "cuda/common/device_plan.h"
#include "cuda/common/errors.h"
#include "cuda/common/memory.h"
#include "cuda/portable/decode.h"
#include "problem/tensor.h"

namespace anyflash::cuda {
namespace {

constexpr int largest_depth = 256;
constexpr double log2_e = 1.4426950408889634;

int driver_version() {
  static const int known = [] {
    int version = 0;
    check(cudaDriverGetVersion(&version), "asking for the driver's version");
    return version;
  }();
  return known;
}

/// Does every row begin on 16 bytes, with contiguous channels?
bool whole_vectors(const Problem& problem, const Operand& operand) {
  if (operand.channel != 1 || reinterpret_cast<std::uintptr_t>(operand.data) % 16 != 0) return false;
  const auto numbers = static_cast<std::int64_t>(16 / element_size(problem.type));  // a power of 2
  const auto strides = operand.batch | operand.head | operand.sequence[0] | operand.sequence[1] | operand.sequence[2];
  return (strides & (numbers - 1)) == 0;
}

}  // namespace

Rows rows_of(const Problem& problem, const Operand& operand) {
  return {operand.data,
          operand.batch,
          operand.head,
          operand.channel,
          {operand.sequence[0], operand.sequence[1], operand.sequence[2]},
          whole_vectors(problem, operand)};
}

Numbers numbers_of(const RowStatistic& statistic) {
  return {statistic.data, 0, statistic.batch, statistic.head, statistic.query, 0};
}
Numbers numbers_of(const Bias& bias) {
  return {bias.data, int(bias.type), bias.stride[0], bias.stride[1], bias.stride[2], bias.stride[3]};
}
Numbers numbers_of(const HeadNumbers& numbers) {
  return {numbers.data, int(numbers.type), numbers.batch, numbers.head, 0, 0};
}

int padded_depth(const Problem& problem) {
  const auto width = std::max<std::int64_t>(problem.d_qk, std::min<std::int64_t>(problem.d_v, largest_depth));
  return width <= 64 ? 64 : width <= 128 ? 128 : largest_depth;
}

bool is_general(const Problem& problem) {
  const double scale = problem.type == ElementType::float64 ? problem.scale : static_cast<float>(problem.scale);
  return problem.softcap > 0 || problem.bias.given() || problem.alibi.given() || !(scale > 0) ||
         (element_size(problem.type) == 2 && problem.scale * log2_e > double{std::numeric_limits<float>::max()});
}

bool allows_tf32(const Problem& problem) {
  return problem.allow_tf32 && problem.type == ElementType::float32 && !has_few_rows(problem);
}
bool takes_tf32(const Problem& problem) { return allows_tf32(problem) && !has_groups(problem.device); }

bool plain_rows(const Problem& problem, const rules::Grid& grid) {
  return problem.dimensions == 1 && grid.extent[2] == rules::volume(grid.extent) && grid.step[2] == 1;
}

bool alibi_is_linear(const Problem& problem, const ExecutionPlan& plan) {
  if (!problem.alibi.given()) return true;
  const auto& program = plan.groups[0].program;
  const auto& axis = program.axis[2];
  return plain_rows(problem, plan.query_grid) && plain_rows(problem, plan.key_grid) && !plan.masks_on_device &&
         !may_differ_in_batch(problem) && !program.restarts && axis.q_step == 1 && axis.k_step == 1 && axis.r < 1 << 24;
}
std::int32_t alibi_offset(const ExecutionPlan& plan) {
  const auto& axis = plan.groups[0].program.axis[2];
  return axis.q_offset - axis.k_offset;
}

void check_pointers(const Problem& problem) {
  const std::pair<const char*, const void*> tensors[] = {{"dout", problem.dout.data},
                                                         {"query", problem.q.data},
                                                         {"key", problem.k.data},
                                                         {"value", problem.v.data},
                                                         {"out", problem.out.data},
                                                         {"lse", problem.lse.data},
                                                         {"row_sum", problem.row_sum.data},
                                                         {"row_max", problem.row_max.data},
                                                         {"dlse", problem.dlse.data},
                                                         {"bias", problem.bias.data},
                                                         {"alibi_slopes", problem.alibi.data},
                                                         {"sink", problem.sink.data},
                                                         {"dq", problem.dq.data},
                                                         {"dk", problem.dk.data},
                                                         {"dv", problem.dv.data},
                                                         {"dbias", problem.dbias.data},
                                                         {"dsink", problem.dsink.data},
                                                         {"workspace", problem.workspace}};
  for (const auto& [name, data] : tensors) check_pointer(name, data, problem.device);
  if (!problem.tables_on_device) return;
  const std::pair<const char*, const void*> tables[] = {{"key_lengths", problem.key_lengths.data},
                                                        {"page_table", problem.pages.table},
                                                        {"cu_seqlens_q", problem.cu_seqlens_q.data},
                                                        {"cu_seqlens_k", problem.cu_seqlens_k.data}};
  for (const auto& [name, data] : tables) check_pointer(name, data, problem.device);
}

void check_tasks(double tasks) {
  constexpr double counted_beyond = 0x10000;  // how far past the last task persistent thread blocks count
  if (tasks + counted_beyond > std::numeric_limits<std::int32_t>::max()) {
    throw Error(Error::Kind::unsupported,
                "query: more than 2^31 blocks over all heads and batch entries are not offered on cuda");
  }
}

void allow_shared_memory(const void* function, int bytes, int device) {
  struct Allowed {
    std::atomic<const void*> function{nullptr};
    std::atomic<std::uint64_t> devices{0};
  };
  static Allowed all[256];  // kernels, in order of first use
  for (auto& one : all) {
    const void* none = nullptr;
    one.function.compare_exchange_strong(none, function);
    if (one.function != function) continue;
    if (one.devices.load() >> device & 1) return;
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "preparing a kernel");
    one.devices |= std::uint64_t{1} << device;
    return;
  }
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "preparing a kernel");
}

std::int64_t launched_blocks(std::int64_t tasks, bool rarely_needed, Device device) {
  return rarely_needed ? std::min<std::int64_t>(tasks, 2 * facts_of(device).multiprocessors) : tasks;
}

void launch(const void* function, std::int64_t blocks, int threads, int shared_bytes, void* args, cudaStream_t stream,
            bool early) {
  void* parameters[] = {args};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  // Drivers before CUDA 12.3 do not support it in a graph.
  const bool may = early && (driver_version() >= 12030 || !capturing(stream));
  config.attrs = &attribute, config.numAttrs = may ? 1 : 0;
  check(cudaLaunchKernelExC(&config, function, parameters), "launching a kernel");
}

}  // namespace anyflash::cuda
