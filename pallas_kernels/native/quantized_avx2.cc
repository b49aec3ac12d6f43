// Products with quantized kernels for processors with AVX2 and FMA.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantized_products.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define WIDTH 8
#define VARIANT avx2
#include "quantized.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jax_paged {
const QuantizedKernels kAvx2Quantized = {"avx2", avx2::MOST_ROWS, avx2::prepare_rows, avx2::multiply_quantized, avx2::write_products};
}

#endif
