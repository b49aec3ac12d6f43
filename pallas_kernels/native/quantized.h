// The arithmetic of products with quantized kernels. A file per variant includes this with WIDTH and VARIANT defined, under
// the instructions of its processors; see kernels.h for what it may call.
//
// Up to FEW_ROWS rows are multiplied while the numbers of the kernel are read (`multiply_few`). For more rows, a block of the
// kernel is decoded into memory that a core's cache holds, once for all rows (`multiply_many`). Every product is summed
// in the same order in both: over the rows of a group one after the other, then over the groups. So a row's result does
// not depend on the other rows or their number.

namespace jax_paged {
namespace {
namespace VARIANT {

#include "vectors.h"

// Number of vectors in a row of a panel.
constexpr int PARTS = PANEL / WIDTH;
constexpr int64_t FEW_ROWS = 4;
// Rows of a tile and panels that are multiplied together: their sums stay in registers.
#if WIDTH == 16
constexpr int MOST_ROWS = 12, TILE_PANELS = 2;
#elif WIDTH == 8 || defined(__aarch64__)
constexpr int MOST_ROWS = 6, TILE_PANELS = 1;
#else
constexpr int MOST_ROWS = 4, TILE_PANELS = 1;
#endif
// Panels that `multiply_few` reads side by side. The processor adds eight vectors at a time.
template <int ROWS>
constexpr int FEW_PANELS = PARTS * ROWS > 4 ? 1 : PARTS * ROWS > 2 ? 2 : 4;

template <int... LANE>
INLINE Vec splat(float x, std::integer_sequence<int, LANE...>) {
  return Vec{(void(LANE), x)...};
}
// Returns a vector of equal floats. `broadcast` would add 0, which turns -0 into 0.
INLINE Vec splat(float x) { return splat(x, std::make_integer_sequence<int, WIDTH>()); }

// Returns sum + a * b, rounded once if the processor has such an instruction. Compilers fuse only some of these expressions,
// so results would depend on the compiler.
INLINE Vec add_product(Vec sum, Vec a, Vec b) {
#if defined(PLAIN_VECTORS)
  return sum + a * b;
#elif WIDTH == 16
  return bits_as<Vec>(_mm512_fmadd_ps(bits_as<__m512>(a), bits_as<__m512>(b), bits_as<__m512>(sum)));
#elif WIDTH == 8
  return bits_as<Vec>(_mm256_fmadd_ps(bits_as<__m256>(a), bits_as<__m256>(b), bits_as<__m256>(sum)));
#elif defined(__aarch64__)
  return bits_as<Vec>(vfmaq_f32(bits_as<float32x4_t>(sum), bits_as<float32x4_t>(a), bits_as<float32x4_t>(b)));
#else
  return sum + a * b;
#endif
}

// With float16 instructions, decoding a float8_e4m3fn takes fewer steps: its bits, shifted, are a float16 that is 2^-8 times
// as large. x is multiplied by 2^8 to correct this.
#if WIDTH >= 8 && !defined(PLAIN_VECTORS)
#define HAS_FLOAT16
constexpr float FLOAT8_UNIT = 256;
#else
constexpr float FLOAT8_UNIT = 1;
#endif

#if defined(HAS_FLOAT16) && WIDTH == 16
INLINE Vec number_at(const Int8* from) { return load(from); }
INLINE Vec float_of(__m256i halves) { return bits_as<Vec>(_mm512_cvtph_ps(halves)); }
INLINE Vec number_at(const Float8* from) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bits<__m128i>(from)), 7);
  return float_of(_mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbf80))));
}
INLINE Vec scale_at(const Float16* from) { return float_of(load_bits<__m256i>(from)); }
#elif defined(HAS_FLOAT16)
INLINE Vec number_at(const Int8* from) {
  const __m256i wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_bits<int64_t>(from)));
  return __builtin_convertvector(bits_as<IntVec>(wide), Vec);
}
INLINE Vec float_of(__m128i halves) { return bits_as<Vec>(_mm256_cvtph_ps(halves)); }
INLINE Vec number_at(const Float8* from) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(load_bits<int64_t>(from))), 7);
  return float_of(_mm_and_si128(wide, _mm_set1_epi16(int16_t(0xbf80))));
}
INLINE Vec scale_at(const Float16* from) { return float_of(load_bits<__m128i>(from)); }
#else
INLINE IntVec signed_bytes(const void* from) {
  IntByteVec bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, IntHalfVec), IntVec);
}
INLINE Vec number_at(const Int8* from) { return __builtin_convertvector(signed_bytes(from), Vec); }
// For a normal number, the shifted bits are the result. A subnormal number is smaller: twice that number minus 2^-6.
INLINE Vec number_at(const Float8* from) {
  const BitVec bits = bits_as<BitVec>(signed_bytes(from));
  const Vec normal = bits_as<Vec>(((bits & 0x7f) << 20) + (120u << 23)), subnormal = normal * 2.f - 0x1p-6f;
  const Vec magnitude = normal < subnormal ? normal : subnormal;
  return bits_as<Vec>(bits_as<BitVec>(magnitude) | (bits & 0x80000000));
}
INLINE Vec scale_at(const Float16* from) { return load(from); }
#endif
INLINE Vec scale_at(const float* from) { return load(from); }
INLINE Vec scale_at(const BFloat16* from) { return load(from); }

