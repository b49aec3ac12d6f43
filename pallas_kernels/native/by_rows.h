// The loop for one query row and a few query heads per kv head. The lanes of a vector are elements of a head. Memory
// limits the speed, so keys and values are read once, in memory order, and the keys and values that are needed next are
// prefetched. The argument `next` is their distance (elements) from the current ones.

// Multiplies the scores or weights of `group` query heads and n tokens by the scales of the tokens.
template <class E>
INLINE void multiply_by_scales(const Attention& a, const Item& item, int64_t head, int which, int64_t first, int64_t n,
                               float* scores) {
  if constexpr (IS_QUANTIZED<E>) {
    const int64_t group = a.group();
    const E* scales = scales_at<E>(a, item, head, which, first);
    for (int64_t t = 0; t < n; t++) {
      const float scale = scale_of(scales + t);
      for (int64_t g = 0; g < group; g++) scores[g * SCORES + t] *= scale;
    }
  }
}

// Computes the scores of R query heads for n tokens of one page, without the scales of a quantized pool.
template <int R, class E>
static void score_rows(const float* queries, int64_t query_stride, const E* keys, int64_t n, int64_t head_dim,
                       int64_t next, float* scores) {
  constexpr int T = WIDTH / R;
  for (int64_t t = 0; t < n; t += T) {
    const E* key[T];
    for (int i = 0; i < T; i++) key[i] = keys + lesser(t + i, n - 1) * head_dim;
    for (int i = 0; i < T; i++) {
      for (int64_t d = 0; d < head_dim; d += 64 / sizeof(E)) __builtin_prefetch(key[i] + next + d, 0, 2);
    }
    Vec sums[WIDTH] = {};
    for (int64_t d = 0; d < head_dim; d += WIDTH) {
      Vec query[R];
      for (int r = 0; r < R; r++) query[r] = load(queries + r * query_stride + d);
      for (int i = 0; i < T; i++) {
        const Vec k = load(key[i] + d);
        for (int r = 0; r < R; r++) sums[r * T + i] += query[r] * k;
      }
    }
    float score[WIDTH];
    store(score, sum_lanes(sums));
    for (int r = 0; r < R; r++) __builtin_memcpy(scores + r * SCORES + t, score + r * T, T * sizeof(float));
  }
}

// Adds the weighted values of n tokens to the sums of R query heads, for V vectors of the head.
template <int R, int V, class E>
INLINE void add_values(const float* weights, const E* values, int64_t n, int64_t head_dim, int64_t next, float* sums,
                       int64_t stride) {
  Vec sum[R][V];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) sum[r][v] = load(sums + r * stride + v * WIDTH);
  }
  for (int64_t t = 0; t < n; t++) {
    const E* value = values + t * head_dim;
    for (int v = 0; v < V; v++) {
      if (v * WIDTH * sizeof(E) % 64 == 0) __builtin_prefetch(value + next + v * WIDTH, 0, 2);
      const Vec x = load(value + v * WIDTH);
      for (int r = 0; r < R; r++) sum[r][v] += x * weights[r * SCORES + t];
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) store(sums + r * stride + v * WIDTH, sum[r][v]);
  }
}

// Calls add_values for all vectors of the head.
template <int R, class E>
static void add_all_values(const float* weights, const E* values, int64_t n, int64_t head_dim, int64_t next,
                           float* sums, int64_t stride) {
  int64_t d = 0;
  for (; d + WIDE * WIDTH <= head_dim; d += WIDE * WIDTH) {
    add_values<R, WIDE>(weights, values + d, n, head_dim, next, sums + d, stride);
  }
  for (; d < head_dim; d += WIDTH) add_values<R, 1>(weights, values + d, n, head_dim, next, sums + d, stride);
}

// Divides the query heads of a group into runs of four, two or one, and calls f(number of heads, first head) for each.
template <class F>
INLINE void in_fours(int64_t group, F f) {
  int64_t r = 0;
  for (; r + 4 <= group; r += 4) f(std::integral_constant<int, 4>(), r);
  for (; r + 2 <= group; r += 2) f(std::integral_constant<int, 2>(), r);
  for (; r < group; r++) f(std::integral_constant<int, 1>(), r);
}

