// The FFI handlers of matrix products with packed kernels, computed by oneDNN. A kernel is a weight matrix [in, out].
//
// oneDNN's own threads would compete with XLA's threads for the cores. Each call of oneDNN is therefore limited to one
// thread, and a product is divided into tiles that XLA's threads compute:
//
//               columns of the kernel, packed slice by slice
//             +--------+--------+--------+-----+
//        rows | tile 0 | tile 2 | tile 4 | ... |      a tile: kTileRows rows of x times a whole slice
//             +--------+--------+--------+-----+
//             | tile 1 | tile 3 | tile 5 | ... |
//             +--------+--------+--------+-----+

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "attention.h"
#include "guarded.h"
#include "onednn.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged {
namespace {

namespace ffi = xla::ffi;
using namespace onednn;

constexpr size_t kAlignment = 64;
// Maximum sizes of a tile. In smaller tiles, reading the kernel or x takes a larger share of the time. If there are
// many threads, slices are narrower, but have at least kMinColumns columns.
constexpr int64_t kTileRows = 128, kMaxColumns = 256, kMinColumns = 64;

// Set once, by jax_paged_load_onednn, before any handler runs.
const OneDnn* library = nullptr;

// Prevents oneDNN from starting threads for the calling thread until the object is destroyed.
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

// The objects and buffers of one thread.
struct Workspace {
  Handle stream = nullptr;
  Buffer scratchpad, tile, factors;

  Workspace() { Check(library->dnnl_stream_create(&stream, library->engine, kInOrder), "dnnl_stream_create"); }
  ~Workspace() { library->dnnl_stream_destroy(stream); }
};

Workspace& workspace() {
  static thread_local Workspace mine;
  return mine;
}

// An object of oneDNN, destroyed by the destructor.
struct Owned {
  const Handle handle;
  int (*const destroy)(Handle);

