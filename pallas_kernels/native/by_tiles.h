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
  for (int64_t t = 0; t < padded_n; t += PAIRS) {
    const BFloat16* from[PAIRS / TILE];
    for (int64_t i = 0; i < PAIRS / TILE; i++) {
      const int64_t token = first + t + i * TILE;
      from[i] = token < end ? token_at<BFloat16>(a, item, head, 1, token) : nullptr;
    }
    const auto row = [&](int64_t i, int64_t d) {
      return first + t + i < end ? _mm512_loadu_si512(from[i / TILE] + i % TILE * a.head_dim + d) : __m512i{};
    };
    for (int64_t d = 0; d < a.head_dim; d += PAIRS) {
      // Pairs of neighbours: `low` has those of elements 0-3, 8-11, 16-19 and 24-27, `high` the others.
      Vec low[WIDTH], high[WIDTH];
      for (int64_t i = 0; i < WIDTH; i++) {
        const __m512i even = row(2 * i, d), odd = row(2 * i + 1, d);
        low[i] = bits_as<Vec>(_mm512_unpacklo_epi16(even, odd));
        high[i] = bits_as<Vec>(_mm512_unpackhi_epi16(even, odd));
      }
      transpose(low);
      transpose(high);
      for (int64_t i = 0; i < WIDTH; i++) {
        uint16_t* const to = values + (d + i / 4 * 8 + i % 4) * BLOCK + t;
        __builtin_memcpy(to, &low[i], sizeof(Vec));
        __builtin_memcpy(to + 4 * BLOCK, &high[i], sizeof(Vec));
      }
    }
  }
}

// 2^x for x <= SLACK, to 3e-6 of it, and NaN for NaN: the nearest integer, and a polynomial in the rest.
INLINE Vec exp2(Vec x) {
  const Vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), y = x - n;
  Vec p = y * 9.58285e-3f + 5.590642e-2f;
  p = p * y + 2.4024099e-1f;
  p = p * y + 6.9312419e-1f;
  p = p * y + 1.f;
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.f), _CMP_NLE_UQ), p, n);
}

// A softmax's sums are brought to a larger score only where this is larger by so many powers of two.
constexpr float SLACK = 8;
constexpr float LOG2_E = 1.44269504f;

// Turns the scores of WIDTH lanes and n tokens, a multiple of PAIRS, into weights, and writes them as pairs of
// neighbours. As soften_lanes, but that state.largest is any score so far which the largest does not exceed by more
// than SLACK.
template <bool IS_MASKED>
static void soften_pairs(const Attention& a, int64_t first, int64_t n, const Lanes& state, int64_t lane, int64_t lanes,
                         float* scores, float* sums, uint32_t* pairs) {
  const IntVec position = bits_as<IntVec>(load(state.positions + lane));
  const IntVec head = bits_as<IntVec>(load(state.heads + lane));
  const int32_t window = int32_t(lesser(a.window, INT32_MAX));
  const bool changes = a.soft_cap > 0 || a.bias;
  const Vec old = load(state.largest + lane);
  Vec seen[4] = {old, old, old, old};
  for (int64_t t = 0; t < n; t += 4) {
    for (int i = 0; i < 4; i++) {
      Vec score = load(scores + (t + i) * lanes) * a.scale;
      if (changes || IS_MASKED) {
        const IntVec distance = position - int32_t(first + t + i);
        if (changes) score = changed(a, score, head, distance);
        if (IS_MASKED) score = ((distance >= 0) & (distance < window)) ? score : broadcast(-__builtin_inff());
        store(scores + (t + i) * lanes, score);
      }
      seen[i] = _mm512_max_ps(seen[i], score);
    }
  }
  const Vec largest = _mm512_max_ps(_mm512_max_ps(seen[0], seen[1]), _mm512_max_ps(seen[2], seen[3]));
  const Vec now = (largest - old) * LOG2_E > SLACK ? largest : old;
  const Vec unit = broadcast(changes || IS_MASKED ? LOG2_E : a.scale * LOG2_E), shift = now * LOG2_E;
  // Words 2j and 2j + 1 of a result: word j of either half.
  BitVec words = bits_as<BitVec>(iota());
  words |= (words + WIDTH) << 16;
  Vec total[2] = {};
  for (int64_t t = 0; t < n; t += 2) {
    const Vec low = exp2(load(scores + t * lanes) * unit - shift);
    const Vec high = exp2(load(scores + (t + 1) * lanes) * unit - shift);
    total[0] += low, total[1] += high;
    const auto halves = bits_as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    _mm512_storeu_si512(pairs + t / 2 * lanes, _mm512_permutexvar_epi16(bits_as<__m512i>(words), halves));
  }
  const Vec factor = exp2((old - now) * LOG2_E);
  store(state.total + lane, load(state.total + lane) * factor + (total[0] + total[1]));
  if (!_mm512_cmp_ps_mask(now, old, _CMP_NEQ_UQ)) return;
  store(state.largest + lane, now);
  for (int64_t d = 0; d < a.row(); d++) store(sums + d * lanes, load(sums + d * lanes) * factor);
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
      // Tokens behind the end are later than every row, and masked.
      const bool all_see_all = first + padded_n - 1 <= item.position && first > item.position + item.rows - 1 - a.window;
      const auto soften = all_see_all ? soften_pairs<false> : soften_pairs<true>;
      for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
        soften(a, first, padded_n, state, lane, lanes, scores + lane, sums + lane, weight_pairs + lane);
      }
      transpose_values(a, item, head, first, end, padded_n, values);
      for (int64_t d = 0; d < a.head_dim; d += TILE) {
        multiply_tile<true>(values + d * BLOCK, BLOCK * sizeof(uint16_t), weight_pairs, lanes, padded_n / 2,
                            sums + d * lanes);
      }
    }
    write_lanes<BFloat16>(a, item, head, state, lanes, sums, queries);
  }
}