// Returns nibble `row` of each word, multiplied by 16^(row % 4) because it is not shifted to the right. x is divided by this
// factor. A vector of weights then takes three instructions: a mask, a conversion and a product. For the upper half of a
// word, the word is loaded from 2 bytes later, which also avoids a shift.
INLINE Vec number_in(BitVec words, int row) {
  return __builtin_convertvector(bits_as<IntVec>(words & (0xfu << 4 * (row % 4))), Vec);
}
INLINE BitVec words_at(const uint8_t* panel, int64_t row, int part, int of_eight) {
  return load_bits<BitVec>(panel + row * (PANEL / 2) + part * 4 * WIDTH + (of_eight > 3 ? 2 : 0));
}

// The rows of x in a tile, and their sums per group.
struct Tile {
  int64_t rows;
  const float *x, *sums;

  Tile(const QuantizedKernel& kernel, const PreparedRows& from, int64_t i)
      : rows(from.first_row(i + 1) - from.first_row(i)),
        x(from.x + from.first_row(i) * kernel.rows),
        sums(from.sums ? from.sums + from.first_row(i) * kernel.groups : nullptr) {}
  const float* sums_of(int64_t group) const { return sums ? sums + group * rows : nullptr; }
};

INLINE int64_t end_of_group(const QuantizedKernel& kernel, int64_t group) {
  return group + 1 == kernel.groups ? kernel.rows : (group + 1) * kernel.group;
}

template <int PANELS, class E>
INLINE void load_group(const QuantizedKernel& kernel, int64_t panel, int64_t group, const E* from, Vec* to) {
  for (int c = 0; c < PANELS * PARTS; c++) {
    to[c] = scale_at(from + ((panel + c / PARTS) * kernel.groups + group) * PANEL + c % PARTS * WIDTH);
  }
}

// Scales or offsets of a group.
template <int PANELS>
INLINE void load_group(const QuantizedKernel& kernel, int64_t panel, int64_t group, Floats from, Vec* to) {
  if (from.type == DType::kFloat32) return load_group<PANELS>(kernel, panel, group, static_cast<const float*>(from.data), to);
  if (from.type == DType::kFloat16) return load_group<PANELS>(kernel, panel, group, static_cast<const Float16*>(from.data), to);
  load_group<PANELS>(kernel, panel, group, static_cast<const BFloat16*>(from.data), to);
}

INLINE Vec zero_at(Bytes from, int64_t i) {
  if (from.is_signed) return number_at(reinterpret_cast<const Int8*>(from.data + i));
  const HalfVec half = __builtin_convertvector(load_bits<ByteVec>(from.data + i), HalfVec);
  return __builtin_convertvector(__builtin_convertvector(half, IntVec), Vec);
}

