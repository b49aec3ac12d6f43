// The loop of by_lanes.h in bfloat16, with instructions that add products of pairs of bfloat16 numbers to float32 sums.
// In this file, a tile is the operand of such an instruction: 16 rows of 64 bytes. AMX multiplies two tiles in one
// instruction, AVX-512 BF16 needs one instruction per row.
//
//     scores [token, lane] += keys [token, d]   @ queries [d, lane]      keys are read from their pages directly
//     sums [d, lane]       += values [d, token] @ weights [token, lane]  values are transposed, weights are rounded
//
// The right operands are stored as pairs of two consecutive rows: queries as [d / 2, lane] pairs, weights as
// [token / 2, lane] pairs.

constexpr int64_t TILE = 16;    // rows of a tile, and floats of one of its rows
constexpr int64_t PAIRS = 32;   // bfloat16 numbers of a row of a tile
constexpr int64_t COLUMNS = 4;  // columns of TILE lanes that are multiplied together

INLINE bool is_by_tiles(const Attention& a, const Item& item) {
  // A tile of keys must lie in one page.
  return !is_by_rows(a, item) && a.head_dim % PAIRS == 0 && a.value_dim == a.head_dim && a.page_size % TILE == 0;
}

#include TILES

// Writes the queries of TILE lanes from `lane` on as pairs [head_dim / 2, TILE]; 0 for unused lanes.
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

// Dequantizes the keys or values of tokens [first, end), rounded up to whole tiles, to rows of head_dim numbers in
// bfloat16, which represents them exactly.
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

// Transposes the values of tokens [first, end) to [head_dim, BLOCK]. The columns of further tokens, up to `padded_n`,
// are 0. tile_at(token) returns the address of the first row of a tile that begins at the token.
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
      // Pairs of consecutive tokens: `low` has the pairs of elements 0-3, 8-11, 16-19 and 24-27, `high` the others.
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

// 2^x for x <= SLACK with a relative error of 3e-6, and NaN for NaN: 2^n times a polynomial in x - n, where n is the
// nearest integer.
INLINE Vec exp2(Vec x) {
  const Vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), y = x - n;
  Vec p = y * 9.58285e-3f + 5.590642e-2f;
  p = p * y + 2.4024099e-1f;
  p = p * y + 6.9312419e-1f;
  p = p * y + 1.f;
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.f), _CMP_NLE_UQ), p, n);
}

// The sums of a softmax are rescaled only if the largest score grows by more than log(2^SLACK), so that most blocks
// need no rescaling.
constexpr float SLACK = 8;
constexpr float LOG2_E = 1.44269504f;

