// Attention for processors with AVX2 and FMA.
#if defined(__x86_64__)

#include <cstdint>
#include <utility>

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define WIDTH 8
#define VARIANT avx2
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const Kernels kAvx2Kernels = {avx2::attend, avx2::join_partials, avx2::scratch_floats, TILE_LANES, nullptr};
}

#endif
