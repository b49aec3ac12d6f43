// Attention for any processor, with vectors of four floats: SSE2 on x86-64, NEON on arm64.
#include <cstdint>
#include <utility>

#include "attention.h"

#define WIDTH 4
#define VARIANT baseline
#include "kernels.h"

namespace jax_paged {
const Kernels kBaselineKernels = {baseline::attend, baseline::join_partials, baseline::scratch_floats, TILE_LANES, nullptr};
}
