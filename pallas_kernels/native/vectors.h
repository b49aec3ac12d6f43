// Vectors of WIDTH floats, with the vector extensions of GCC and Clang. kernels.h includes this file in the namespace
// of a variant.

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t BitVec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * WIDTH)));
typedef int16_t IntHalfVec __attribute__((vector_size(2 * WIDTH)));
typedef int8_t IntByteVec __attribute__((vector_size(WIDTH)));
typedef uint8_t ByteVec __attribute__((vector_size(WIDTH)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// Numbers of a quantized pool, to be multiplied by the scale of their row.
struct Int8 {
  int8_t bits;
};
struct Float8 {
  uint8_t bits;
};

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE Vec greater(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec broadcast(float x) { return Vec{} + x; }

template <class To, class From>
INLINE To bits_as(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from), "the same bits");
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V = Vec, class E>
INLINE V load_bits(const E* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

INLINE Vec load(const float* from) { return load_bits(from); }

INLINE Vec load(const BFloat16* from) {
  return bits_as<Vec>(__builtin_convertvector(load_bits<HalfVec>(from), BitVec) << 16);
}

INLINE Vec load(const Float16* from) {
  const BitVec half = __builtin_convertvector(load_bits<HalfVec>(from), BitVec);
  // The biased exponent of a float16 is 112 less than that of the same number in float32. Infinity and NaN have the
  // largest exponent in both. For a subnormal, `moved` has an exponent that is too small by 1, and an implicit leading
  // 1 that a subnormal does not have. Therefore 1 is added to the exponent, and the leading 1 is subtracted.
  const BitVec bits = (half & 0x7fff) << 13, exponent = half & 0x7c00;
  BitVec moved = bits + (112u << 23);
  moved = exponent == 0x7c00 ? bits | 0x7f800000 : moved;
  const Vec subnormal = bits_as<Vec>(moved + (1u << 23)) - 0x1p-14f;
  const Vec magnitude = exponent == 0 ? subnormal : bits_as<Vec>(moved);
  return bits_as<Vec>(bits_as<BitVec>(magnitude) | ((half & 0x8000) << 16));
}

// Converts in two steps, because GCC compiles a direct conversion from bytes to floats to a loop over the lanes.
INLINE Vec load(const Int8* from) {
#if WIDTH == 16
  const IntVec wide = bits_as<IntVec>(_mm512_cvtepi8_epi32(load_bits<__m128i>(from)));
#else
  const auto half = __builtin_convertvector(load_bits<IntByteVec>(from), IntHalfVec);
  const IntVec wide = __builtin_convertvector(half, IntVec);
#endif
  return __builtin_convertvector(wide, Vec);
}

// float8_e4m3fn, converted as float16 above. The bits of NaN become 480, but the pool contains none: a row with NaN is
// stored as zeros with a scale of infinity.
INLINE Vec load(const Float8* from) {
#if WIDTH == 16
  const BitVec byte = bits_as<BitVec>(_mm512_cvtepu8_epi32(load_bits<__m128i>(from)));
#else
  const auto half = __builtin_convertvector(load_bits<ByteVec>(from), HalfVec);
  const BitVec byte = __builtin_convertvector(half, BitVec);
#endif
  const BitVec bits = (byte & 0x7f) << 20;
  const Vec subnormal = bits_as<Vec>(bits + (121u << 23)) - 0x1p-6f;
  const Vec magnitude = bits < (1u << 23) ? subnormal : bits_as<Vec>(bits + (120u << 23));
  return bits_as<Vec>(bits_as<BitVec>(magnitude) | ((byte & 0x80) << 24));
}

INLINE void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof(v)); }

INLINE void store(BFloat16* to, Vec v) {
  const BitVec bits = bits_as<BitVec>(v);
  BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = v == v ? rounded : BitVec{} + 0x7fc0;
  const HalfVec half = __builtin_convertvector(rounded, HalfVec);
  __builtin_memcpy(to, &half, sizeof(half));
}

INLINE void store(Float16* to, Vec v) {
  for (int i = 0; i < WIDTH; i++) {
    const uint32_t bits = bits_as<uint32_t>(float(v[i])), magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude >= 0x47800000) {  // too large, infinity or NaN
      half = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds, and moves the bits to their position in half
      half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
    } else {
      half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    }
    to[i].bits = uint16_t(half | ((bits >> 16) & 0x8000));
  }
}

