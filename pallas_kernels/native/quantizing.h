// Quantization of groups of float weights to 4 bits with vectors of WIDTH floats, in the namespace VARIANT of
// jax_paged. quantizing.cc includes it once for each instruction set.

#define INLINE static inline __attribute__((always_inline))

namespace jax_paged {
namespace VARIANT {

constexpr float kTop = 15, kRanges[] = {0.75f, 0.85f, 0.95f, 1.05f};
constexpr int kRefinements = 2;

typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));

INLINE float sum(Lanes v) {
#if WIDTH == 8
  return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
#else
  return (v[0] + v[1]) + (v[2] + v[3]);
#endif
}

// GCC makes two instructions of a comparison and a choice.
#if WIDTH == 8
INLINE Lanes smaller(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
INLINE Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
#else
INLINE Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
#endif

// The nearest integer in [0, 15], the even one of two: adding 1.5 * 2^23 leaves no bits for fractions. Compilers keep
// both operations because they may not reorder sums (no -ffast-math).
INLINE Lanes rounded(Lanes x) {
  const Lanes inside = smaller(larger(x, Lanes{}), Lanes{} + kTop), shift = Lanes{} + 12582912.0f;
  return (inside + shift) - shift;
}

INLINE float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t bits) { return from_bfloat16(bits); }

struct Fit {
  float scale, offset, gain;
};

// The scale and offset of least squared error for the numbers x rounded with another scale and offset.
template <int64_t num_lanes>
INLINE Fit best_for(const Lanes* x, float sum_x, float scale, float offset) {
  const Lanes inverse = Lanes{} + 1 / scale, first = Lanes{} + offset;
  Lanes sum_q{}, sum_qq{}, sum_xq{};
  for (int64_t i = 0; i < num_lanes; i++) {
    const Lanes q = rounded((x[i] - first) * inverse);
    sum_q += q;
    sum_qq += q * q;
    sum_xq += x[i] * q;
  }
  const float num = float(num_lanes * WIDTH), q = sum(sum_q);
  const float variance = num * sum(sum_qq) - q * q, covariance = num * sum(sum_xq) - sum_x * q;
  float best = variance > 0 ? covariance / variance : 0;
  best = best > 0 ? best : 1;
  return {best, (sum_x - best * q) / num, covariance * best + sum_x * sum_x};
}

template <int64_t size, class Number>
INLINE void quantize_group(const Number* from, uint8_t* values, uint16_t* scale_bits,
                                      uint16_t* offset_bits) {
  Lanes numbers[size / WIDTH], x[size / WIDTH];
  constexpr int64_t num_lanes = size / WIDTH;
  float copied[size];
  for (int64_t i = 0; i < size; i++) copied[i] = to_float(from[i]);
  std::memcpy(numbers, copied, sizeof(float) * size);
  Lanes low = numbers[0], high = numbers[0];
  for (int64_t i = 1; i < num_lanes; i++) low = smaller(low, numbers[i]), high = larger(high, numbers[i]);
  float lowest = low[0], highest = high[0];
  for (int64_t j = 1; j < WIDTH; j++) {
    lowest = low[j] < lowest ? low[j] : lowest;
    highest = high[j] > highest ? high[j] : highest;
  }
  const float middle = (lowest + highest) / 2, width = (highest - lowest) / kTop, unit = width > 0 ? width : 1;
  Lanes sums{};
  for (int64_t i = 0; i < num_lanes; i++) sums += x[i] = (numbers[i] - middle) / unit;
  const float sum_x = sum(sums);
  Fit best{1, 0, -1};
  for (const float range : kRanges) {
    const Fit found = best_for<num_lanes>(x, sum_x, range, -kTop / 2 * range);
    if (found.gain > best.gain) best = found;
  }
  for (int i = 0; i < kRefinements; i++) best = best_for<num_lanes>(x, sum_x, best.scale, best.offset);
  *scale_bits = to_bfloat16(width > 0 ? best.scale * unit : 1);
  *offset_bits = to_bfloat16(width > 0 ? best.offset * unit + middle : middle);
  const float scale = from_bfloat16(*scale_bits), offset = from_bfloat16(*offset_bits);
  int32_t q[size];
  for (int64_t i = 0; i < num_lanes; i++) {
    const Integers rounded_numbers = __builtin_convertvector(rounded((numbers[i] - offset) / scale), Integers);
    std::memcpy(q + i * WIDTH, &rounded_numbers, sizeof(rounded_numbers));
  }
  for (int64_t i = 0; i < size / 2; i++) values[i] = uint8_t(q[2 * i] | q[2 * i + 1] << 4);
}

template <int64_t size, class Number>
INLINE void run(const Task& t, const Number* groups) {
  for (int64_t i = 0; i < t.num; i++)
    quantize_group<size>(groups + i * size, t.values + i * size / 2, t.scales + i, t.offsets + i);
}

template <class Number>
INLINE void run(const Task& t) {
  const auto groups = static_cast<const Number*>(t.groups);
  if (t.size == 64) return run<64>(t, groups);
  if (t.size == 32) return run<32>(t, groups);
  run<16>(t, groups);
}

static void quantize(const Task& t) { t.is_bfloat16 ? run<uint16_t>(t) : run<float>(t); }

}  // namespace VARIANT
}  // namespace jax_paged

#undef INLINE
