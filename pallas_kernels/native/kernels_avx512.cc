// Attention for processors with AVX-512.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define WIDTH 16
#define VARIANT avx512
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const Kernels kAvx512Kernels = {avx512::attend, avx512::join_partials, avx512::scratch_floats, TILE_LANES, nullptr};
}

#endif
