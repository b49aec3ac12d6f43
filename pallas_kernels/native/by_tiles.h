// The same as by_lanes.h in bfloat16, by the tile instructions of AMX: a tile is 16 rows of 64 bytes, and an instruction
// adds the product of two of them, pairs of bfloat16, to a third one of float32.
//
//     scores [token, lane] += keys [token, d]  queries [d / 2, lane] of pairs        (keys straight from their pages)
//     sums [d, lane]       += values [d, token] weights [token / 2, lane] of pairs   (values transposed, weights rounded)

constexpr int64_t TILE = 16;   // rows of a tile, and floats of a row
constexpr int64_t PAIRS = 32;  // bfloat16 of a row

INLINE bool is_by_tiles(const Attention& a, const Item& item) {
  // A tile of keys must lie in one page.
  return !is_by_rows(a, item) && a.head_dim % PAIRS == 0 && a.page_size % TILE == 0 && item.begin % TILE == 0;
}

// While it lives, this thread's tiles have 16 rows of 64 bytes.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = TILE;
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// out [TILE, lanes] (+)= left [TILE, 2n] right [n, lanes] of pairs, n a multiple of 16; the row of left is in bytes.
template <bool ADDS>
INLINE void multiply_tile(const void* left, int64_t left_row, const uint32_t* right, int64_t lanes, int64_t n,
                          float* out) {
  const int64_t row = lanes * sizeof(float);
  int64_t lane = 0;
  for (; lane + 4 * TILE <= lanes; lane += 4 * TILE) {
    float* const to = out + lane;
    if (ADDS) {
      _tile_loadd(0, to, row);
      _tile_loadd(1, to + TILE, row);
      _tile_loadd(2, to + 2 * TILE, row);
      _tile_loadd(3, to + 3 * TILE, row);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t i = 0; i < n; i += TILE) {
      const uint32_t* const from = right + i * lanes + lane;
      _tile_loadd(4, static_cast<const char*>(left) + i * sizeof(uint32_t), left_row);
      _tile_loadd(5, from, row);
      _tile_loadd(6, from + TILE, row);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, from + 2 * TILE, row);
      _tile_loadd(6, from + 3 * TILE, row);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, to, row);
    _tile_stored(1, to + TILE, row);
    _tile_stored(2, to + 2 * TILE, row);
    _tile_stored(3, to + 3 * TILE, row);
  }
  for (; lane < lanes; lane += TILE) {
    if (ADDS) {
      _tile_loadd(0, out + lane, row);
    } else {
      _tile_zero(0);
    }
    for (int64_t i = 0; i < n; i += TILE) {
      _tile_loadd(4, static_cast<const char*>(left) + i * sizeof(uint32_t), left_row);
      _tile_loadd(5, right + i * lanes + lane, row);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, out + lane, row);
  }
}

// The queries of a tile as pairs [head_dim / 2, lanes]; those of unused lanes are 0.
static void pair_queries(const Attention& a, const Item& item, int64_t head, int64_t lanes, uint32_t* pairs) {
  for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
    for (int64_t d = 0; d < a.head_dim; d += PAIRS) {
      Vec query[WIDTH] = {};
      for (int i = 0; i < WIDTH && lane + i < item.lanes(a); i++) {
        query[i] = load_bits(query_at<BFloat16>(a, item, head, lane + i) + d);
      }
      transpose(query);
      for (int i = 0; i < WIDTH; i++) {
        __builtin_memcpy(pairs + (d / 2 + i) * lanes + lane, &query[i], sizeof(query[i]));
      }
    }
  }
}

