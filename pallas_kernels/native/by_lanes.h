// The loop for many query rows and heads, which are the lanes of the vectors. The softmax therefore needs no sum across
// lanes. Both products have the same form:
//
//     scores [token, lane] = keys [token, d]               @ queries [d, lane]
//     sums [d, lane]      += values [token, d], transposed @ weights [token, lane]

// out[c][lane] (+)= sum over i < n of left[c, i] * right[i][lane], for C rows c and V vectors of lanes. left[c, i] is
// at left + c * left_row + i * left_column.
template <int C, int V, bool ADDS>
INLINE void multiply(const float* left, int64_t left_row, int64_t left_column, const float* right, int64_t lanes,
                     int64_t n, float* out) {
  Vec sum[C][V] = {};
  if (ADDS) {
    for (int c = 0; c < C; c++) {
      for (int v = 0; v < V; v++) sum[c][v] = load(out + c * lanes + v * WIDTH);
    }
  }
  for (int64_t i = 0; i < n; i++) {
    Vec x[V];
    for (int v = 0; v < V; v++) x[v] = load(right + i * lanes + v * WIDTH);
    for (int c = 0; c < C; c++) {
      const float factor = left[c * left_row + i * left_column];
      for (int v = 0; v < V; v++) sum[c][v] += x[v] * factor;
    }
  }
  for (int c = 0; c < C; c++) {
    for (int v = 0; v < V; v++) store(out + c * lanes + v * WIDTH, sum[c][v]);
  }
}

// Calls `multiply` for all lanes and `rows` rows, a multiple of 4.
template <bool ADDS>
static void multiply_all(int64_t rows, const float* left, int64_t left_row, int64_t left_column, const float* right,
                         int64_t lanes, int64_t n, float* out) {
  int64_t lane = 0;
  for (; lane + WIDE * WIDTH <= lanes; lane += WIDE * WIDTH) {
    for (int64_t c = 0; c < rows; c += 4) {
      multiply<4, WIDE, ADDS>(left + c * left_row, left_row, left_column, right + lane, lanes, n,
                              out + c * lanes + lane);
    }
  }
  for (; lane < lanes; lane += WIDTH) {
    for (int64_t c = 0; c < rows; c += 4) {
      multiply<4, 1, ADDS>(left + c * left_row, left_row, left_column, right + lane, lanes, n,
                           out + c * lanes + lane);
    }
  }
}

// Copies the keys or values of tokens [first, end) to rows of a.row() floats, multiplied by their scales.
template <class E>
static void unpack(const Attention& a, const Item& item, int64_t head, int which, int64_t first, int64_t end,
                   float* rows) {
  const int64_t row = a.row();
  for (int64_t t = first, n; t < end; t += n) {
    n = tokens_together(a, t, end);
    const E* from = token_at<E>(a, item, head, which, t);
    float* to = rows + (t - first) * row;
    if (!IS_QUANTIZED<E> && a.head_dim == row) {
      for (int64_t i = 0; i < n * row; i += WIDTH) store(to + i, load(from + i));
    } else {
      for (int64_t i = 0; i < n; i++, from += a.head_dim) {
        for (int64_t d = 0; d < row; d += WIDTH) {
          Vec numbers = load(from + d, greater(a.head_dim - d, 0));
          if constexpr (IS_QUANTIZED<E>) numbers *= scale_of(scales_at<E>(a, item, head, which, t + i));
          store(to + i * row + d, numbers);
        }
      }
    }
  }
}

// The data of each lane of a tile: its position and query head (bits of an int32) and the state of its softmax.
struct Lanes {
  float *positions, *heads, *largest, *total;
  Lanes(float* at, int64_t lanes) : positions(at), heads(at + lanes), largest(heads + lanes), total(largest + lanes) {}
};

static void begin_lanes(const Attention& a, const Item& item, int64_t head, const Lanes& state, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; lane++) {
    // The lanes that pad the tile attend to nothing.
    const int64_t position = lane < item.lanes(a) ? item.position_at(lane / a.group()) : -1;
    state.positions[lane] = bits_as<float>(int32_t(position));
    state.heads[lane] = bits_as<float>(int32_t(head * a.group() + lane % a.group()));
    state.largest[lane] = MASKED, state.total[lane] = 0;
  }
}