// Computes the softmax weights of a column of TILE lanes for the tokens [first, end), and rescales the sums if
// necessary. The weights are written as pairs of consecutive tokens, for n tokens, a multiple of PAIRS. The scores from
// `end` on are not initialized, so they must be masked. Unlike in soften_lanes, state.largest may be less than the
// largest score so far, by at most log(2^SLACK).
template <bool IS_MASKED, bool HAS_CAP_OR_BIAS>
static void soften_pairs(const Attention& a, int64_t first, int64_t end, int64_t n, const Lanes& state, int64_t lane,
                         float* scores, float* sums, uint32_t* pairs) {
  const IntVec position = bits_as<IntVec>(load(state.positions + lane));
  const IntVec head = bits_as<IntVec>(load(state.heads + lane));
  const int32_t window = int32_t(lesser(a.window, INT32_MAX));
  const Vec old = load(state.largest + lane), scale = broadcast(a.scale);
  const auto final_score = [&](int64_t t) {
    Vec score = load(scores + t * WIDTH) * scale;
    if (!HAS_CAP_OR_BIAS && !IS_MASKED) return score;
    const IntVec distance = position - int32_t(first + t);
    if (HAS_CAP_OR_BIAS) score = with_cap_or_bias(a, score, head, distance);
    const int32_t farthest = first + t < end ? window : 0;
    if (IS_MASKED) score = ((distance >= 0) & (distance < farthest)) ? score : broadcast(-__builtin_inff());
    store(scores + t * WIDTH, score);
    return score;
  };
  Vec largest = old, odd_largest = old;
  for (int64_t t = 0; t < n; t += 2) {
    largest = _mm512_max_ps(largest, final_score(t));
    odd_largest = _mm512_max_ps(odd_largest, final_score(t + 1));
  }
  largest = _mm512_max_ps(largest, odd_largest);
  const Vec now = (largest - old) * LOG2_E > SLACK ? largest : old;
  // final_score has stored scaled scores, except if it returned early.
  const Vec unit = broadcast(HAS_CAP_OR_BIAS || IS_MASKED ? LOG2_E : a.scale * LOG2_E), shift = now * LOG2_E;
  // A permutation that interleaves the 16-bit words of two halves of a vector: word 2j of the result is word j of the
  // lower half, word 2j + 1 is word j of the upper half.
  const BitVec word = bits_as<BitVec>(iota());
  const __m512i words = bits_as<__m512i>(word | (word + WIDTH) << 16);
  Vec total = {}, odd_total = {};
  for (int64_t t = 0; t < n; t += 2) {
    const Vec low = exp2(load(scores + t * WIDTH) * unit - shift);
    const Vec high = exp2(load(scores + (t + 1) * WIDTH) * unit - shift);
    total += low, odd_total += high;
    const __m512i halves = bits_as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    _mm512_storeu_si512(pairs + t / 2 * WIDTH, _mm512_permutexvar_epi16(words, halves));
  }
  const Vec factor = exp2((old - now) * LOG2_E);
  store(state.total + lane, load(state.total + lane) * factor + (total + odd_total));
  if (!_mm512_cmp_ps_mask(now, old, _CMP_NEQ_UQ)) return;
  store(state.largest + lane, now);
  for (int64_t d = 0; d < a.row(); d++) store(sums + d * WIDTH, load(sums + d * WIDTH) * factor);
}

// Scratch memory: the arrays of attend_by_lanes, with queries and values in bfloat16; pairs of weights [BLOCK / 2,
// lanes]; and for a quantized pool, dequantized keys or values [BLOCK, row] in bfloat16. The lanes are divided into
// columns of TILE lanes, and each array is stored column by column. Otherwise tiles that are used together could be 4
// KiB apart, which makes loads wait for stores. COLUMNS columns are multiplied at a time, with the same keys and
// values.
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
  const bool has_cap_or_bias = a.soft_cap > 0 || a.bias;
  for (int64_t head = item.head; head < item.head + item.num_heads; head++) {
    begin_lanes(a, item, head, state, lanes);
    for (int64_t lane = 0; lane < lanes; lane += TILE) pair_queries(a, item, head, lane, query_pairs + lane * row / 2);
    for (int64_t i = 0; i < row * lanes; i += WIDTH) store(sums + i, Vec{});
    // Tiles of keys begin at multiples of TILE. Tokens before item.begin are masked by the window.
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
        const int64_t first_position = item.position + lane / a.group();
        const int64_t last_position = item.position + (lane + columns * TILE - 1) / a.group();
        if (last_position < first) continue;
        for (int64_t t = 0; t < n; t += TILE) {
          multiply_tile<false>(tile_at(0, first + t), a.head_dim * sizeof(BFloat16),
                               query_pairs + lane * row / 2, row / 2 * TILE, a.head_dim / 2, scores + t * TILE,
                               BLOCK * TILE, columns);
        }
        const bool all_see_all = n == padded_n && end - 1 <= first_position && first > last_position - a.window;
        const auto soften = all_see_all ? (has_cap_or_bias ? soften_pairs<false, true> : soften_pairs<false, false>)
                                        : (has_cap_or_bias ? soften_pairs<true, true> : soften_pairs<true, false>);
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
