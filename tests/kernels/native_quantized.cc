// Random products of quantized kernels against sums in double precision, for every variant that this processor has, and for
// vectors of 16 floats compiled for AVX2. Fails unless every product is right and a row's is the same in every batch.
//
//     g++ -std=c++17 -O1 -Wno-psabi -Ipallas_kernels/native tests/kernels/native_quantized.cc
//         pallas_kernels/native/quantized_{baseline,avx2}.cc -o native_quantized && ./native_quantized 2000

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "quantized_products.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDTH 16
#define VARIANT plain
#define PLAIN_VECTORS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include "quantized.h"
#pragma GCC pop_options
#endif

using namespace jax_paged;

namespace {

std::mt19937 rng(0);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
double uniform() { return std::uniform_real_distribution<double>(-1, 1)(rng); }

double float8(int byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const double magnitude = exponent ? (8 + fraction) * std::pow(2, exponent - 10) : fraction * std::pow(2, -9);
  return byte & 128 ? -magnitude : magnitude;
}

struct Test {
  QuantizedKernel kernel = {};
  int64_t rows, real_rows;
  std::vector<float> x, scales, offsets;
  std::vector<uint8_t> zeros;
  std::unique_ptr<uint8_t[]> values;  // of the exact size, for the address sanitizer
  std::vector<int32_t> permutation;
  std::vector<double> expected, bound;

  Test() {
    const int64_t sizes[] = {16, 32, 48, 64, 128};
    kernel.type = NumberType(draw(0, 2));
    const bool is_whole = draw(0, 3) == 0;
    real_rows = is_whole ? draw(1, 700) : draw(1, 90) * 8;
    kernel.rows = (real_rows + 7) / 8 * 8;
    kernel.group = is_whole ? kernel.rows : sizes[draw(0, 4)];
    kernel.groups = (kernel.rows + kernel.group - 1) / kernel.group;
    kernel.columns = draw(1, 100);
    rows = draw(0, 1) ? draw(1, 8) : draw(1, 60);
    for (int64_t i = 0; i < rows * real_rows; i++) x.push_back(float(uniform()));
    for (int32_t i = 0; i < real_rows; i++) permutation.push_back(i);
    const bool is_permuted = draw(0, 3) == 0;
    if (is_permuted) std::shuffle(permutation.begin(), permutation.end(), rng);
    const int64_t numbers = kernel.panels() * kernel.groups * PANEL, kind = draw(0, 2);
    for (int64_t i = 0; i < numbers; i++) {
      scales.push_back(float(uniform())), offsets.push_back(float(uniform())), zeros.push_back(uint8_t(draw(0, 255)));
    }
    kernel.scales = {DType::kFloat32, scales.data()};
    if (kind == 1) kernel.offsets = {DType::kFloat32, offsets.data()};
    if (kind == 2) kernel.zeros = {draw(0, 1) == 1, zeros.data()};
    const int64_t bytes = kernel.panels() * kernel.panel_bytes() + kReadAhead;
    values = std::make_unique<uint8_t[]>(bytes);
    kernel.values = values.get();
    expected.assign(rows * kernel.columns, 0), bound.assign(rows * kernel.columns, 0);
    for (int64_t k = 0; k < real_rows; k++) {
      for (int64_t c = 0; c < kernel.columns; c++) Set(k, c, is_permuted);
    }
    if (!is_permuted) permutation.clear();
  }