// Multiplies the sums of a group, which are sums of x times numbers, by the scales, and adds them to the products.
template <int ROWS, int PANELS>
INLINE void add_group(const QuantizedKernel& kernel, int64_t panel, int64_t group, const float* x_sums,
                      Vec (&sum)[ROWS][PANELS * PARTS], float* products, int64_t stride) {
  constexpr int C = PANELS * PARTS;
  if (kernel.zeros.data) {
    for (int c = 0; c < C; c++) {
      const Vec zero = zero_at(kernel.zeros, ((panel + c / PARTS) * kernel.groups + group) * PANEL + c % PARTS * WIDTH);
      for (int r = 0; r < ROWS; r++) sum[r][c] = add_product(sum[r][c], splat(-x_sums[r]), zero);
    }
  }
  Vec scale[C];
  load_group<PANELS>(kernel, panel, group, kernel.scales, scale);
  for (int r = 0; r < ROWS; r++) {
    float* const to = products + r * stride;
    for (int c = 0; c < C; c++) store(to + c * WIDTH, add_product(group ? load(to + c * WIDTH) : Vec{}, sum[r][c], scale[c]));
  }
  if (kernel.offsets.data) {
    load_group<PANELS>(kernel, panel, group, kernel.offsets, scale);
    for (int r = 0; r < ROWS; r++) {
      float* const to = products + r * stride;
      for (int c = 0; c < C; c++) store(to + c * WIDTH, add_product(load(to + c * WIDTH), splat(x_sums[r]), scale[c]));
    }
  }
}

// Multiplies a tile of ROWS rows by PANELS panels, decoding them on the way.
template <NumberType TYPE, int ROWS, int PANELS>
static void multiply_few(const QuantizedKernel& kernel, const Tile& tile, int64_t panel, float* products, int64_t stride) {
  // Distance of prefetching (bytes). Beyond the end of a panel, these are bytes of the next group of panels.
  constexpr int64_t AHEAD = 1024;
  const int64_t others = (PANELS - 1) * kernel.panel_bytes(), row_bytes = TYPE == NumberType::kInt4 ? PANEL / 2 : PANEL;
  const uint8_t* const first = kernel.values + panel * kernel.panel_bytes();
  const int64_t panel_bytes = kernel.panel_bytes();
  const uint8_t* at[PANELS];
  for (int p = 0; p < PANELS; p++) at[p] = first + p * panel_bytes;
  for (int64_t group = 0; group < kernel.groups; group++) {
    Vec sum[ROWS][PANELS * PARTS] = {};
    const int64_t end = end_of_group(kernel, group);
    for (int64_t k = group * kernel.group; k < end; k += ROWS_PER_WORD) {
      const float* const x = tile.x + k * ROWS;
      const int64_t next = k * row_bytes + AHEAD, ahead = next < panel_bytes ? next : next + others;
#pragma GCC unroll 8
      for (int j = 0; j < ROWS_PER_WORD; j++) {
        Vec factor[ROWS];
        for (int r = 0; r < ROWS; r++) factor[r] = splat(x[j * ROWS + r]);
        for (int c = 0; c < PANELS * PARTS; c++) {
          const int part = c % PARTS;
          Vec number;
          if constexpr (TYPE == NumberType::kInt4) {
            const uint8_t* const from = at[c / PARTS];
            if (j == 0 && part == 0) __builtin_prefetch(from + ahead);
            number = number_in(words_at(from, k, part, j), j);
          } else {
            using Number = std::conditional_t<TYPE == NumberType::kInt8, Int8, Float8>;
            const uint8_t* const from = at[c / PARTS] + (k + j) * PANEL;
            if (j % 4 == 0 && part == 0) __builtin_prefetch(at[c / PARTS] + ahead + j * PANEL);
            number = number_at(reinterpret_cast<const Number*>(from + part * WIDTH));
          }
          for (int r = 0; r < ROWS; r++) sum[r][c] = add_product(sum[r][c], factor[r], number);
        }
      }
    }
    add_group<ROWS, PANELS>(kernel, panel, group, tile.sums_of(group), sum, products, stride);
  }
}

