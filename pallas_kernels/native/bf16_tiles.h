// The product of tiles with AVX-512 BF16, for processors without AMX. by_tiles.h includes this file.

// AMX needs an object of this name to configure its tiles; vectors need no configuration.
struct Tiles {
  Tiles() {}
};

// multiply_tile for C columns. It computes ROWS rows at a time, with all of their sums in registers.
template <int ROWS, int C, bool ADDS>
INLINE void multiply_columns(const void* left, int64_t left_row, const uint32_t* right, int64_t right_column, int64_t n,
                             float* out, int64_t out_column) {
  for (int64_t first = 0; first < TILE; first += ROWS, out += ROWS * TILE) {
    const char* const rows = static_cast<const char*>(left) + first * left_row;
    Vec sum[ROWS][C] = {};
    if (ADDS) {
      for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < C; c++) sum[r][c] = load(out + c * out_column + r * TILE);
      }
    }
    for (int64_t i = 0; i < n; i++) {
      __m512bh pairs[C];
      for (int c = 0; c < C; c++) pairs[c] = load_bits<__m512bh>(right + c * right_column + i * TILE);
      for (int r = 0; r < ROWS; r++) {
        const auto pair = bits_as<__m512bh>(BitVec{} + load_bits<uint32_t>(rows + r * left_row + i * sizeof(uint32_t)));
        for (int c = 0; c < C; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair, pairs[c]);
      }
    }
    for (int r = 0; r < ROWS; r++) {
      for (int c = 0; c < C; c++) store(out + c * out_column + r * TILE, sum[r][c]);
    }
  }
}

// out (+)= left @ right, for a tile `left` of TILE rows with 2n numbers each, and for `columns` columns of TILE lanes.
//
// The rows of left are left_row bytes apart. Each column of right is [n, TILE] pairs, and each column of out is
// [TILE, TILE] floats. Columns are right_column pairs and out_column floats apart.
template <bool ADDS>
INLINE void multiply_tile(const void* left, int64_t left_row, const uint32_t* right, int64_t right_column, int64_t n,
                          float* out, int64_t out_column, int64_t columns) {
  int64_t c = 0;
  for (; c + 4 <= columns; c += 4) {
    multiply_columns<4, 4, ADDS>(left, left_row, right + c * right_column, right_column, n, out + c * out_column, out_column);
  }
  for (; c + 2 <= columns; c += 2) {
    multiply_columns<8, 2, ADDS>(left, left_row, right + c * right_column, right_column, n, out + c * out_column, out_column);
  }
  for (; c < columns; c++) {
    multiply_columns<16, 1, ADDS>(left, left_row, right + c * right_column, right_column, n, out + c * out_column, out_column);
  }
}
