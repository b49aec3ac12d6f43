// Quantization of float weights to 4 bits, as models/quantization/online.py does it: see there for the method.
// Python calls it by ctypes, without XLA.

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_paged {
namespace {

// The arguments of jax_paged_quantize_int4.
struct Task {
  const void* groups;
  bool is_bfloat16;
  int64_t num, size;
  uint8_t* values;
  uint16_t *scales, *offsets;
};

}  // namespace
}  // namespace jax_paged

#define WIDTH 4
#define VARIANT quantizing_baseline
#include "quantizing.h"
#undef WIDTH
#undef VARIANT

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#define WIDTH 8
#define VARIANT quantizing_avx2
#include "quantizing.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// Quantizes `num` groups of `size` numbers (16, 32 or 64), which are float32 or bfloat16. The values are pairs of
// 4-bit numbers; scales and offsets are bfloat16. Returns 0, or 1 if it does not support the size.
extern "C" int32_t jax_paged_quantize_int4(const void* groups, int32_t is_bfloat16, int64_t num, int64_t size,
                                           uint8_t* values, uint16_t* scales, uint16_t* offsets) {
  if (size != 16 && size != 32 && size != 64) return 1;
  const jax_paged::Task task{groups, is_bfloat16 != 0, num, size, values, scales, offsets};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    jax_paged::quantizing_avx2::quantize(task);
    return 0;
  }
#endif
  jax_paged::quantizing_baseline::quantize(task);
  return 0;
}
