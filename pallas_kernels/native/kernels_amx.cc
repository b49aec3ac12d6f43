// Attention for processors with AVX-512 and AMX.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16")
#endif

#define WIDTH 16
#define VARIANT amx
#define TILES "amx_tiles.h"
#include "kernels.h"

namespace jax_paged {
namespace {
namespace amx {

// The activation of a gated MLP, see Kernels::multiply_silu. silu(x) = x / (1 + e^-x) has a relative error of 7e-5,
// which is less than the rounding error of bfloat16.
static void multiply_silu(const float* x, const float* factors, void* out, int64_t n) {
  const auto part = [&](int64_t i) {
    const Vec v = load(x + i);
    return v * _mm512_rcp14_ps(exp2(v * -LOG2_E) + 1.f) * load(factors + i);
  };
  for (int64_t i = 0; i < n; i += PAIRS) {
    const Vec low = part(i), high = part(i + WIDTH);
    _mm512_storeu_si512(static_cast<BFloat16*>(out) + i, bits_as<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
}

}  // namespace amx
}  // namespace
}  // namespace jax_paged

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const Kernels kAmxKernels = {amx::attend, amx::join_partials, amx::scratch_floats, 4 * TILE_LANES, amx::multiply_silu};
}

#endif
