// Attention for any processor: of the vectors, x86-64 has SSE2, and arm64 has NEON.
#include <cstdint>
#include <utility>

#include "attention.h"

#define WIDTH 4
#define VARIANT baseline
#include "kernels.h"

namespace jax_paged {
const Kernels kBaselineKernels = {baseline::attend, baseline::join_partials, baseline::scratch_floats, TILE_LANES, nullptr};
}
