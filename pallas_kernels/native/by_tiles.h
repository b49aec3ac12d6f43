// The same as by_lanes.h in bfloat16, by instructions that add products of pairs of bfloat16 to float32. A tile is 16 rows
// of 64 bytes: AMX has an instruction that multiplies two of them, AVX-512 one for each of their rows.
//
//     scores [token, lane] += keys [token, d]  queries [d / 2, lane] of pairs        (keys straight from their pages)
//     sums [d, lane]       += values [d, token] weights [token / 2, lane] of pairs   (values transposed, weights rounded)

constexpr int64_t TILE = 16;   // rows of a tile, and floats of a row
constexpr int64_t PAIRS = 32;  // bfloat16 of a row
constexpr int64_t COLUMNS = 4;

INLINE bool is_by_tiles(const Attention& a, const Item& item) {
  // A tile of keys must lie in one page.
  return !is_by_rows(a, item) && a.head_dim % PAIRS == 0 && a.value_dim == a.head_dim && a.page_size % TILE == 0;
}

#include TILES

// The queries of TILE lanes from `lane` on as pairs [head_dim / 2, TILE]; those of unused lanes are 0.
static void pair_queries(const Attention& a, const Item& item, int64_t head, int64_t lane, uint32_t* pairs) {
  for (int64_t d = 0; d < a.head_dim; d += PAIRS) {
    Vec query[WIDTH] = {};
    for (int i = 0; i < WIDTH && lane + i < item.lanes(a); i++) {
      query[i] = load_bits(query_at<BFloat16>(a, item, head, lane + i) + d);
    }
    transpose(query);
    __builtin_memcpy(pairs + d / 2 * TILE, query, sizeof(query));
  }
}

// Writes the keys or values of the tiles that tokens [first, end) are in as rows of head_dim, which hold them exactly.
template <class E>
static void unpack_tiles(const Attention& a, const Item& item, int64_t head, int which, int64_t first, int64_t end,
                         BFloat16* to) {
  for (int64_t t = first; t < padded(end, TILE); t++, to += a.head_dim) {
    const E* from = token_at<E>(a, item, head, which, t);
    const float scale = scale_of(scales_at<E>(a, item, head, which, t));
    for (int64_t d = 0; d < a.head_dim; d += PAIRS) {
      const auto pairs = _mm512_cvtne2ps_pbh(load(from + d + WIDTH) * scale, load(from + d) * scale);
      _mm512_storeu_si512(to + d, bits_as<__m512i>(pairs));
    }
  }
}