// Replaces the scores of WIDTH lanes and n tokens by softmax weights, and rescales their sums to the new largest
// scores.
template <bool IS_MASKED>
static void soften_lanes(const Attention& a, int64_t first, int64_t n, const Lanes& state, int64_t lane,
                         int64_t lanes, float* scores, float* sums) {
  const IntVec position = bits_as<IntVec>(load(state.positions + lane));
  const IntVec head = bits_as<IntVec>(load(state.heads + lane));
  const int32_t window = int32_t(lesser(a.window, INT32_MAX));
  const bool has_cap_or_bias = a.soft_cap > 0 || a.bias;
  const Vec old = load(state.largest + lane);
  Vec now = old;
  for (int64_t t = 0; t < n; t++) {
    Vec score = load(scores + t * lanes);
    if (has_cap_or_bias || IS_MASKED) {
      const IntVec distance = position - int32_t(first + t);
      if (has_cap_or_bias) score = with_cap_or_bias(a, score, head, distance);
      if (IS_MASKED) score = ((distance >= 0) & (distance < window)) ? score : broadcast(MASKED);
      store(scores + t * lanes, score);
    }
    now = greater(now, score);
  }
  Vec sum = {};
  for (int64_t t = 0; t < n; t++) {
    Vec weight = exp(load(scores + t * lanes) - now);
    if (IS_MASKED) {
      const IntVec distance = position - int32_t(first + t);
      weight = ((distance >= 0) & (distance < window)) ? weight : Vec{};
    }
    store(scores + t * lanes, weight);
    sum += weight;
  }
  const Vec factor = exp(old - now);
  store(state.total + lane, load(state.total + lane) * factor + sum);
  store(state.largest + lane, now);
  bool is_new = false;
  for (int i = 0; i < WIDTH; i++) is_new |= now[i] != old[i];
  if (!is_new) return;
  for (int64_t d = 0; d < a.value_row(); d++) store(sums + d * lanes, load(sums + d * lanes) * factor);
}

// Calls soften_lanes for all lanes of a tile and the tokens [first, end).
static void soften_all(const Attention& a, const Item& item, int64_t first, int64_t end, const Lanes& state,
                       int64_t lanes, float* scores, float* sums) {
  const bool all_see_all = end - 1 <= item.position && first > item.position + item.rows - 1 - a.window;
  const auto soften = all_see_all ? soften_lanes<false> : soften_lanes<true>;
  for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
    soften(a, first, end - first, state, lane, lanes, scores + lane, sums + lane);
  }
}

// Transposes sums [row, lanes] to rows [lanes, row].
static void to_rows(int64_t row, int64_t lanes, const float* sums, float* rows) {
  for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
    for (int64_t d = 0; d < row; d += WIDTH) {
      Vec sum[WIDTH];
      for (int i = 0; i < WIDTH; i++) sum[i] = load(sums + (d + i) * lanes + lane);
      transpose(sum);
      for (int i = 0; i < WIDTH; i++) store(rows + (lane + i) * row + d, sum[i]);
    }
  }
}

// Scratch memory: queries [row, lanes], sums [value_row, lanes], scores [BLOCK, lanes], the data of Lanes [4, lanes],
// and the keys or values of a block [BLOCK, row].
template <class E, class P>
static void attend_by_lanes(const Attention& a, const Item& item, float* scratch) {
  const int64_t row = a.row(), value_row = a.value_row(), used = item.lanes(a), lanes = lanes_of(a, item);
  float *queries = scratch, *sums = queries + row * lanes, *scores = sums + value_row * lanes,
        *state_at = scores + BLOCK * lanes, *tokens = state_at + 4 * lanes;
  const Lanes state(state_at, lanes);
  for (int64_t head = item.head; head < item.head + item.num_heads; head++) {
    begin_lanes(a, item, head, state, lanes);
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
      for (int64_t d = 0; d < row; d += WIDTH) {
        Vec query[WIDTH] = {};
        for (int i = 0; i < WIDTH && lane + i < used; i++) {
          query[i] = load(query_at<E>(a, item, head, lane + i) + d, greater(a.head_dim - d, 0)) * a.scale;
        }
        transpose(query);
        for (int i = 0; i < WIDTH; i++) {
          store(queries + (d + i) * lanes + lane, query[i]);
        }
      }
    }
    for (int64_t i = 0; i < value_row * lanes; i += WIDTH) store(sums + i, Vec{});
    for (int64_t first = item.begin, end; first < item.end; first = end) {
      end = lesser(first / BLOCK * BLOCK + BLOCK, item.end);
      const int64_t n = end - first;
      unpack<P>(a, item, head, 0, first, end, tokens);
      // The number of tokens is rounded up to a multiple of 4. The additional scores are not used.
      multiply_all<false>(padded(n, 4), tokens, row, 1, queries, lanes, row, scores);
      soften_all(a, item, first, end, state, lanes, scores, sums);
      if (a.parts == 2) unpack<P>(a, item, head, 1, first, end, tokens);
      multiply_all<true>(value_row, tokens, 1, row, scores, lanes, n, sums);
    }
    to_rows(value_row, lanes, sums, queries);
    write_out<E>(a, item, head, used, queries, state.largest, state.total);
  }
}
