#include <emu.h>
#include <cuda.h>
#include <sys/mman.h>
#include <vector>
namespace anyflash::cuda { alignas(1024) char memory[232448]; }
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
namespace emu {
Sync block_sync, named[16];
namespace {
struct Fiber { char* stack = nullptr; void* sp = nullptr; uint3 tid{}; bool done = false; };
std::vector<Fiber> fibers(1024);
int current = -1, count = 0, alive = 0;
void* main_sp;
const std::function<void()>* work;
long idle = 0;
struct Warp { Sync sync; alignas(16) char data[2][32 * 128]; };
Warp warps[32];
void body() {
  (*work)();
  fibers[current].done = true;
  --alive; idle = 0;
  yield();
  abort();
}
void to(int next) {
  int from = current; current = next;
  threadIdx = fibers[next].tid;
  emu_switch(from < 0 ? &main_sp : &fibers[from].sp, fibers[next].sp);
}
}
void fail(const char* what) { fprintf(stderr, "emu: %s (block %u thread %u)\n", what, blockIdx.x, threadIdx.x); fflush(stderr); abort(); }
void yield() {
  if (alive == 0) { int from = current; current = -1; emu_switch(&fibers[from].sp, main_sp); return; }
  if (++idle > 4000L * count) fail("deadlock");
  int next = current;
  do next = next + 1 == count ? 0 : next + 1; while (fibers[next].done);
  if (next == current) return;
  to(next);
}
bool sync(Sync& s, int n, bool one) {
  const unsigned gen = s.gen;
  s.orr[gen & 1] |= one;
  if (++s.count == n) { s.count = 0; s.orr[(gen + 1) & 1] = 0; ++s.gen; idle = 0; }
  else while (s.gen == gen) yield();
  return s.orr[gen & 1];
}
char* exchange(const void* data, int bytes) {
  Warp& w = warps[warp()];
  char* buffer = w.data[w.sync.gen & 1];
  memcpy(buffer + 128 * lane(), data, bytes);
  sync(w.sync, 32, false);
  return buffer;
}
void run(const std::function<void()>& kernel, unsigned blocks, int threads) {
  if (threads % 32) fail("threads");
  work = &kernel;
  gridDim = dim3(blocks), blockDim = dim3(threads);
  constexpr size_t size = 512 << 10;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx = {b, 0, 0};
    block_sync = {};
    for (auto& s : named) s = {};
    for (auto& w : warps) w.sync = {};
    memset(anyflash::cuda::memory, 0xff, sizeof anyflash::cuda::memory);
    count = alive = threads, idle = 0;
    for (int i = 0; i < threads; ++i) {
      auto& f = fibers[i];
      if (!f.stack) f.stack = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      f.done = false, f.tid = {unsigned(i), 0, 0};
      void** top = reinterpret_cast<void**>(f.stack + size - 64);
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(&body);
      for (int r = 0; r < 6; ++r) *--top = nullptr;
      f.sp = top;
    }
    current = -1;
    to(0);
  }
}
}
namespace anyflash::cuda {
struct FakeMap { char* data; std::int64_t stride[5]; std::uint32_t size[5]; std::uint16_t box[5], step[5]; int bytes; };
static_assert(sizeof(FakeMap) <= 128);
template <class F> int each(const CUtensorMap* map, const int (&at)[5], const F& f) {
  FakeMap m; memcpy(&m, map, sizeof m);
  int n[5], total = 1;
  for (int i = 0; i < 5; ++i) n[i] = (m.box[i] + m.step[i] - 1) / m.step[i], total *= n[i];
  for (int i = 0; i < total; ++i) {
    int r = i; bool in = true; std::int64_t off = 0;
    for (int d = 0; d < 5; ++d) { const int x = at[d] + r % n[d] * m.step[d]; r /= n[d]; in &= x >= 0 && x < int(m.size[d]); off += x * m.stride[d]; }
    f(i * m.bytes, in ? m.data + off : nullptr, m.bytes);
  }
  return total * m.bytes;
}
void box_to_shared(char* to, const CUtensorMap* map, const int (&at)[5], int& bytes) {
  const auto base = std::uint32_t(to - memory);
  bytes = each(map, at, [&](int i, const char* from, int n) {
    std::uint32_t a = base + i; a ^= (a >> 7 & 7) << 4;
    if (from) memcpy(memory + a, from, n); else memset(memory + a, 0, n);
  });
}
void box_from_shared(const CUtensorMap* map, const char* from, const int (&at)[5]) {
  const auto base = std::uint32_t(from - memory);
  each(map, at, [&](int i, char* to, int n) { std::uint32_t a = base + i; a ^= (a >> 7 & 7) << 4; if (to) memcpy(to, memory + a, n); });
}
}
using anyflash::cuda::FakeMap;
static CUresult fake_encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* boxes, const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  FakeMap m{}; m.data = static_cast<char*>(data); m.bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2 : 4;
  for (int i = 0; i < 5; ++i) m.size[i] = sizes[i], m.stride[i] = i ? strides[i - 1] : m.bytes, m.box[i] = boxes[i], m.step[i] = steps[i];
  memcpy(map, &m, sizeof m); return CUDA_SUCCESS;
}
static int emu_major() { const char* m = getenv("EMU_MAJOR"); return m ? atoi(m) : 9; }
extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "?"; }
cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* n) { *n = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) { memset(p, 0, sizeof *p); strcpy(p->name, "emu"); p->major = emu_major(); p->multiProcessorCount = 2; p->sharedMemPerBlockOptin = 232448; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void*) { memset(a, 0, sizeof *a); a->type = cudaMemoryTypeDevice; return cudaSuccess; }
cudaError_t cudaMalloc(void** p, size_t n) { *p = aligned_alloc(256, (n + 511) / 256 * 256); memset(*p, 0xff, n); return cudaSuccess; }
cudaError_t cudaFree(void* p) { free(p); return cudaSuccess; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t* p, const cudaMemPoolProps*) { *p = nullptr; return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { free(p); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* a, const void* b, size_t n, cudaMemcpyKind, cudaStream_t) { memcpy(a, b, n); return cudaSuccess; }
cudaError_t cudaMemcpy(void* a, const void* b, size_t n, cudaMemcpyKind) { memcpy(a, b, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* a, int v, size_t n, cudaStream_t) { memset(a, v, n); return cudaSuccess; }
cudaError_t cudaMemset2DAsync(void* a, size_t pitch, int v, size_t w, size_t h, cudaStream_t) { for (size_t i = 0; i < h; ++i) memset(static_cast<char*>(a) + i * pitch, v, w); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { *s = nullptr; return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) { *s = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) { *f = reinterpret_cast<void*>(&fake_encode); *r = cudaDriverEntryPointSuccess; return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  if (c->gridDim.x == 0) emu::fail("empty grid");
  auto* const function = reinterpret_cast<void (*)(const void*)>(const_cast<void*>(f));
  const void* const a = args[0];
  if (getenv("EMU_TRACE")) fprintf(stderr, "launch %p %u x %u, %zu\n", f, c->gridDim.x, c->blockDim.x, c->dynamicSmemBytes);
  emu::run([&] { function(a); }, c->gridDim.x, int(c->blockDim.x));
  return cudaSuccess;
}
}