// Decodes n rows of a panel, from row k on, to [n, PANEL].
template <NumberType TYPE>
static void decode(const uint8_t* panel, int64_t k, int64_t n, float* to) {
  for (int64_t i = k; i < k + n; i += ROWS_PER_WORD) {
#pragma GCC unroll 8
    for (int j = 0; j < ROWS_PER_WORD; j++, to += PANEL) {
      for (int part = 0; part < PARTS; part++) {
        if constexpr (TYPE == NumberType::kInt4) {
          store(to + part * WIDTH, number_in(words_at(panel, i, part, j), j));
        } else {
          using Number = std::conditional_t<TYPE == NumberType::kInt8, Int8, Float8>;
          store(to + part * WIDTH, number_at(reinterpret_cast<const Number*>(panel + (i + j) * PANEL + part * WIDTH)));
        }
      }
    }
  }
}

// Adds the product of a tile and the decoded rows [begin, end) of PANELS panels. The panels are KERNEL_BLOCK rows apart.
// `unfinished` holds the sums of a group that extends beyond these rows.
template <int ROWS, int PANELS>
static void multiply_decoded(const QuantizedKernel& kernel, const Tile& tile, int64_t panel, int64_t begin, int64_t end,
                             const float* decoded, float* products, float* unfinished, int64_t stride) {
  for (int64_t k = begin; k < end;) {
    const int64_t group = lesser(k / kernel.group, kernel.groups - 1), group_end = end_of_group(kernel, group);
    const int64_t n = lesser(group_end, end) - k;
    Vec sum[ROWS][PANELS * PARTS];
    const bool continues = k != group * kernel.group;
    for (int r = 0; r < ROWS; r++) {
      for (int c = 0; c < PANELS * PARTS; c++) sum[r][c] = continues ? load(unfinished + r * stride + c * WIDTH) : Vec{};
    }
    const float *x = tile.x + k * ROWS, *from = decoded + (k - begin) * PANEL;
    for (int64_t i = 0; i < n; i++, x += ROWS, from += PANEL) {
      Vec number[PANELS * PARTS];
      for (int c = 0; c < PANELS * PARTS; c++) {
        number[c] = load(from + c / PARTS * KERNEL_BLOCK * PANEL + c % PARTS * WIDTH);
      }
      for (int r = 0; r < ROWS; r++) {
        const Vec factor = splat(x[r]);
        for (int c = 0; c < PANELS * PARTS; c++) sum[r][c] = add_product(sum[r][c], factor, number[c]);
      }
    }
    k += n;
    if (k == group_end) {
      add_group<ROWS, PANELS>(kernel, panel, group, tile.sums_of(group), sum, products, stride);
    } else {
      for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < PANELS * PARTS; c++) store(unfinished + r * stride + c * WIDTH, sum[r][c]);
      }
    }
  }
}

// Calls function<ROWS>() for the number of rows of a tile.
template <int ROWS, class F>
INLINE void with_rows(int64_t rows, const F& function) {
  if (rows == ROWS) {
    function(std::integral_constant<int, ROWS>());
  } else if constexpr (ROWS > 1) {
    with_rows<ROWS - 1>(rows, function);
  }
}

