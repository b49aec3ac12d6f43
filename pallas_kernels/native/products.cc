// Matrix products with kernels (weights, [in, out]) that oneDNN has packed, which XLA calls.
//
// oneDNN is loaded when LoadProducts is called, by its C interface, which is stable within a major version: so
// neither building nor loading this file needs it. Its own threads would compete with XLA's for the cores, so it is
// held to one thread per call, and a product is cut into tiles that XLA's pool computes:
//
//               columns of the kernel, packed slice by slice
//             +--------+--------+--------+-----+
//        rows | tile 0 | tile 2 | tile 4 | ... |      a tile: kTileRows rows of x times a whole slice
//             +--------+--------+--------+-----+
//             | tile 1 | tile 3 | tile 5 | ... |
//             +--------+--------+--------+-----+

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Pointers to oneDNN's objects; their types don't matter here.
using Handle = void*;

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

struct Argument {
  int kind;
  Handle memory;
};

// Values of oneDNN's enumerations.
constexpr int kMajorVersion = 3, kSequential = 1, kOpenMp = 2;
constexpr int kCpu = 1, kInOrder = 1, kBFloat16 = 2, kFloat32 = 3, kAnyFormat = 1;
constexpr int kStrictMath = 0, kScratchpadOfUser = 1;
constexpr int kImplementationName = 8, kSourceShape = 129, kKernelShape = 131, kResultShape = 133, kScratchpad = 136;
constexpr int kSource = 1, kResult = 17, kKernel = 33, kScratchpadArgument = 80;

constexpr size_t kAlignment = 64;
// The largest tile; smaller ones spend a larger share on reading the kernel or x. Slices are as narrow as
// kMinColumns where there are many threads.
constexpr int64_t kTileRows = 128, kMaxColumns = 256, kMinColumns = 64;

// oneDNN's functions, and what is shared by all calls.
struct OneDnn {
  const Version* (*dnnl_version)();
  int (*dnnl_engine_create)(Handle*, int kind, size_t index);
  int (*dnnl_stream_create)(Handle*, Handle engine, unsigned flags);
  int (*dnnl_stream_destroy)(Handle);
  int (*dnnl_memory_create)(Handle*, Handle shape, Handle engine, void* data);
  int (*dnnl_memory_destroy)(Handle);
  int (*dnnl_memory_desc_create_with_strides)(Handle*, int rank, const int64_t* sizes, int type, const int64_t* strides);
  int (*dnnl_memory_desc_create_with_tag)(Handle*, int rank, const int64_t* sizes, int type, int tag);
  int (*dnnl_memory_desc_destroy)(Handle);
  size_t (*dnnl_memory_desc_get_size)(Handle);
  int (*dnnl_primitive_attr_create)(Handle*);
  int (*dnnl_primitive_attr_set_fpmath_mode)(Handle, int);
  int (*dnnl_primitive_attr_set_scratchpad_mode)(Handle, int);
  int (*dnnl_matmul_primitive_desc_create)(Handle*, Handle engine, Handle source, Handle kernel, Handle bias,
                                           Handle result, Handle attributes);
  int (*dnnl_reorder_primitive_desc_create)(Handle*, Handle from, Handle from_engine, Handle to, Handle to_engine,
                                            Handle attributes);
  int (*dnnl_primitive_desc_query)(Handle, int what, int index, void* result);
  Handle (*dnnl_primitive_desc_query_md)(Handle, int what, int index);
  int (*dnnl_primitive_desc_destroy)(Handle);
  int (*dnnl_primitive_create)(Handle*, Handle description);
  int (*dnnl_primitive_destroy)(Handle);
  int (*dnnl_primitive_execute)(Handle, Handle stream, int num_arguments, const Argument*);
  // Null in a build without threads.
  int (*omp_get_max_threads)();
  void (*omp_set_num_threads)(int);

  Handle engine, attributes;
  int64_t num_threads;
};

// Set once, by LoadProducts, before any handler runs.
const OneDnn* library = nullptr;

void Check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("oneDNN: ") + what + " failed with status " + std::to_string(status));
}

// While it lives, oneDNN starts no threads for its caller.
class OneThread {
 public:
  OneThread() : before_(library->omp_get_max_threads ? library->omp_get_max_threads() : 1) { Set(1); }
  ~OneThread() { Set(before_); }

 private:
  void Set(int n) {
    if (before_ != 1) library->omp_set_num_threads(n);
  }
  const int before_;
};

