// The product of tiles with AMX. by_tiles.h includes this file.

// Configures the tile registers of this thread, each with 16 rows of 64 bytes, until the object is destroyed.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = TILE;
    // GCC assumes that _tile_loadconfig reads only the first bytes of `shape`, and could remove the other stores.
    __asm__ volatile("" : : "m"(shape));
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// The same as multiply_tile in bf16_tiles.h; n is a multiple of 16.
template <bool ADDS>
INLINE void multiply_tile(const void* left, int64_t left_row, const uint32_t* right, int64_t right_column, int64_t n,
                          float* out, int64_t out_column, int64_t columns) {
  constexpr int64_t ROW = TILE * sizeof(float);
  int64_t c = 0;
  for (; c + 4 <= columns; c += 4) {
    float* const to = out + c * out_column;
    if (ADDS) {
      _tile_loadd(0, to, ROW);
      _tile_loadd(1, to + out_column, ROW);
      _tile_loadd(2, to + 2 * out_column, ROW);
      _tile_loadd(3, to + 3 * out_column, ROW);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t i = 0; i < n; i += TILE) {
      const uint32_t* const from = right + c * right_column + i * TILE;
      _tile_loadd(4, static_cast<const char*>(left) + i * sizeof(uint32_t), left_row);
      _tile_loadd(5, from, ROW);
      _tile_loadd(6, from + right_column, ROW);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, from + 2 * right_column, ROW);
      _tile_loadd(6, from + 3 * right_column, ROW);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, to, ROW);
    _tile_stored(1, to + out_column, ROW);
    _tile_stored(2, to + 2 * out_column, ROW);
    _tile_stored(3, to + 3 * out_column, ROW);
  }
  for (; c < columns; c++) {
    float* const to = out + c * out_column;
    if (ADDS) {
      _tile_loadd(0, to, ROW);
    } else {
      _tile_zero(0);
    }
    for (int64_t i = 0; i < n; i += TILE) {
      _tile_loadd(4, static_cast<const char*>(left) + i * sizeof(uint32_t), left_row);
      _tile_loadd(5, right + c * right_column + i * TILE, ROW);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, to, ROW);
  }
}
