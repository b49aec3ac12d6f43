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
#define TILES
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const Kernels kAmxKernels = {amx::attend, amx::join_partials, amx::scratch_floats, 4 * TILE_LANES, amx::multiply_silu};
}

#endif
