// The handlers of products with quantized kernels. quantized_products.py says what they compute.

#include "quantized_products.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "guarded.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jax_paged {

const QuantizedKernels& choose_quantized(int64_t max_width) {
#if defined(__x86_64__)
  static const bool converts_float16 = [] {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
  }();
  const Kernels* const chosen = &choose_kernels(max_width);
  if (converts_float16 && chosen != &kBaselineKernels) return chosen == &kAvx2Kernels ? kAvx2Quantized : kAvx512Quantized;
#endif
  return kBaselineQuantized;
}

namespace {

namespace ffi = xla::ffi;

using Packed = ffi::Buffer<ffi::U8>;
using Indices = ffi::Buffer<ffi::S32>;

// Memory that a thread reuses from call to call, unless it is large.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* Get(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = (floats + 15) / 16 * 16;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (data_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }
  void Trim() {
    constexpr int64_t kKept = int64_t(1) << 20;
    if (size_ > kKept) std::free(data_), data_ = nullptr, size_ = 0;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

void Require(bool holds, const char* problem) {
  if (!holds) throw std::invalid_argument(problem);
}

DType FloatTypeOf(ffi::DataType type) {
  if (type == ffi::F32) return DType::kFloat32;
  if (type == ffi::BF16) return DType::kBFloat16;
  Require(type == ffi::F16, "floats must be float32, bfloat16 or float16");
  return DType::kFloat16;
}

int64_t BytesOf(DType type) { return type == DType::kFloat32 ? 4 : 2; }

NumberType NumberTypeOf(std::string_view name) {
  if (name == "int4") return NumberType::kInt4;
  if (name == "int8") return NumberType::kInt8;
  Require(name == "fp8", "the numbers must be int4, int8 or fp8");
  return NumberType::kFloat8;
}

Activation ActivationOf(std::string_view name) {
  if (name == "") return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  throw std::invalid_argument("unknown activation " + std::string(name));
}

// Fills in the sizes of a kernel. The caller has checked the sizes of its arrays.
QuantizedKernel MakeKernel(NumberType type, int64_t rows, int64_t columns, int64_t group) {
  constexpr int64_t kMost = int64_t(1) << 31;
  Require(0 < rows && rows < kMost && 0 < columns && columns < kMost, "a kernel has at least one row and one column");
  Require(0 < group && (group >= rows || group % ROWS_PER_WORD == 0), "the rows of a group must be a multiple of 8");
  QuantizedKernel kernel = {};
  kernel.type = type;
  kernel.rows = (rows + ROWS_PER_WORD - 1) / ROWS_PER_WORD * ROWS_PER_WORD;
  kernel.columns = columns;
  kernel.group = group >= rows ? kernel.rows : group;
  kernel.groups = group >= rows ? 1 : (rows + group - 1) / group;
  return kernel;
}

int64_t BytesOf(const QuantizedKernel& kernel) { return kernel.panels() * kernel.panel_bytes() + kReadAhead; }

// Kernels of the same shape, stored consecutively.
struct KernelStack {
  QuantizedKernel first;
  int64_t count, real_rows;
  const int32_t* permutations;  // [count, real_rows] or null

  KernelStack(const QuantizedKernel& shape, int64_t real_rows, Packed values, ffi::AnyBuffer scales, ffi::AnyBuffer offsets,
              Indices permutation)
      : first(shape), real_rows(real_rows), permutations(nullptr) {
    const int64_t bytes = BytesOf(shape), numbers = shape.panels() * shape.groups * PANEL;
    const int64_t given = values.element_count();
    count = given / bytes;
    Require(count > 0 && given % bytes == 0, "a packed kernel has another size");
    Require(int64_t(scales.element_count()) == count * numbers, "the scales of a packed kernel have another size");
    first.values = values.typed_data();
    first.scales = {FloatTypeOf(scales.element_type()), scales.untyped_data()};
    if (offsets.element_count()) {
      Require(int64_t(offsets.element_count()) == count * numbers, "the offsets of a packed kernel have another size");
      const ffi::DataType type = offsets.element_type();
      if (type == ffi::U8 || type == ffi::S8) {
        first.zeros = {type == ffi::S8, static_cast<const uint8_t*>(offsets.untyped_data())};
      } else {
        first.offsets = {FloatTypeOf(type), offsets.untyped_data()};
      }
    }
    if (permutation.element_count()) {
      Require(int64_t(permutation.element_count()) == count * real_rows, "the permutation has another size");
      permutations = permutation.typed_data();
      uint32_t largest = 0;
      for (int64_t i = 0; i < count * real_rows; i++) largest = std::max(largest, uint32_t(permutations[i]));
      Require(largest < real_rows, "the permutation has an index that is out of bounds");
    }
  }

  QuantizedKernel operator[](int64_t i) const {
    QuantizedKernel kernel = first;
    const int64_t numbers = first.panels() * first.groups * PANEL;
    const auto move = [&](Floats& floats) {
      if (floats.data) floats.data = static_cast<const char*>(floats.data) + i * numbers * BytesOf(floats.type);
    };
    kernel.values += i * BytesOf(first);
    move(kernel.scales), move(kernel.offsets);
    if (kernel.zeros.data) kernel.zeros.data += i * numbers;
    return kernel;
  }
  const int32_t* permutation(int64_t i) const { return permutations ? permutations + i * real_rows : nullptr; }
};

// Rows of x that one kernel multiplies.
struct Part {
  int64_t kernel, first_row;
  PreparedRows rows;
};

// A tile of the result: some rows of a part, and some panels of its kernel.
struct Item {
  const Part* part;
  int64_t panel, panels, first_tile, last_tile;
};

template <class F>
void ForEach(ffi::ThreadPool pool, int64_t count, const F& work) {
  const int64_t helpers = std::max<int64_t>(std::min<int64_t>(pool.num_threads(), count) - 1, 0);
  parallel_for(count, helpers, [&](auto task) { pool.Schedule(std::move(task)); }, work);
}

std::vector<Part> MakeParts(int64_t rows, int64_t kernels, Indices sizes, int64_t tile_rows) {
  std::vector<Part> parts;
  const auto add = [&](int64_t kernel, int64_t first, int64_t count) {
    if (count) parts.push_back({kernel, first, {count, (count + tile_rows - 1) / tile_rows, nullptr, nullptr}});
  };
  if (!sizes.element_count()) {
    Require(kernels == 1, "the rows of several kernels need their numbers");
    add(0, 0, rows);
    return parts;
  }
  Require(int64_t(sizes.element_count()) == kernels, "each kernel must have a number of rows");
  int64_t first = 0;
  for (int64_t i = 0; i < kernels; i++) {
    const int64_t count = sizes.typed_data()[i];
    Require(0 <= count && count <= rows - first, "the kernels have more rows than there are");
    add(i, first, count);
    first += count;
  }
  return parts;
}

// Prepares x and its sums for all parts. Kernels that multiply the same rows share them.
void Prepare(ffi::ThreadPool pool, const QuantizedKernels& variant, const KernelStack& stack, SourceRows source,
             std::vector<Part>& parts, float* x, float* sums) {
  struct Step {
    const Part* part;
    int64_t tile;
  };
  std::vector<Step> steps;
  for (Part& part : parts) {
    part.rows.x = x + part.first_row * stack.first.rows;
    part.rows.sums = sums ? sums + part.first_row * stack.first.groups : nullptr;
    for (int64_t i = 0; i < part.rows.tiles; i++) steps.push_back({&part, i});
  }
  const auto prepare = [&](int64_t i) {
    const Part& part = *steps[i].part;
    SourceRows own = source;
    own.permutation = stack.permutation(part.kernel);
    variant.prepare(stack[part.kernel], own, part.rows, part.first_row, steps[i].tile, steps[i].tile + 1,
                    const_cast<float*>(part.rows.x), const_cast<float*>(part.rows.sums));
  };
  if (steps.size() < 4) {
    for (size_t i = 0; i < steps.size(); i++) prepare(i);
  } else {
    ForEach(pool, steps.size(), prepare);
  }
}

// Divides the results among threads. An item is a block of MAX_PANELS panels, or several blocks if they are small; the
// remaining panels are divided equally. An item has as many rows of a part as one call can take, or fewer if there are
// too few columns for all threads.
std::vector<Item> MakeItems(const std::vector<Part>& parts, const QuantizedKernel& kernel, int64_t tile_rows, int64_t threads) {
  constexpr int64_t kFewTiles = 4;  // with this many tiles, decoding takes a small part of the time
  constexpr int64_t kBytes = 1 << 16;
  const int64_t panels = kernel.panels(), most = panels / (4 * threads * MAX_PANELS);
  const int64_t blocks = std::clamp<int64_t>(kBytes / (MAX_PANELS * kernel.panel_bytes()), 1, std::max<int64_t>(most, 1));
  const int64_t width = blocks * MAX_PANELS, full = panels - panels % (width * threads);
  const int64_t rest = (panels - full + threads - 1) / threads, columns = full / width + std::min(threads, panels - full);
  std::vector<Item> items;
  for (const Part& part : parts) {
    const int64_t share = (part.rows.tiles * columns + 2 * threads - 1) / (2 * threads);
    const int64_t tiles = std::clamp(share, kFewTiles, MAX_ROWS / tile_rows);
    for (int64_t first = 0; first < part.rows.tiles; first += tiles) {
      for (int64_t panel = 0; panel < panels;) {
        const int64_t count = std::min(panel < full ? width : rest, panels - panel);
        items.push_back({&part, panel, count, first, std::min(first + tiles, part.rows.tiles)});
        panel += count;
      }
    }
  }
  return items;
}

// y = x kernel, or activation(x kernel) * (x up), for each part.
void MultiplyParts(ffi::ThreadPool pool, const QuantizedKernels& variant, const KernelStack& kernels, const KernelStack* up,
                   Activation activation, const SourceRows& source, std::vector<Part>& parts, DType type, void* result) {
  static thread_local Scratch prepared;
  int64_t rows = 0;
  for (const Part& part : parts) rows += part.rows.count;
  const bool needs_sums = kernels.first.needs_sums() || (up && up->first.needs_sums());
  const int64_t numbers = rows * kernels.first.rows;
  float* const x = prepared.Get(numbers + (needs_sums ? rows * kernels.first.groups : 0));
  Prepare(pool, variant, kernels, source, parts, x, needs_sums ? x + numbers : nullptr);

  const int64_t columns = kernels.first.columns, threads = std::max<int64_t>(pool.num_threads(), 1);
  const std::vector<Item> items = MakeItems(parts, kernels.first, variant.tile_rows, threads);
  ForEach(pool, items.size(), [&](int64_t i) {
    static thread_local Scratch mine;
    const Item& item = items[i];
    const PreparedRows& all = item.part->rows;
    const int64_t first = all.first_row(item.first_tile), count = all.first_row(item.last_tile) - first;
    const int64_t products = MAX_ROWS * MAX_PANELS * PANEL, end = item.panel + item.panels;
    float* const scratch = mine.Get(SCRATCH_FLOATS + 2 * products);
    float *const values = scratch + SCRATCH_FLOATS, *const factors = values + products;
    for (int64_t panel = item.panel; panel < end; panel += MAX_PANELS) {
      const int64_t panels = std::min(MAX_PANELS, end - panel), stride = panels * PANEL;
      const auto multiply = [&](const KernelStack& stack, float* to) {
        variant.multiply(stack[item.part->kernel], all, panel, panels, item.first_tile, item.last_tile, to, scratch);
      };
      multiply(kernels, values);
      if (up) multiply(*up, factors);
      const int64_t column = panel * PANEL, width = std::min(stride, columns - column);
      for (int64_t r = 0; r < count; r++) {
        const int64_t at = (item.part->first_row + first + r) * columns + column;
        variant.write(activation, values + r * stride, up ? factors + r * stride : nullptr, width, type,
                      static_cast<char*>(result) + at * BytesOf(type));
      }
    }
  });
  prepared.Trim();
}

ffi::Error MultiplyQuantized(ffi::ThreadPool pool, ffi::AnyBuffer x, Indices sizes, Packed values, ffi::AnyBuffer scales,
                             ffi::AnyBuffer offsets, Indices permutation, Packed up_values, ffi::AnyBuffer up_scales,
                             ffi::AnyBuffer up_offsets, ffi::Result<ffi::AnyBuffer> result, std::string_view kind,
                             int64_t group_size, std::string_view activation, int64_t max_width) {
  return Guarded([&] {
    Require(x.dimensions().size() == 2 && result->dimensions().size() == 2, "x and the result must be matrices");
    const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = result->dimensions()[1];
    Require(int64_t(result->dimensions()[0]) == rows, "the result has another number of rows than x");
    const QuantizedKernel shape = MakeKernel(NumberTypeOf(kind), in, out, group_size);
    const KernelStack kernels(shape, in, values, scales, offsets, permutation);
    const Activation function = ActivationOf(activation);
    std::unique_ptr<KernelStack> up;
    if (function != Activation::kNone) {
      up = std::make_unique<KernelStack>(shape, in, up_values, up_scales, up_offsets, permutation);
      Require(up->count == kernels.count, "gate and up have another number of kernels");
    }
    const QuantizedKernels& variant = choose_quantized(max_width);
    const SourceRows source = {FloatTypeOf(x.element_type()), x.untyped_data(), in, nullptr};
    const DType type = FloatTypeOf(result->element_type());
    std::vector<Part> parts = MakeParts(rows, kernels.count, sizes, variant.tile_rows);
    MultiplyParts(pool, variant, kernels, up.get(), function, source, parts, type, result->untyped_data());
    const int64_t last = parts.empty() ? 0 : parts.back().first_row + parts.back().rows.count;
    std::memset(static_cast<char*>(result->untyped_data()) + last * out * BytesOf(type), 0, (rows - last) * out * BytesOf(type));
  });
}

float FloatAt(Floats from, int64_t i) {
  uint32_t bits;
  if (from.type == DType::kFloat32) {
    std::memcpy(&bits, static_cast<const uint32_t*>(from.data) + i, sizeof bits);
  } else {
    const uint32_t half = static_cast<const uint16_t*>(from.data)[i];
    if (from.type == DType::kBFloat16) {
      bits = half << 16;
    } else {
      const int exponent = half >> 10 & 31;
      const float fraction = float(half & 1023) / 1024;
      const float magnitude = exponent == 31 ? (half & 1023 ? NAN : INFINITY)
                                             : std::ldexp(exponent ? 1 + fraction : fraction, (exponent ? exponent : 1) - 15);
      return half >> 15 ? -magnitude : magnitude;
    }
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float ByteAt(Bytes from, int64_t i) { return from.is_signed ? float(int8_t(from.data[i])) : float(from.data[i]); }

float Float8Of(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const float fraction = float(bits & 7) / 8;
  const float magnitude =
      (bits & 127) == 127 ? NAN : std::ldexp(exponent ? 1 + fraction : fraction, (exponent ? exponent : 1) - 7);
  return bits >> 7 ? -magnitude : magnitude;
}

// Returns the number of a kernel at a row and column.
float NumberAt(const QuantizedKernel& kernel, const uint8_t* panel, int64_t row, int64_t lane) {
  if (kernel.type == NumberType::kInt4) {
    const uint8_t pair = panel[row / 8 * 64 + lane * 4 + row % 8 / 2];
    return float(row % 2 ? pair >> 4 : pair & 15);
  }
  const uint8_t bits = panel[row * PANEL + lane];
  if (kernel.type == NumberType::kInt8) return float(int8_t(bits));
  static const auto table = [] {
    std::vector<float> all(256);
    for (int i = 0; i < 256; i++) all[i] = Float8Of(uint8_t(i));
    return all;
  }();
  return table[bits];
}

// Returns columns of a kernel as floats, [indices, rows]. For an index that is out of bounds, the result is NaN, as in
// jnp.take.
ffi::Error QuantizedColumns(ffi::ThreadPool pool, Indices indices, Packed values, ffi::AnyBuffer scales, ffi::AnyBuffer offsets,
                            Indices permutation, ffi::Result<ffi::AnyBuffer> result, std::string_view kind, int64_t columns,
                            int64_t group_size, int64_t max_width) {
  return Guarded([&] {
    Require(result->dimensions().size() == 2, "the result must be a matrix");
    const int64_t count = result->dimensions()[0], in = result->dimensions()[1];
    Require(int64_t(indices.element_count()) == count, "the result has another number of rows than there are indices");
    const QuantizedKernel shape = MakeKernel(NumberTypeOf(kind), in, columns, group_size);
    const KernelStack kernels(shape, in, values, scales, offsets, permutation);
    Require(kernels.count == 1, "the kernel must not be a stack");
    const QuantizedKernel kernel = kernels[0];
    const DType type = FloatTypeOf(result->element_type());
    const QuantizedKernels& variant = choose_quantized(max_width);
    ForEach(pool, count, [&](int64_t i) {
      static thread_local Scratch mine;
      float* const out = mine.Get(in);
      const int64_t index = indices.typed_data()[i], panel = index / PANEL, lane = index % PANEL;
      if (index < 0 || index >= columns) {
        std::fill(out, out + in, std::numeric_limits<float>::quiet_NaN());
      } else {
        const uint8_t* const from = kernel.values + panel * kernel.panel_bytes();
        for (int64_t k = 0; k < in;) {
          const int64_t group = k / kernel.group, end = std::min(in, (group + 1) * kernel.group);
          const int64_t at = (panel * kernel.groups + group) * PANEL + lane;
          const float scale = FloatAt(kernel.scales, at);
          const float offset = kernel.offsets.data ? FloatAt(kernel.offsets, at) : 0;
          const float zero = kernel.zeros.data ? ByteAt(kernel.zeros, at) : 0;
          for (; k < end; k++) {
            const float value = (NumberAt(kernel, from, k, lane) - zero) * scale + offset;
            out[kernels.permutations ? kernels.permutations[k] : k] = value;
          }
        }
      }
      variant.write(Activation::kNone, out, nullptr, in, type, static_cast<char*>(result->untyped_data()) + i * in * BytesOf(type));
    });
  });
}

}  // namespace
}  // namespace jax_paged

using namespace jax_paged;

// Returns the bytes of a packed kernel; 0 if there can be none of this type.
extern "C" int64_t jax_paged_quantized_bytes(const char* kind, int64_t rows, int64_t columns) {
  try {
    return BytesOf(MakeKernel(NumberTypeOf(kind), rows, columns, rows));
  } catch (const std::exception&) {
    return 0;
  }
}

// Packs numbers: of 8 bits [rows, columns], or of 4 bits [rows / 2, columns] with two rows in a byte, the first of them in the
// low bits. `permutation` has the row for each packed row, or is null. The caller has checked the sizes and the permutation.
extern "C" void jax_paged_pack_quantized(const char* kind, int64_t rows, int64_t columns, const uint8_t* values,
                                         const int32_t* permutation, uint8_t* packed) {
  const QuantizedKernel kernel = MakeKernel(NumberTypeOf(kind), rows, columns, rows);
  std::memset(packed + kernel.panels() * kernel.panel_bytes(), 0, kReadAhead);
  const bool is_int4 = kernel.type == NumberType::kInt4;
  // Four panels at once: their columns are in one cache line.
  constexpr int64_t kTogether = 4;
  for (int64_t first = 0; first < kernel.panels(); first += kTogether) {
    for (int64_t k = 0; k < kernel.rows; k += ROWS_PER_WORD) {
      for (int64_t p = first; p < std::min(first + kTogether, kernel.panels()); p++) {
        const int64_t column = p * PANEL, width = std::min(PANEL, columns - column);
        uint32_t words[PANEL] = {};
        uint8_t bytes[ROWS_PER_WORD][PANEL] = {};
        for (int64_t j = 0; j < std::min(ROWS_PER_WORD, rows - k); j++) {
          const int64_t row = permutation ? permutation[k + j] : k + j;
          const uint8_t* const from = values + (is_int4 ? row / 2 : row) * columns + column;
          const int shift = row % 2 ? 4 : 0;
          if (!is_int4) {
            std::memcpy(bytes[j], from, width);
          } else {
            for (int64_t c = 0; c < width; c++) words[c] |= uint32_t(from[c] >> shift & 15) << 4 * j;
          }
        }
        uint8_t* const to = packed + p * kernel.panel_bytes();
        if (is_int4) {
          std::memcpy(to + k * (PANEL / 2), words, sizeof words);
        } else {
          std::memcpy(to + k * PANEL, bytes, sizeof bytes);
        }
      }
    }
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_multiply_quantized, MultiplyQuantized,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<Indices>()
                                  .Arg<Packed>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<Indices>()
                                  .Arg<Packed>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("group_size")
                                  .Attr<std::string_view>("activation")
                                  .Attr<int64_t>("max_width"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_quantized_columns, QuantizedColumns,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Indices>()
                                  .Arg<Packed>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<Indices>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("kind")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("max_width"));