// Bytes that are reused from call to call.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  void* Get(size_t size) {
    if (size > size_) {
      std::free(data_);
      size_ = (size + kAlignment - 1) / kAlignment * kAlignment;
      data_ = std::aligned_alloc(kAlignment, size_);
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// What each thread has of its own.
struct Workspace {
  Handle stream = nullptr;
  Buffer scratchpad, tile;

  Workspace() { Check(library->dnnl_stream_create(&stream, library->engine, kInOrder), "dnnl_stream_create"); }
  ~Workspace() { library->dnnl_stream_destroy(stream); }
};

Workspace& workspace() {
  static thread_local Workspace mine;
  return mine;
}

// An object of oneDNN's that is destroyed with its owner.
struct Owned {
  const Handle handle;
  int (*const destroy)(Handle);

  ~Owned() { destroy(handle); }
  Owned(const Owned&) = delete;
};

// An array of the caller, as oneDNN wants it.
Owned Memory(Handle shape, const void* data) {
  Handle memory;
  Check(library->dnnl_memory_create(&memory, shape, library->engine, const_cast<void*>(data)), "dnnl_memory_create");
  return {memory, library->dnnl_memory_destroy};
}

Handle DenseShape(int64_t rows, int64_t columns, int type, int64_t row_stride, int64_t column_stride = 1) {
  const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
  Handle shape;
  Check(library->dnnl_memory_desc_create_with_strides(&shape, 2, sizes, type, strides), "a dense shape");
  return shape;
}

// The product of an [m, k] array with a slice of n columns.
struct Product {
  Handle primitive, source, kernel, result, scratchpad;
  size_t kernel_bytes, scratchpad_bytes;
  const char* implementation;
};

Product MakeProduct(int64_t m, int64_t k, int64_t n, int type, int result_type, Handle kernel) {
  const OneThread one_thread;
  Handle description;
  Check(library->dnnl_matmul_primitive_desc_create(&description, library->engine, DenseShape(m, k, type, k), kernel,
                                                   nullptr, DenseShape(m, n, result_type, n), library->attributes),
        "dnnl_matmul_primitive_desc_create");
  Product p;
  p.source = library->dnnl_primitive_desc_query_md(description, kSourceShape, 0);
  p.kernel = library->dnnl_primitive_desc_query_md(description, kKernelShape, 0);
  p.result = library->dnnl_primitive_desc_query_md(description, kResultShape, 0);
  p.scratchpad = library->dnnl_primitive_desc_query_md(description, kScratchpad, 0);
  p.kernel_bytes = library->dnnl_memory_desc_get_size(p.kernel);
  p.scratchpad_bytes = library->dnnl_memory_desc_get_size(p.scratchpad);
  Check(library->dnnl_primitive_desc_query(description, kImplementationName, 0, &p.implementation), "a name");
  Check(library->dnnl_primitive_create(&p.primitive, description), "dnnl_primitive_create");
  return p;
}

using ProductKey = std::tuple<int64_t, int64_t, int64_t, int, int>;

// oneDNN chooses the layout of a slice for a whole tile of rows; products of any number of rows then take it.
const Product& FindOrMakeProduct(std::map<ProductKey, Product>& made, int64_t m, int64_t k, int64_t n, int type,
                                 int result_type) {
  const ProductKey key(m, k, n, type, result_type);
  const auto found = made.find(key);
  if (found != made.end()) return found->second;
  Handle kernel;
  if (m == kTileRows && result_type == type) {
    const int64_t sizes[] = {k, n};
    Check(library->dnnl_memory_desc_create_with_tag(&kernel, 2, sizes, type, kAnyFormat), "a free shape");
  } else {
    kernel = FindOrMakeProduct(made, kTileRows, k, n, type, type).kernel;
  }
  return made.emplace(key, MakeProduct(m, k, n, type, result_type, kernel)).first->second;
}

// Products are made once per shape and kept: a program has few shapes, and making one compiles code.
const Product& GetProduct(int64_t m, int64_t k, int64_t n, int type, int result_type) {
  static std::mutex mutex;
  static auto& made = *new std::map<ProductKey, Product>();
  const std::lock_guard<std::mutex> lock(mutex);
  return FindOrMakeProduct(made, m, k, n, type, result_type);
}

void Execute(const Product& p, const void* source, const void* kernel, void* result) {
  Workspace& mine = workspace();
  const Owned from = Memory(p.source, source), packed = Memory(p.kernel, kernel), to = Memory(p.result, result);
  const Owned scratchpad = Memory(p.scratchpad, mine.scratchpad.Get(p.scratchpad_bytes));
  const Argument arguments[] = {{kSource, from.handle},
                                {kKernel, packed.handle},
                                {kResult, to.handle},
                                {kScratchpadArgument, scratchpad.handle}};
  Check(library->dnnl_primitive_execute(p.primitive, mine.stream, 4, arguments), "dnnl_primitive_execute");
}

// How the columns of a kernel are cut; the last slice may be narrower.
struct Slices {
  int64_t columns, width, count;
  size_t bytes;  // of each packed slice but the last
  size_t total_bytes;

  Slices(int64_t rows, int64_t columns, int type) : columns(columns) {
    const int64_t share = (columns + library->num_threads - 1) / library->num_threads;
    width = std::clamp((share + kMinColumns - 1) / kMinColumns * kMinColumns, kMinColumns, kMaxColumns);
    count = (columns + width - 1) / width;
    bytes = GetProduct(kTileRows, rows, std::min(width, columns), type, type).kernel_bytes;
    total_bytes = (count - 1) * bytes + GetProduct(kTileRows, rows, Width(count - 1), type, type).kernel_bytes;
  }
  int64_t Width(int64_t i) const { return std::min(width, columns - i * width); }
};

// Calls work(0), ..., work(count - 1) on the threads of the pool and on this one, and returns when all have returned.
// This thread waits for no task that another has not begun, so it does not matter if the pool is busy.
template <class F>
void ParallelFor(ffi::ThreadPool pool, int64_t count, const F& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::string error;
  };
  const auto state = std::make_shared<State>();
  const auto run = [state, count, work] {
    const OneThread one_thread;
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      try {
        work(i);
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->error = error.what();
      }
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([run] { run(); });
  run();
  // What the others have begun ends within microseconds.
  while (state->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
  if (!state->error.empty()) throw std::runtime_error(state->error);
}

int TypeOf(ffi::DataType type) {
  if (type == ffi::DataType::F32) return kFloat32;
  if (type == ffi::DataType::BF16) return kBFloat16;
  throw std::invalid_argument("products are of float32 and bfloat16");
}

size_t BytesOf(int type) { return type == kFloat32 ? 4 : 2; }

template <class F>
ffi::Error Guarded(const F& body) {
  if (library == nullptr) return ffi::Error::Internal("oneDNN was not loaded");
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

// Packs a kernel [in, out], or its transpose.
ffi::Error PackKernel(ffi::ThreadPool pool, ffi::AnyBuffer kernel, ffi::Result<ffi::Buffer<ffi::U8>> packed,
                      bool transposed) {
  return Guarded([&] {
    const auto shape = kernel.dimensions();
    const int64_t rows = shape[transposed], columns = shape[!transposed];
    const int type = TypeOf(kernel.element_type());
    const Slices slices(rows, columns, type);
    if (packed->element_count() != slices.total_bytes) throw std::invalid_argument("packed has another size");
    const int64_t row_stride = transposed ? 1 : columns, column_stride = transposed ? rows : 1;
    const char* const from = static_cast<const char*>(kernel.untyped_data());
    char* const to = static_cast<char*>(packed->untyped_data());
    ParallelFor(pool, slices.count, [=](int64_t i) {
      const int64_t width = slices.Width(i);
      const Product& product = GetProduct(kTileRows, rows, width, type, type);
      const Owned dense{DenseShape(rows, width, type, row_stride, column_stride), library->dnnl_memory_desc_destroy};
      Handle handle;
      Check(library->dnnl_reorder_primitive_desc_create(&handle, dense.handle, library->engine, product.kernel,
                                                        library->engine, nullptr),
            "dnnl_reorder_primitive_desc_create");
      const Owned description{handle, library->dnnl_primitive_desc_destroy};
      Check(library->dnnl_primitive_create(&handle, description.handle), "dnnl_primitive_create");
      const Owned reorder{handle, library->dnnl_primitive_destroy};
      const Owned source = Memory(dense.handle, from + i * slices.width * column_stride * BytesOf(type));
      const Owned result = Memory(product.kernel, to + i * slices.bytes);
      const Argument arguments[] = {{kSource, source.handle}, {kResult, result.handle}};
      Check(library->dnnl_primitive_execute(reorder.handle, workspace().stream, 2, arguments), "packing");
    });
  });
}

// Multiplies x [m, in] by a packed kernel.
ffi::Error MultiplyPacked(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> packed,
                          ffi::Result<ffi::AnyBuffer> result) {
  return Guarded([&] {
    const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = result->dimensions()[1];
    const int type = TypeOf(x.element_type()), result_type = TypeOf(result->element_type());
    const Slices slices(k, n, type);
    if (packed.element_count() != slices.total_bytes) throw std::invalid_argument("packed has another size");
    const char* const source = static_cast<const char*>(x.untyped_data());
    const char* const kernel = static_cast<const char*>(packed.untyped_data());
    char* const to = static_cast<char*>(result->untyped_data());
    const int64_t num_parts = (m + kTileRows - 1) / kTileRows;
    ParallelFor(pool, slices.count * num_parts, [=](int64_t tile) {
      const int64_t i = tile / num_parts, row = tile % num_parts * kTileRows;
      const int64_t rows = std::min(kTileRows, m - row), width = slices.Width(i);
      const size_t bytes = BytesOf(result_type);
      const Product& product = GetProduct(rows, k, width, type, result_type);
      const char* const from = source + row * k * BytesOf(type);
      char* const corner = to + (row * n + i * slices.width) * bytes;
      // oneDNN's fast products write results without gaps only.
      const bool is_dense = width == n || rows == 1;
      void* const tile_result = is_dense ? corner : workspace().tile.Get(rows * width * bytes);
      Execute(product, from, kernel + i * slices.bytes, tile_result);
      if (is_dense) return;
      for (int64_t r = 0; r < rows; r++) {
        std::memcpy(corner + r * n * bytes, static_cast<char*>(tile_result) + r * width * bytes, width * bytes);
      }
    });
  });
}

template <class F>
void Find(void* file, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(file, name));
  if (function == nullptr) throw std::runtime_error(std::string("it has no function ") + name);
}

const OneDnn* Load(const char* path) {
  void* const file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) throw std::runtime_error(std::string("it does not load: ") + dlerror());
  auto found = std::make_unique<OneDnn>();
  OneDnn& f = *found;
  Find(file, "dnnl_version", f.dnnl_version);
  const Version& version = *f.dnnl_version();
  if (version.major != kMajorVersion) {
    throw std::runtime_error("it is version " + std::to_string(version.major) + "." + std::to_string(version.minor) +
                             "." + std::to_string(version.patch) + "; allowed: 3.x");
  }
  if (version.cpu_runtime == kOpenMp) {
    Find(file, "omp_get_max_threads", f.omp_get_max_threads);
    Find(file, "omp_set_num_threads", f.omp_set_num_threads);
  } else if (version.cpu_runtime != kSequential) {
    throw std::runtime_error("its threads are of kind " + std::to_string(version.cpu_runtime) +
                             "; allowed: a build with OpenMP, or without threads");
  }
#define FIND(name) Find(file, #name, f.name)
  FIND(dnnl_engine_create);
  FIND(dnnl_stream_create);
  FIND(dnnl_stream_destroy);
  FIND(dnnl_memory_create);
  FIND(dnnl_memory_destroy);
  FIND(dnnl_memory_desc_create_with_strides);
  FIND(dnnl_memory_desc_create_with_tag);
  FIND(dnnl_memory_desc_destroy);
  FIND(dnnl_memory_desc_get_size);
  FIND(dnnl_primitive_attr_create);
  FIND(dnnl_primitive_attr_set_fpmath_mode);
  FIND(dnnl_primitive_attr_set_scratchpad_mode);
  FIND(dnnl_matmul_primitive_desc_create);
  FIND(dnnl_reorder_primitive_desc_create);
  FIND(dnnl_primitive_desc_query);
  FIND(dnnl_primitive_desc_query_md);
  FIND(dnnl_primitive_desc_destroy);
  FIND(dnnl_primitive_create);
  FIND(dnnl_primitive_destroy);
  FIND(dnnl_primitive_execute);
#undef FIND
  Check(f.dnnl_engine_create(&f.engine, kCpu, 0), "dnnl_engine_create");
  Check(f.dnnl_primitive_attr_create(&f.attributes), "dnnl_primitive_attr_create");
  // Whatever the environment says, float32 is multiplied as float32.
  Check(f.dnnl_primitive_attr_set_fpmath_mode(f.attributes, kStrictMath), "dnnl_primitive_attr_set_fpmath_mode");
  // oneDNN's own scratchpads are shared by threads that run the same product.
  Check(f.dnnl_primitive_attr_set_scratchpad_mode(f.attributes, kScratchpadOfUser),
        "dnnl_primitive_attr_set_scratchpad_mode");
  // Counted once, since the layout of packed kernels depends on it.
  f.num_threads = std::max(1u, std::thread::hardware_concurrency());
  return found.release();
}

}  // namespace

// Loads oneDNN from a file, unless it is loaded. Returns null, or why it can't be used.
extern "C" const char* LoadProducts(const char* path) {
  static std::mutex mutex;
  static auto& problem = *new std::string();
  const std::lock_guard<std::mutex> lock(mutex);
  if (library != nullptr) return nullptr;
  try {
    library = Load(path);
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

// Returns the bytes of a packed kernel of the given shape, 0 if oneDNN has nothing faster than plain loops for
// this processor.
extern "C" int64_t PackedBytes(int64_t rows, int64_t columns, bool is_float32) {
  try {
    const int type = is_float32 ? kFloat32 : kBFloat16;
    const Slices slices(rows, columns, type);
    const Product& product = GetProduct(kTileRows, rows, slices.Width(0), type, type);
    return std::strncmp(product.implementation, "brg", 3) == 0 ? slices.total_bytes : 0;
  } catch (const std::exception&) {
    return 0;
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PackKernelHandler, PackKernel,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(MultiplyPackedHandler, MultiplyPacked,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::AnyBuffer>());