// The values of tokens [first, end) as [head_dim, BLOCK]; those of other tokens, up to `padded_n`, are 0.
static void transpose_values(const Attention& a, const Item& item, int64_t head, int64_t first, int64_t end,
                             int64_t padded_n, uint16_t* values) {
  for (int64_t t = 0; t < padded_n; t += TILE) {
    const BFloat16* const from = first + t < end ? token_at<BFloat16>(a, item, head, 1, first + t) : nullptr;
    for (int64_t d = 0; d < a.head_dim; d += WIDTH) {
      Vec value[WIDTH] = {};
      for (int64_t i = 0; i < TILE && first + t + i < end; i++) value[i] = load(from + i * a.head_dim + d);
      transpose(value);
      for (int64_t i = 0; i < WIDTH; i++) {
        const HalfVec half = __builtin_convertvector(bits_as<BitVec>(value[i]) >> 16, HalfVec);
        __builtin_memcpy(values + (d + i) * BLOCK + t, &half, sizeof(half));
      }
    }
  }
}

INLINE BitVec rounded_to_bfloat16(Vec v) {  // not NaN, or NaN with a bit that stays
  const BitVec bits = bits_as<BitVec>(v);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// The weights of n tokens as pairs of neighbours [padded_n / 2, lanes]; those of other tokens are 0.
static void pair_weights(const float* weights, int64_t lanes, int64_t n, int64_t padded_n, uint32_t* pairs) {
  for (int64_t t = 0; t < padded_n; t += 2) {
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
      const Vec low = t < n ? load(weights + t * lanes + lane) : Vec{};
      const Vec high = t + 1 < n ? load(weights + (t + 1) * lanes + lane) : Vec{};
      const BitVec pair = (rounded_to_bfloat16(low) >> 16) | (rounded_to_bfloat16(high) & 0xffff0000);
      __builtin_memcpy(pairs + t / 2 * lanes + lane, &pair, sizeof(pair));
    }
  }
}

// Scratch: as attend_by_lanes, the queries and the values smaller, and pairs of weights [BLOCK / 2, lanes] behind them.
static void attend_by_tiles(const Attention& a, const Item& item, float* scratch) {
  const int64_t row = a.row(), lanes = lanes_of(a, item);
  float *queries = scratch, *sums = queries + row * lanes, *scores = sums + row * lanes,
        *state_at = scores + BLOCK * lanes, *values_at = state_at + 4 * lanes, *weights_at = values_at + BLOCK * row;
  uint32_t *query_pairs = reinterpret_cast<uint32_t*>(queries), *weight_pairs = reinterpret_cast<uint32_t*>(weights_at);
  uint16_t* values = reinterpret_cast<uint16_t*>(values_at);
  const Lanes state(state_at, lanes);
  const Tiles tiles;
  for (int64_t head = item.head; head < item.head + item.num_heads; head++) {
    begin_lanes(a, item, head, state, lanes);
    pair_queries(a, item, head, lanes, query_pairs);
    for (int64_t i = 0; i < row * lanes; i += WIDTH) store(sums + i, Vec{});
    for (int64_t first = item.begin, end; first < item.end; first = end) {
      end = lesser(first / BLOCK * BLOCK + BLOCK, item.end);
      const int64_t n = end - first, padded_n = padded(n, PAIRS);
      for (int64_t t = 0; t < n; t += TILE) {
        multiply_tile<false>(token_at<BFloat16>(a, item, head, 0, first + t), a.head_dim * sizeof(BFloat16), query_pairs,
                             lanes, a.head_dim / 2, scores + t * lanes);
      }
      for (int64_t i = 0; i < n * lanes; i += WIDTH) store(scores + i, load(scores + i) * a.scale);
      soften_all(a, item, first, end, state, lanes, scores, sums);
      pair_weights(scores, lanes, n, padded_n, weight_pairs);
      transpose_values(a, item, head, first, end, padded_n, values);
      for (int64_t d = 0; d < a.head_dim; d += TILE) {
        multiply_tile<true>(values + d * BLOCK, BLOCK * sizeof(uint16_t), weight_pairs, lanes, padded_n / 2,
                            sums + d * lanes);
      }
    }
    write_lanes<BFloat16>(a, item, head, state, lanes, sums, queries);
  }
}
