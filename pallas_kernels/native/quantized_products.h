// The layout of quantized matrices, and the arguments of their products.
//
// A kernel [rows, columns] is stored in consecutive panels of 16 columns. The bytes of a panel, for 4 and 8 bits:
//
//     64 bytes hold 8 rows:  | column 0 | column 1 | ... | column 15 |    a word of 32 bits per column; row j of the
//     64 bytes               |          |          |     |           |    eight is in its bits 4 j to 4 j + 3
//
//     16 bytes hold 1 row:   | column 0 | column 1 | ... | column 15 |    a byte per column
//
// Rows are padded to a multiple of 8, and kReadAhead bytes follow the last panel, which may be read but are not used.
// Scales, and offsets or zero points, are [panels, groups, 16]; a group is a number of consecutive rows. A weight is
// number * scale + offset, or (number - zero point) * scale.
#pragma once

#include <cstdint>

#include "attention.h"

namespace jax_paged {

constexpr int64_t PANEL = 16, ROWS_PER_WORD = 8, kReadAhead = 64;

enum class NumberType { kInt4, kInt8, kFloat8 };

// Numbers in any of three float types.
struct Floats {
  DType type;
  const void* data;  // or null
};

// Zero points.
struct Bytes {
  bool is_signed;
  const uint8_t* data;  // or null
};

// A quantized kernel.
struct QuantizedKernel {
  NumberType type;
  const uint8_t* values;
  Floats scales, offsets;
  Bytes zeros;
  int64_t rows;     // padded
  int64_t columns;  // not padded
  int64_t group;    // rows per group; the last group may have fewer
  int64_t groups;

  int64_t panels() const { return (columns + PANEL - 1) / PANEL; }
  int64_t panel_bytes() const { return type == NumberType::kInt4 ? rows * PANEL / 2 : rows * PANEL; }
  // Whether the sums of x per group are needed.
  bool needs_sums() const { return zeros.data || offsets.data; }
};

// Rows of x, prepared for a kernel: as tiles of a few rows. The numbers of a tile are in the order [kernel row, row], so that
// a loop over the kernel's rows reads them in order. For 4 bits they are divided by the powers of 16 by which the numbers
// of the kernel are multiplied (see quantized.h), which is exact.
struct PreparedRows {
  int64_t count;
  int64_t tiles;
  const float* x;
  const float* sums;  // per tile [groups, row], the sums of x over each group; null if they are not needed

  // Tiles have nearly equal numbers of rows.
  int64_t first_row(int64_t tile) const { return tile * count / tiles; }
};

// The rows of x in the caller's layout.
struct SourceRows {
  DType type;
  const void* data;
  int64_t columns;             // of x: the rows of the kernel, not padded
  const int32_t* permutation;  // column of x for each row of the kernel; null if they are in order
};

enum class Activation { kNone, kSilu, kRelu, kGelu, kGeluTanh };

// The same code, compiled for instructions of different processors.
struct QuantizedKernels {
  const char* name;
  // Largest number of rows in a tile.
  int64_t tile_rows;
  // Fills the tiles [first, last) of `rows`; x and sums are those of `rows`.
  void (*prepare)(const QuantizedKernel&, const SourceRows&, const PreparedRows& rows, int64_t first_row_of_source,
                  int64_t first, int64_t last, float* x, float* sums);
  // Multiplies the tiles [first, last) by `panels` panels. The products are [rows of these tiles, 16 * panels].
  void (*multiply)(const QuantizedKernel&, const PreparedRows&, int64_t first_panel, int64_t panels, int64_t first,
                   int64_t last, float* products, float* scratch);
  // Writes `count` numbers: values, or activation(values) * factors unless factors is null.
  void (*write)(Activation, const float* values, const float* factors, int64_t count, DType, void* out);
};

// Panels of a call of QuantizedKernels::multiply, rows of all its tiles, and floats of its scratch memory, at most.
constexpr int64_t MAX_PANELS = 4, MAX_ROWS = 256, KERNEL_BLOCK = 256;
constexpr int64_t SCRATCH_FLOATS = MAX_PANELS * PANEL * (KERNEL_BLOCK + MAX_ROWS);

extern const QuantizedKernels kBaselineQuantized;
#if defined(__x86_64__)
extern const QuantizedKernels kAvx2Quantized, kAvx512Quantized;
#endif

// The widest vectors that this processor has, of up to `max_width` floats.
const QuantizedKernels& choose_quantized(int64_t max_width);

}  // namespace jax_paged