// Replaces the n scores of a query head by softmax weights, and rescales its sums to the new largest score.
INLINE void soften(const Attention& a, int64_t query_head, int64_t position, int64_t first, int64_t n, float* scores,
                   float* sums, float& largest, float& total) {
  const IntVec head = IntVec{} + int32_t(query_head);
  Vec top = broadcast(largest);
  for (int64_t t = 0; t < n; t += WIDTH) {
    Vec score = with_cap_or_bias(a, load(scores + t), head, int32_t(position - first - t) - iota());
    score = iota() < int32_t(n - t) ? score : broadcast(MASKED);
    store(scores + t, score);
    top = greater(top, score);
  }
  const float now = largest_lane(top);
  Vec sum = {};
  for (int64_t t = 0; t < n; t += WIDTH) {
    Vec weight = exp(load(scores + t) - now);
    weight = iota() < int32_t(n - t) ? weight : Vec{};
    store(scores + t, weight);
    sum += weight;
  }
  if (now != largest) {
    const float factor = exp(broadcast(largest - now))[0];
    total *= factor;
    for (int64_t d = 0; d < a.row(); d += WIDTH) store(sums + d, load(sums + d) * factor);
    largest = now;
  }
  total += sum_of_lanes(sum);
}

// Scratch memory: queries [heads, row], sums [heads, row], largest and total [heads], scores [group, SCORES].
template <class E, class P>
static void attend_by_rows(const Attention& a, const Item& item, float* scratch) {
  const int64_t group = a.group(), row = a.row(), heads = item.num_heads * group;
  float *queries = scratch, *sums = queries + heads * row, *largest = sums + heads * row, *total = largest + heads,
        *scores = total + heads;
  const E* q = query_at<E>(a, item, item.head, 0);
  for (int64_t h = 0; h < heads; h++) {
    for (int64_t d = 0; d < a.head_dim; d += WIDTH) store(queries + h * row + d, load(q + h * a.head_dim + d) * a.scale);
    for (int64_t d = 0; d < row; d += WIDTH) store(sums + h * row + d, Vec{});
    largest[h] = MASKED, total[h] = 0;
  }
  for (int64_t first = item.begin, end; first < item.end; first = end) {
    end = lesser(first / BLOCK * BLOCK + BLOCK, item.end);
    for (int64_t i = 0; i < item.num_heads; i++) {
      const int64_t head = item.head + i, first_query_head = i * group;  // the latter counts from the item's first one
      // The prefetched data: the same tokens in the next kv head, or the next tokens in the first kv head.
      const bool is_last = i + 1 == item.num_heads;
      const int64_t next_token = lesser(end, item.end - 1), next_head = is_last ? item.head : head + 1;
      for (int64_t t = first, n; t < end; t += n) {
        n = tokens_together(a, t, end);
        const P* keys = token_at<P>(a, item, head, 0, t);
        const int64_t next =
            token_at<P>(a, item, next_head, 0, is_last ? lesser(next_token + t - first, item.end - 1) : t) - keys;
        in_fours(group, [&](auto r, int64_t g) {
          score_rows<r()>(queries + (first_query_head + g) * row, row, keys, n, a.head_dim, next,
                          scores + g * SCORES + t - first);
        });
        multiply_by_scales<P>(a, item, head, 0, t, n, scores + t - first);
      }
      for (int64_t g = 0; g < group; g++) {
        const int64_t h = first_query_head + g;
        soften(a, item.head * group + h, item.position, first, end - first, scores + g * SCORES, sums + h * row,
               largest[h], total[h]);
      }
      for (int64_t t = first, n; t < end; t += n) {
        n = tokens_together(a, t, end);
        const P* values = token_at<P>(a, item, head, 1, t);
        multiply_by_scales<P>(a, item, head, 1, t, n, scores + t - first);
        const int64_t next =
            token_at<P>(a, item, next_head, 1, is_last ? lesser(next_token + t - first, item.end - 1) : t) - values;
        in_fours(group, [&](auto r, int64_t g) {
          add_all_values<r()>(scores + g * SCORES + t - first, values, n, a.head_dim, next,
                              sums + (first_query_head + g) * row, row);
        });
      }
    }
  }
  for (int64_t i = 0; i < item.num_heads; i++) {
    const int64_t h = i * group;
    write_out<E>(a, item, item.head + i, group, sums + h * row, largest + h, total + h);
  }
}