// Loads or stores n elements. The lanes of a loaded vector after them are 0.
template <class E>
INLINE Vec load(const E* from, int64_t n) {
  if (n >= WIDTH) return load(from);
  E few[WIDTH] = {};
  __builtin_memcpy(few, from, n * sizeof(E));
  return load(few);
}

template <class E>
INLINE void store(E* to, Vec v, int64_t n) {
  if (n >= WIDTH) return store(to, v);
  E few[WIDTH];
  store(few, v);
  __builtin_memcpy(to, few, n * sizeof(E));
}

// e^x for x <= 0, and NaN for NaN: 2^n times a polynomial in y, where x = n log 2 + y (Moshier, Cephes library, expf).
INLINE Vec exp(Vec x) {
  const Vec in_range = x > -87.f ? x : broadcast(-87.f);
  // Adding 1.5 * 2^23 rounds to an integer, which the last bits of the sum then contain.
  const Vec shifted = in_range * 1.44269504f + 12582912.f;
  const Vec n = shifted - 12582912.f;
  Vec y = x - n * 0.693359375f;
  y = y + n * 2.12194440e-4f;
  Vec p = y * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * y + 8.3334519073e-3f;
  p = p * y + 4.1665795894e-2f;
  p = p * y + 1.6666665459e-1f;
  p = p * y + 5.0000001201e-1f;
  p = p * (y * y) + y + 1.f;
  const Vec power = bits_as<Vec>((bits_as<BitVec>(shifted) + 127) << 23);
  return x < -87.f ? Vec{} : p * power;
}

INLINE Vec tanh(Vec x) {
  const Vec e = exp((x < 0.f ? x : -x) * 2.f);
  const Vec y = (1.f - e) / (1.f + e);
  return x < 0.f ? -y : y;
}

// Swaps the upper STEP lanes of a with the lower STEP lanes of b, in each group of 2 * STEP lanes.
template <int STEP, int... LANE>
INLINE void exchange(Vec& a, Vec& b, std::integer_sequence<int, LANE...>) {
  const Vec low = SHUFFLE(a, b, (LANE & STEP ? WIDTH + LANE - STEP : LANE)...);
  b = SHUFFLE(a, b, (LANE & STEP ? WIDTH + LANE : LANE + STEP)...);
  a = low;
}

// Transposes WIDTH vectors.
template <int STEP = WIDTH / 2>
INLINE void transpose(Vec* v) {
  if constexpr (STEP > 0) {
    for (int i = 0; i < WIDTH; i++) {
      if (!(i & STEP)) exchange<STEP>(v[i], v[i + STEP], std::make_integer_sequence<int, WIDTH>());
    }
    transpose<STEP / 2>(v);
  }
}

// Returns the sum of the lanes of v[i] in lane i.
template <int STEP = WIDTH / 2>
INLINE Vec sum_lanes(Vec* v) {
  if constexpr (STEP > 0) {
    for (int i = 0; i < STEP; i++) {
      exchange<STEP>(v[i], v[i + STEP], std::make_integer_sequence<int, WIDTH>());
      v[i] += v[i + STEP];
    }
    return sum_lanes<STEP / 2>(v);
  }
  return v[0];
}

INLINE float largest_lane(Vec v) {
  float largest = v[0];
  for (int i = 1; i < WIDTH; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

INLINE float sum_of_lanes(Vec v) {
  float sum = v[0];
  for (int i = 1; i < WIDTH; i++) sum += v[i];
  return sum;
}
