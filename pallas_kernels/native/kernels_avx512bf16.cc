// Attention for processors with AVX-512 BF16 (products of bfloat16), but without AMX.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#endif

#define WIDTH 16
#define VARIANT avx512bf16
#define TILES "bf16_tiles.h"
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const Kernels kAvx512Bf16Kernels = {avx512bf16::attend, avx512bf16::join_partials, avx512bf16::scratch_floats, TILE_LANES, nullptr};
}

#endif