template <NumberType TYPE>
static void multiply_many(const QuantizedKernel& kernel, const PreparedRows& rows, int64_t first_panel, int64_t panels,
                          int64_t first, int64_t last, float* products, float* scratch) {
  const int64_t stride = panels * PANEL, row = rows.first_row(first);
  float *const decoded = scratch, *const unfinished = scratch + MAX_PANELS * PANEL * KERNEL_BLOCK;
  for (int64_t k = 0; k < kernel.rows; k += KERNEL_BLOCK) {
    const int64_t end = lesser(k + KERNEL_BLOCK, kernel.rows);
    for (int64_t p = 0; p < panels; p++) {
      const uint8_t* const panel = kernel.values + (first_panel + p) * kernel.panel_bytes();
      decode<TYPE>(panel, k, end - k, decoded + p * KERNEL_BLOCK * PANEL);
    }
    for (int64_t p = 0; p < panels;) {
      const int64_t together = p + TILE_PANELS <= panels ? TILE_PANELS : 1;
      for (int64_t i = first; i < last; i++) {
        const Tile tile(kernel, rows, i);
        const int64_t at = (rows.first_row(i) - row) * stride + p * PANEL;
        const float* const from = decoded + p * KERNEL_BLOCK * PANEL;
        with_rows<MOST_ROWS>(tile.rows, [&](auto n) {
          if (together == TILE_PANELS) {
            multiply_decoded<n, TILE_PANELS>(kernel, tile, first_panel + p, k, end, from, products + at, unfinished + at, stride);
          } else {
            multiply_decoded<n, 1>(kernel, tile, first_panel + p, k, end, from, products + at, unfinished + at, stride);
          }
        });
      }
      p += together;
    }
  }
}

template <NumberType TYPE>
static void multiply_numbers(const QuantizedKernel& kernel, const PreparedRows& rows, int64_t first_panel, int64_t panels,
                             int64_t first, int64_t last, float* products, float* scratch) {
  if (rows.count > FEW_ROWS) return multiply_many<TYPE>(kernel, rows, first_panel, panels, first, last, products, scratch);
  const Tile tile(kernel, rows, 0);
  with_rows<FEW_ROWS>(tile.rows, [&](auto n) {
    constexpr int TOGETHER = FEW_PANELS<n>;
    const int64_t stride = panels * PANEL;
    int64_t p = 0;
    for (; p + TOGETHER <= panels; p += TOGETHER) {
      multiply_few<TYPE, n, TOGETHER>(kernel, tile, first_panel + p, products + p * PANEL, stride);
    }
    if constexpr (TOGETHER > 2) {
      for (; p + 2 <= panels; p += 2) multiply_few<TYPE, n, 2>(kernel, tile, first_panel + p, products + p * PANEL, stride);
    }
    for (; p < panels; p++) multiply_few<TYPE, n, 1>(kernel, tile, first_panel + p, products + p * PANEL, stride);
  });
}

static void multiply_quantized(const QuantizedKernel& kernel, const PreparedRows& rows, int64_t first_panel, int64_t panels,
                               int64_t first, int64_t last, float* products, float* scratch) {
  switch (kernel.type) {
    case NumberType::kInt4:
      return multiply_numbers<NumberType::kInt4>(kernel, rows, first_panel, panels, first, last, products, scratch);
    case NumberType::kInt8:
      return multiply_numbers<NumberType::kInt8>(kernel, rows, first_panel, panels, first, last, products, scratch);
    case NumberType::kFloat8:
      return multiply_numbers<NumberType::kFloat8>(kernel, rows, first_panel, panels, first, last, products, scratch);
  }
}

// Loads the elements of a row of x for n rows of the kernel, beginning at row k. The last of them may be padding.
template <class E>
INLINE void read_numbers(const SourceRows& source, const E* row, int64_t k, int64_t n, float* to) {
  const int64_t real = lesser(n, source.columns - k);
  if (source.permutation) {
    for (int64_t i = 0; i < real; i++) {
      E few[WIDTH] = {};
      few[0] = row[source.permutation[k + i]];
      to[i] = load(few)[0];
    }
  } else {
    int64_t i = 0;
    for (; i + WIDTH <= real; i += WIDTH) store(to + i, load(row + k + i));
    if (i < real) {
      float few[WIDTH];
      store(few, load(row + k + i, real - i));
      __builtin_memcpy(to + i, few, (real - i) * sizeof(float));
    }
  }
  for (int64_t i = greater(real, 0); i < n; i++) to[i] = 0;
}

