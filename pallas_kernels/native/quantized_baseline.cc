// Products with quantized kernels for any processor.
#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantized_products.h"

#define WIDTH 4
#define VARIANT baseline
#include "quantized.h"

namespace jax_paged {
const QuantizedKernels kBaselineQuantized = {"baseline", baseline::MOST_ROWS, baseline::prepare_rows, baseline::multiply_quantized, baseline::write_products};
}
