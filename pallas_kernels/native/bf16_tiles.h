// The product of tiles by the vectors of AVX-512, for processors without AMX. Included by by_tiles.h.

// Nothing needs to be set up for vectors.
struct Tiles {
  Tiles() {}
};

// As multiply_tile, for C columns, and ROWS rows at a time, whose sums are all in registers.
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

// out (+)= left [TILE, 2n] right [n, TILE] of pairs, for `columns` lane columns of right and out that lie so many floats
// apart; the row of left is in bytes.
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