  // Draws a number of the kernel, writes it where the layout has it, and adds its products.
  void Set(int64_t k, int64_t c, bool is_permuted) {
    uint8_t* const panel = values.get() + c / 16 * kernel.panel_bytes();
    double number;
    if (kernel.type == NumberType::kInt4) {
      const int nibble = int(draw(0, 15));
      panel[k / 8 * 64 + c % 16 * 4 + k % 8 / 2] |= nibble << k % 2 * 4;
      number = nibble;
    } else {
      int byte = int(draw(0, 255));
      if (kernel.type == NumberType::kFloat8 && (byte & 127) == 127) byte--;
      panel[k * 16 + c % 16] = uint8_t(byte);
      number = kernel.type == NumberType::kInt8 ? int8_t(byte) : float8(byte);
    }
    const int64_t at = (c / 16 * kernel.groups + k / kernel.group) * 16 + c % 16;
    const double zero = !kernel.zeros.data ? 0 : kernel.zeros.is_signed ? int8_t(zeros[at]) : zeros[at];
    const double offset = kernel.offsets.data ? offsets[at] : 0, scale = scales[at];
    for (int64_t r = 0; r < rows; r++) {
      const double factor = x[r * real_rows + (is_permuted ? permutation[k] : k)];
      expected[r * kernel.columns + c] += factor * ((number - zero) * scale + offset);
      bound[r * kernel.columns + c] += std::fabs(factor) * ((std::fabs(number) + std::fabs(zero)) * std::fabs(scale) + std::fabs(offset));
    }
  }

  // The products of `count` rows from row `first` on.
  std::vector<float> Multiply(const QuantizedKernels& variant, int64_t first, int64_t count) const {
    std::vector<float> tiles(count * kernel.rows), sums(count * kernel.groups), scratch(SCRATCH_FLOATS), result(count * kernel.columns);
    const PreparedRows prepared = {count, (count + variant.tile_rows - 1) / variant.tile_rows, tiles.data(), sums.data()};
    const SourceRows source = {DType::kFloat32, x.data(), real_rows, permutation.empty() ? nullptr : permutation.data()};
    variant.prepare(kernel, source, prepared, first, 0, prepared.tiles, tiles.data(), sums.data());
    for (int64_t panel = 0; panel < kernel.panels(); panel += MAX_PANELS) {
      const int64_t panels = std::min(MAX_PANELS, kernel.panels() - panel), stride = panels * PANEL;
      const int64_t width = std::min(stride, kernel.columns - panel * PANEL);
      std::vector<float> part(count * stride);
      variant.multiply(kernel, prepared, panel, panels, 0, prepared.tiles, part.data(), scratch.data());
      for (int64_t r = 0; r < count; r++) {
        variant.write(Activation::kNone, &part[r * stride], nullptr, width, DType::kFloat32, &result[r * kernel.columns + panel * PANEL]);
      }
    }
    return result;
  }

  bool Passes(const QuantizedKernels& variant, bool is_exact) const {
    const std::vector<float> found = Multiply(variant, 0, rows);
    // A sum of n products, in any order, is wrong by at most n roundings of the sum of their magnitudes; scales and
    // offsets add a few.
    const double unit = std::pow(2, -24) * (real_rows + 8);
    for (size_t i = 0; i < found.size(); i++) {
      if (!(std::fabs(found[i] - expected[i]) <= unit * bound[i])) return false;
    }
    const int64_t first = rows / 2;
    const std::vector<float> alone = Multiply(variant, first, 1);
    for (int64_t c = 0; c < kernel.columns; c++) {
      if (is_exact && alone[c] != found[first * kernel.columns + c]) return false;
    }
    return true;
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::pair<const QuantizedKernels*, bool>> variants = {{&kBaselineQuantized, true}};
#if defined(__x86_64__)
  const QuantizedKernels plain_variant = {"vectors of 16", plain::MOST_ROWS, plain::prepare_rows, plain::multiply_quantized,
                                          plain::write_products};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    variants.push_back({&kAvx2Quantized, true}), variants.push_back({&plain_variant, false});
  }
#endif
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 300;
  for (int64_t i = 0; i < count; i++) {
    const Test test;
    for (const auto& [variant, is_exact] : variants) {
      if (test.Passes(*variant, is_exact)) continue;
      std::printf("test %lld fails with %s: type %d, %lld rows, kernel [%lld, %lld], groups of %lld\n", (long long)i, variant->name,
                  int(test.kernel.type), (long long)test.rows, (long long)test.real_rows, (long long)test.kernel.columns,
                  (long long)test.kernel.group);
      return 1;
    }
  }
  std::printf("%lld tests pass\n", (long long)count);
}
