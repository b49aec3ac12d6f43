// The check of a processor's variant before its first use: it compares products of small kernels with the baseline.

#include <cmath>
#include <cstdint>
#include <vector>

#include "quantized_products.h"

namespace jax_paged {
namespace {

// A kernel with random numbers, and rows to multiply by it. Numbers and x are positive, so their sums do not cancel.
struct Case {
  QuantizedKernel kernel = {};
  int64_t rows;
  std::vector<uint8_t> values, zeros;
  std::vector<float> scales, offsets, x;
  uint32_t state = 1;

  Case(NumberType type, int64_t rows, int64_t group) : rows(rows) {
    kernel.type = type, kernel.rows = KERNEL_BLOCK + 64, kernel.columns = (MAX_PANELS + 3) * PANEL;
    kernel.group = group, kernel.groups = kernel.rows / group;
    values.resize(kernel.panels() * kernel.panel_bytes() + kReadAhead);
    const int64_t numbers = kernel.panels() * kernel.groups * PANEL;
    for (uint8_t& byte : values) byte = Draw() % 127;  // not the NaN of float8
    for (int64_t i = 0; i < numbers; i++) {
      scales.push_back(1 + Draw() % 16), zeros.push_back(Draw() % 16), offsets.push_back(float(Draw() % 16) - 8);
    }
    for (int64_t i = 0; i < rows * kernel.rows; i++) x.push_back(float(Draw() % 512) / 512 + 0.5f);
    kernel.values = values.data(), kernel.scales = {DType::kFloat32, scales.data()};
    if (group < 64) kernel.zeros = {false, zeros.data()};
    if (group == 64) kernel.offsets = {DType::kFloat32, offsets.data()};
  }

  uint32_t Draw() {
    state = state * 1664525u + 1013904223u;
    return state >> 16;
  }

  std::vector<float> Multiply(const QuantizedKernels& variant) const {
    std::vector<float> tiles(rows * kernel.rows), sums(rows * kernel.groups), scratch(SCRATCH_FLOATS), products;
    const PreparedRows prepared = {rows, (rows + variant.tile_rows - 1) / variant.tile_rows, tiles.data(), sums.data()};
    const SourceRows source = {DType::kFloat32, x.data(), kernel.rows, nullptr};
    variant.prepare(kernel, source, prepared, 0, 0, prepared.tiles, tiles.data(), sums.data());
    for (int64_t panel = 0; panel < kernel.panels(); panel += MAX_PANELS) {
      const int64_t panels = kernel.panels() - panel < MAX_PANELS ? kernel.panels() - panel : MAX_PANELS;
      std::vector<float> part(rows * panels * PANEL);
      variant.multiply(kernel, prepared, panel, panels, 0, prepared.tiles, part.data(), scratch.data());
      products.insert(products.end(), part.begin(), part.end());
    }
    return products;
  }
};

bool AreEqual(const Case& test, const QuantizedKernels& variant) {
  const std::vector<float> expected = test.Multiply(kBaselineQuantized), found = test.Multiply(variant);
  float largest = 0;
  for (float x : expected) largest = std::fmax(largest, std::fabs(x));
  for (size_t i = 0; i < found.size(); i++) {
    if (!(std::fabs(found[i] - expected[i]) <= 1e-4f * largest)) return false;
  }
  return true;
}

}  // namespace
}  // namespace jax_paged

using namespace jax_paged;

// Returns the name of the variant that is used with vectors of up to `max_width` floats if its products differ from the
// baseline's by more than rounding, otherwise null.
extern "C" const char* jax_paged_wrong_variant(int64_t max_width) {
  const QuantizedKernels& variant = choose_quantized(max_width);
  for (NumberType type : {NumberType::kInt4, NumberType::kInt8, NumberType::kFloat8}) {
    for (int64_t rows = 1; rows <= variant.tile_rows + 1; rows++) {
      for (int64_t group : {int64_t(16), int64_t(64), KERNEL_BLOCK + 64}) {
        if (!AreEqual(Case(type, rows, group), variant)) return variant.name;
      }
    }
  }
  return nullptr;
}