template <class E>
static void prepare_tile(const QuantizedKernel& kernel, const SourceRows& source, const E* from, int64_t rows, float* x,
                         float* sums) {
  constexpr int64_t STEP = 64;
  for (int64_t r = 0; r < rows; r++) {
    float partial[ROWS_PER_WORD] = {};
    int64_t group = 0;
    for (int64_t k = 0; k < kernel.rows; k += STEP) {
      alignas(64) float numbers[STEP];
      const int64_t n = lesser(STEP, kernel.rows - k);
      read_numbers(source, from + r * source.columns, k, n, numbers);
      for (int64_t i = 0; i < n && sums; i += ROWS_PER_WORD) {
        for (int j = 0; j < ROWS_PER_WORD; j++) partial[j] += numbers[i + j];
        if (k + i + ROWS_PER_WORD < end_of_group(kernel, group)) continue;
        float sum = 0;
        for (int j = 0; j < ROWS_PER_WORD; j++) sum += partial[j], partial[j] = 0;
        sums[group++ * rows + r] = sum;
      }
      for (int64_t i = 0; i < n && kernel.type == NumberType::kInt4; i += 4) {
        for (int j = 1; j < 4; j++) numbers[i + j] *= 1.f / (1 << 4 * j);
      }
      for (int64_t i = 0; i < n && kernel.type == NumberType::kFloat8; i++) numbers[i] *= FLOAT8_UNIT;
      for (int64_t i = 0; i < n; i++) x[(k + i) * rows + r] = numbers[i];
    }
  }
}

static void prepare_rows(const QuantizedKernel& kernel, const SourceRows& source, const PreparedRows& rows,
                         int64_t first_row_of_source, int64_t first, int64_t last, float* x, float* sums) {
  for (int64_t i = first; i < last; i++) {
    const int64_t row = rows.first_row(i), count = rows.first_row(i + 1) - row;
    const int64_t from = (first_row_of_source + row) * source.columns;
    float *const own = x + row * kernel.rows, *const own_sums = sums ? sums + row * kernel.groups : nullptr;
    if (source.type == DType::kFloat32) {
      prepare_tile(kernel, source, static_cast<const float*>(source.data) + from, count, own, own_sums);
    } else if (source.type == DType::kBFloat16) {
      prepare_tile(kernel, source, static_cast<const BFloat16*>(source.data) + from, count, own, own_sums);
    } else {
      prepare_tile(kernel, source, static_cast<const Float16*>(source.data) + from, count, own, own_sums);
    }
  }
}

// The error function, to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
INLINE Vec error_function(Vec x) {
  const Vec magnitude = x < 0.f ? -x : x;
  const Vec t = 1.f / (magnitude * 0.3275911f + 1.f);
  Vec p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vec y = 1.f - p * t * exp(-magnitude * magnitude);
  return x < 0.f ? -y : y;
}

INLINE Vec activated(Activation activation, Vec x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kRelu: return x < 0.f ? Vec{} : x;
    case Activation::kSilu: {
      const Vec e = exp(x < 0.f ? x : -x);
      return x * (x < 0.f ? e : splat(1.f)) / (e + 1.f);
    }
    case Activation::kGelu: return x * 0.5f * (error_function(x * 0.70710678f) + 1.f);
    case Activation::kGeluTanh: return x * 0.5f * (tanh((x + x * x * x * 0.044715f) * 0.79788456f) + 1.f);
  }
  return x;
}

template <class E>
static void write_values(Activation activation, const float* values, const float* factors, int64_t count, E* out) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    const int64_t n = count - i;
    Vec v = load(values + i, n);
    if (factors) v = activated(activation, v) * load(factors + i, n);
    store(out + i, v, n);
  }
}

static void write_products(Activation activation, const float* values, const float* factors, int64_t count, DType type,
                           void* out) {
  if (type == DType::kFloat32) return write_values(activation, values, factors, count, static_cast<float*>(out));
  if (type == DType::kBFloat16) return write_values(activation, values, factors, count, static_cast<BFloat16*>(out));
  write_values(activation, values, factors, count, static_cast<Float16*>(out));
}

}  // namespace VARIANT
}  // namespace
}  // namespace jax_paged