// The values of tokens [first, end) as [head_dim, BLOCK]; those of other tokens, up to `padded_n`, are 0. `tile_at`
// returns where the rows of a token's tile begin.
template <class TileAt>
INLINE void transpose_values(const Attention& a, int64_t first, int64_t end, int64_t padded_n, TileAt tile_at,
                             uint16_t* values) {
  for (int64_t t = 0; t < padded_n; t += PAIRS) {
    const BFloat16* from[PAIRS / TILE];
    for (int64_t i = 0; i < PAIRS / TILE; i++) {
      const int64_t token = first + t + i * TILE;
      from[i] = token < end ? tile_at(token) : nullptr;
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

// Turns the scores of a lane column and the tokens [first, end) into weights, and writes them as pairs of neighbours, of
// n tokens in all, a multiple of PAIRS: behind the end a score is whatever its memory holds, and masked. As soften_lanes,
// but that state.largest is any score so far which the largest does not exceed by more than SLACK.
template <bool IS_MASKED, bool CHANGES>
static void soften_pairs(const Attention& a, int64_t first, int64_t end, int64_t n, const Lanes& state, int64_t lane,
                         float* scores, float* sums, uint32_t* pairs) {
  const IntVec position = bits_as<IntVec>(load(state.positions + lane));
  const IntVec head = bits_as<IntVec>(load(state.heads + lane));
  const int32_t window = int32_t(lesser(a.window, INT32_MAX));
  const Vec old = load(state.largest + lane), scale = broadcast(a.scale);
  const auto seen = [&](int64_t t) {
    Vec score = load(scores + t * WIDTH) * scale;
    if (!CHANGES && !IS_MASKED) return score;
    const IntVec distance = position - int32_t(first + t);
    if (CHANGES) score = changed(a, score, head, distance);
    const int32_t farthest = first + t < end ? window : 0;
    if (IS_MASKED) score = ((distance >= 0) & (distance < farthest)) ? score : broadcast(-__builtin_inff());
    store(scores + t * WIDTH, score);
    return score;
  };
  Vec largest = old, other = old;
  for (int64_t t = 0; t < n; t += 2) {
    largest = _mm512_max_ps(largest, seen(t));
    other = _mm512_max_ps(other, seen(t + 1));
  }
  largest = _mm512_max_ps(largest, other);
  const Vec now = (largest - old) * LOG2_E > SLACK ? largest : old;
  const Vec unit = broadcast(CHANGES || IS_MASKED ? LOG2_E : a.scale * LOG2_E), shift = now * LOG2_E;
  // Words 2j and 2j + 1 of a result: word j of either half.
  const BitVec word = bits_as<BitVec>(iota());
  const __m512i words = bits_as<__m512i>(word | (word + WIDTH) << 16);
  Vec total = {}, other_total = {};
  for (int64_t t = 0; t < n; t += 2) {
    const Vec low = exp2(load(scores + t * WIDTH) * unit - shift);
    const Vec high = exp2(load(scores + (t + 1) * WIDTH) * unit - shift);
    total += low, other_total += high;
    const __m512i halves = bits_as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    _mm512_storeu_si512(pairs + t / 2 * WIDTH, _mm512_permutexvar_epi16(words, halves));
  }
  const Vec factor = exp2((old - now) * LOG2_E);
  store(state.total + lane, load(state.total + lane) * factor + (total + other_total));
  if (!_mm512_cmp_ps_mask(now, old, _CMP_NEQ_UQ)) return;
  store(state.largest + lane, now);
  for (int64_t d = 0; d < a.row(); d++) store(sums + d * WIDTH, load(sums + d * WIDTH) * factor);
}

// Scratch: as attend_by_lanes, the queries and the values smaller, pairs of weights [BLOCK / 2, lanes] behind them, and
// rows of a quantised pool [BLOCK, row] in bfloat16; but the lanes lie in columns of TILE, one behind the other: so no two
// tiles that are used together are 4 KiB apart, which would make loads wait for stores. Columns are taken COLUMNS at a
// time, and all share what is read of the pool.
template <class P>
static void attend_by_tiles(const Attention& a, const Item& item, float* scratch) {
  const int64_t row = a.row(), lanes = lanes_of(a, item);
  float *queries = scratch, *sums = queries + row * lanes, *scores = sums + row * lanes,
        *state_at = scores + BLOCK * lanes, *values_at = state_at + 4 * lanes, *weights_at = values_at + BLOCK * row,
        *unpacked_at = weights_at + BLOCK / 2 * lanes;
  uint32_t *query_pairs = reinterpret_cast<uint32_t*>(queries), *weight_pairs = reinterpret_cast<uint32_t*>(weights_at);
  uint16_t* values = reinterpret_cast<uint16_t*>(values_at);
  BFloat16* const unpacked = reinterpret_cast<BFloat16*>(unpacked_at);
  const Lanes state(state_at, lanes);
  const Tiles tiles;
  const bool changes = a.soft_cap > 0 || a.bias;
  for (int64_t head = item.head; head < item.head + item.num_heads; head++) {
    begin_lanes(a, item, head, state, lanes);
    for (int64_t lane = 0; lane < lanes; lane += TILE) pair_queries(a, item, head, lane, query_pairs + lane * row / 2);
    for (int64_t i = 0; i < row * lanes; i += WIDTH) store(sums + i, Vec{});
    // Tokens of the first page that no row sees are masked.
    for (int64_t first = item.begin / TILE * TILE, end; first < item.end; first = end) {
      end = lesser(first / BLOCK * BLOCK + BLOCK, item.end);
      const int64_t n = end - first, padded_n = padded(n, PAIRS);
      const auto unpack = [&](int which) {
        if constexpr (IS_QUANTIZED<P>) unpack_tiles<P>(a, item, head, which, first, end, unpacked);
      };
      const auto tile_at = [&](int which, int64_t token) -> const BFloat16* {
        if constexpr (IS_QUANTIZED<P>) return unpacked + (token - first) * a.head_dim;
        return token_at<BFloat16>(a, item, head, which, token);
      };
      unpack(1);
      transpose_values(a, first, end, padded_n, [&](int64_t token) { return tile_at(1, token); }, values);
      unpack(0);
      for (int64_t lane = 0; lane < lanes; lane += COLUMNS * TILE) {
        const int64_t columns = lesser(COLUMNS, (lanes - lane) / TILE);
        const int64_t from = item.position + lane / a.group();
        const int64_t to = item.position + (lane + columns * TILE - 1) / a.group();
        if (to < first) continue;
        for (int64_t t = 0; t < n; t += TILE) {
          multiply_tile<false>(tile_at(0, first + t), a.head_dim * sizeof(BFloat16),
                               query_pairs + lane * row / 2, row / 2 * TILE, a.head_dim / 2, scores + t * TILE,
                               BLOCK * TILE, columns);
        }
        const bool all_see_all = n == padded_n && end - 1 <= from && first > to - a.window;
        const auto soften = all_see_all ? (changes ? soften_pairs<false, true> : soften_pairs<false, false>)
                                        : (changes ? soften_pairs<true, true> : soften_pairs<true, false>);
        for (int64_t c = 0; c < columns; c++) {
          soften(a, first, end, padded_n, state, lane + c * TILE, scores + c * BLOCK * TILE, sums + (lane + c * TILE) * row,
                 weight_pairs + c * BLOCK / 2 * TILE);
        }
        for (int64_t d = 0; d < a.head_dim; d += TILE) {
          multiply_tile<true>(values + d * BLOCK, BLOCK * sizeof(uint16_t), weight_pairs, BLOCK / 2 * TILE, padded_n / 2,
                              sums + lane * row + d * TILE, row * TILE, columns);
        }
      }
    }
    for (int64_t lane = 0; lane < lanes; lane += TILE) to_rows(row, TILE, sums + lane * row, queries + lane * row);
    write_out<BFloat16>(a, item, head, item.lanes(a), queries, state.largest, state.total);
  }
}