  ~Owned() { destroy(handle); }
  Owned(const Owned&) = delete;
};

// Wraps an array of the caller for oneDNN.
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

// The product of an [m, k] array with a slice of n columns. If there is an activation, it is applied to the product,
// and the result is multiplied by `factors`, an [m, n] array; otherwise `factors` is null.
struct Product {
  Handle primitive, source, kernel, result, factors, scratchpad;
  size_t kernel_bytes, scratchpad_bytes;
  const char* implementation;
};

Product MakeProduct(int64_t m, int64_t k, int64_t n, int type, int result_type, int activation, Handle kernel) {
  const OneThread one_thread;
  Product p;
  p.factors = activation ? DenseShape(m, n, type, n) : nullptr;
  const Handle attributes = activation ? GatedAttributes(*library, activation, p.factors) : library->attributes;
  Handle description;
  Check(library->dnnl_matmul_primitive_desc_create(&description, library->engine, DenseShape(m, k, type, k), kernel,
                                                   nullptr, DenseShape(m, n, result_type, n), attributes),
        "dnnl_matmul_primitive_desc_create");
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

using ProductKey = std::tuple<int64_t, int64_t, int64_t, int, int, int>;

// oneDNN chooses the layout of a slice for kTileRows rows. Products with any number of rows then use this layout.
const Product& FindOrMakeProduct(std::map<ProductKey, Product>& made, int64_t m, int64_t k, int64_t n, int type,
                                 int result_type, int activation) {
  const ProductKey key(m, k, n, type, result_type, activation);
  const auto found = made.find(key);
  if (found != made.end()) return found->second;
  Handle kernel;
  if (m == kTileRows && result_type == type && !activation) {
    const int64_t sizes[] = {k, n};
    Check(library->dnnl_memory_desc_create_with_tag(&kernel, 2, sizes, type, kAnyFormat), "a free shape");
  } else {
    kernel = FindOrMakeProduct(made, kTileRows, k, n, type, type, 0).kernel;
  }
  return made.emplace(key, MakeProduct(m, k, n, type, result_type, activation, kernel)).first->second;
}

// Products are made once per shape and kept: a program has few shapes, and making one compiles code.
const Product& GetProduct(int64_t m, int64_t k, int64_t n, int type, int result_type, int activation = 0) {
  static std::mutex mutex;
  static auto& made = *new std::map<ProductKey, Product>();
  const std::lock_guard<std::mutex> lock(mutex);
  return FindOrMakeProduct(made, m, k, n, type, result_type, activation);
}

void Execute(const Product& p, const void* source, const void* kernel, void* result, const void* factors = nullptr) {
  Workspace& mine = workspace();
  const Owned from = Memory(p.source, source), packed = Memory(p.kernel, kernel), to = Memory(p.result, result);
  const Owned scratchpad = Memory(p.scratchpad, mine.scratchpad.Get(p.scratchpad_bytes));
  const Owned multipliers = Memory(p.factors ? p.factors : p.result, factors);
  const Argument arguments[] = {{kSource, from.handle},
                                {kKernel, packed.handle},
                                {kResult, to.handle},
                                {kScratchpadArgument, scratchpad.handle},
                                {kFactors, multipliers.handle}};
  Check(library->dnnl_primitive_execute(p.primitive, mine.stream, p.factors ? 5 : 4, arguments),
        "dnnl_primitive_execute");
}

// The division of the columns of a kernel into slices of `width` columns. The last slice may be narrower.
struct Slices {
  int64_t columns, width, count;
  size_t bytes;  // of each packed slice except the last
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

// Calls work(0), ..., work(count - 1) on XLA's threads. If calls throw errors, one of these errors is thrown.
template <class F>
void ForEachTile(ffi::ThreadPool pool, int64_t count, const F& work) {
  std::mutex mutex;
  std::string error;
  const auto guarded = [&](int64_t i) {
    const OneThread one_thread;
    try {
      work(i);
    } catch (const std::exception& e) {
      const std::lock_guard<std::mutex> lock(mutex);
      error = e.what();
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  parallel_for(count, helpers, [&](auto task) { pool.Schedule(std::move(task)); }, guarded);
  if (!error.empty()) throw std::runtime_error(error);
}

int TypeOf(ffi::DataType type) {
  if (type == ffi::DataType::F32) return kFloat32;
  if (type == ffi::DataType::BF16) return kBFloat16;
  throw std::invalid_argument("products are of float32 and bfloat16");
}

size_t BytesOf(int type) { return type == kFloat32 ? 4 : 2; }

template <class F>
ffi::Error WithLibrary(const F& body) {
  return library == nullptr ? ffi::Error::Internal("oneDNN was not loaded") : Guarded(body);
}

// Packs a kernel [in, out], or its transpose.
ffi::Error PackKernel(ffi::ThreadPool pool, ffi::AnyBuffer kernel, ffi::Result<ffi::Buffer<ffi::U8>> packed,
                      bool transposed) {
  return WithLibrary([&] {
    const auto shape = kernel.dimensions();
    const int64_t rows = shape[transposed], columns = shape[!transposed];
    const int type = TypeOf(kernel.element_type());
    const Slices slices(rows, columns, type);
    if (packed->element_count() != slices.total_bytes) throw std::invalid_argument("packed has another size");
    const int64_t row_stride = transposed ? 1 : columns, column_stride = transposed ? rows : 1;
    const char* const from = static_cast<const char*>(kernel.untyped_data());
    char* const to = static_cast<char*>(packed->untyped_data());
    ForEachTile(pool, slices.count, [&](int64_t i) {
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

// Calls compute(i, rows, width, from, to) for every tile. It multiplies `rows` rows of x, which begin at `from`, by
// slice i of a kernel, which has `width` columns, and writes the result [rows, width] to `to` without gaps.
template <class F>
void ForEachTileOf(ffi::ThreadPool pool, ffi::AnyBuffer x, const Slices& slices, ffi::AnyBuffer result, const F& compute) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = slices.columns;
  const size_t x_bytes = BytesOf(TypeOf(x.element_type())), bytes = BytesOf(TypeOf(result.element_type()));
  const char* const source = static_cast<const char*>(x.untyped_data());
  char* const destination = static_cast<char*>(result.untyped_data());
  const int64_t num_parts = (m + kTileRows - 1) / kTileRows;
  ForEachTile(pool, slices.count * num_parts, [&](int64_t tile) {
    const int64_t i = tile / num_parts, row = tile % num_parts * kTileRows;
    const int64_t rows = std::min(kTileRows, m - row), width = slices.Width(i);
    char* const corner = destination + (row * n + i * slices.width) * bytes;
    // oneDNN's fast products can only write results without gaps between rows.
    const bool is_dense = width == n || rows == 1;
    char* const to = is_dense ? corner : static_cast<char*>(workspace().tile.Get(rows * width * bytes));
    compute(i, rows, width, source + row * k * x_bytes, to);
    if (is_dense) return;
    for (int64_t r = 0; r < rows; r++) std::memcpy(corner + r * n * bytes, to + r * width * bytes, width * bytes);
  });
}

const char* SlicesOf(ffi::Buffer<ffi::U8> packed, const Slices& slices) {
  if (packed.element_count() != slices.total_bytes) throw std::invalid_argument("a packed kernel has another size");
  return reinterpret_cast<const char*>(packed.typed_data());
}

// Multiplies x [m, in] by a packed kernel.
ffi::Error MultiplyPacked(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> packed,
                          ffi::Result<ffi::AnyBuffer> result) {
  return WithLibrary([&] {
    const int64_t k = x.dimensions()[1];
    const int type = TypeOf(x.element_type()), result_type = TypeOf(result->element_type());
    const Slices slices(k, result->dimensions()[1], type);
    const char* const kernel = SlicesOf(packed, slices);
    ForEachTileOf(pool, x, slices, *result, [&](int64_t i, int64_t rows, int64_t width, const char* from, char* to) {
      Execute(GetProduct(rows, k, width, type, result_type), from, kernel + i * slices.bytes, to);
    });
  });
}

// Multiplies x by two packed kernels of the same shape, and returns activation(x gate) * (x up).
ffi::Error MultiplyGated(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> packed_gate,
                         ffi::Buffer<ffi::U8> packed_up, ffi::Result<ffi::AnyBuffer> result,
                         std::string_view activation) {
  return WithLibrary([&] {
    const int64_t k = x.dimensions()[1];
    const int type = TypeOf(x.element_type()), kind = ActivationOf(activation);
    const Slices slices(k, result->dimensions()[1], type);
    const char *const gate = SlicesOf(packed_gate, slices), *const up = SlicesOf(packed_up, slices);
    const auto multiply_silu = choose_kernels(std::numeric_limits<int64_t>::max()).multiply_silu;
    ForEachTileOf(pool, x, slices, *result, [&](int64_t i, int64_t rows, int64_t width, const char* from, char* to) {
      if (multiply_silu != nullptr && kind == kSwish && type == kBFloat16 && width % 32 == 0) {
        // oneDNN's activation takes half as long as a product, so multiply_silu is used instead.
        const Product& product = GetProduct(rows, k, width, type, kFloat32);
        const int64_t n = rows * width;
        float* const sums = static_cast<float*>(workspace().factors.Get(2 * n * sizeof(float)));
        Execute(product, from, gate + i * slices.bytes, sums);
        Execute(product, from, up + i * slices.bytes, sums + n);
        return multiply_silu(sums, sums + n, to, n);
      }
      void* const factors = workspace().factors.Get(rows * width * BytesOf(type));
      Execute(GetProduct(rows, k, width, type, type), from, up + i * slices.bytes, factors);
      Execute(GetProduct(rows, k, width, type, type, kind), from, gate + i * slices.bytes, to, factors);
    });
  });
}

}  // namespace
}  // namespace jax_paged

using namespace jax_paged;
using namespace jax_paged::onednn;

// Loads oneDNN from a file unless it is loaded already. Returns null, or the reason why it can't be used.
extern "C" const char* jax_paged_load_onednn(const char* path) {
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

// Returns the size of a packed kernel of this shape (bytes); 0 if oneDNN has no optimized implementation for this
// processor. The names of its optimized implementations begin with "brg".
extern "C" int64_t jax_paged_packed_bytes(int64_t rows, int64_t columns, bool is_float32) {
  try {
    const int type = is_float32 ? kFloat32 : kBFloat16;
    const Slices slices(rows, columns, type);
    const Product& product = GetProduct(kTileRows, rows, slices.Width(0), type, type);
    return std::strncmp(product.implementation, "brg", 3) == 0 ? slices.total_bytes : 0;
  } catch (const std::exception&) {
    return 0;
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_pack_kernel, PackKernel,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_multiply_packed, MultiplyPacked,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_multiply_gated, MultiplyGated,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("activation"));
