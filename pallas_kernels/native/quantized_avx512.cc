// Products with quantized kernels for processors with AVX-512.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantized_products.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define WIDTH 16
#define VARIANT avx512
#include "quantized.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const QuantizedKernels kAvx512Quantized = {"avx512", avx512::MOST_ROWS, avx512::prepare_rows, avx512::multiply_quantized, avx512::write_products};
}

#endif
