// The arithmetic of attention. Each kernels_*.cc file includes it with the instructions of its processors enabled,
// after defining WIDTH (floats per vector), VARIANT (its namespace) and, for bfloat16 products, TILES (a header).
//
// The linker must not replace a function by the same function of another variant. Everything here is therefore static,
// and nothing of the standard library is used except types and functions that the compiler has built in.
//
// Template parameters: E is the type of queries and output, P that of the pool. In functions that read only the pool, E
// is the type of the pool. The argument `which` is 0 for keys and 1 for values.

namespace jax_paged {
namespace {
namespace VARIANT {

#include "vectors.h"

// This is finite so that a lane without visible tokens gets exp(0), which is masked later, instead of NaN.
constexpr float MASKED = -1e30f;
// Floats of a row of scores in by_rows.h: a block, and space because score_rows may write past its end.
constexpr int64_t SCORES = BLOCK + WIDTH;
// Vectors of each row of sums that the inner loops keep in registers.
constexpr int WIDE = WIDTH == 8 ? 2 : 4;

INLINE int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
INLINE int64_t lanes_of(const Attention& a, const Item& item) { return padded(item.lanes(a), LINE); }
INLINE bool is_by_rows(const Attention& a, const Item& item) {
  return item.rows == 1 && !item.members && a.group() < MANY_HEADS && a.head_dim % WIDTH == 0 &&
         a.value_dim == a.head_dim;
}

// Returns the number of floats of scratch memory that an item needs. attend_by_rows, attend_by_lanes and
// attend_by_tiles list its contents. The last two share one formula, which is large enough for both.
static int64_t scratch_floats(const Attention& a, const Item& item) {
  const int64_t lanes = lanes_of(a, item);
  if (is_by_rows(a, item)) return a.heads * (2 * a.row() + 2 * LINE) + a.group() * SCORES;
  const int64_t unpacked = a.pool_type == PoolType::kAsQueries ? 0 : BLOCK / 2 * a.row();
  return (2 * a.row() + BLOCK + 4 + BLOCK / 2) * lanes + BLOCK * a.row() + unpacked;
}

// Whether a pool of E has a scale for each row.
template <class E>
constexpr bool IS_QUANTIZED = sizeof(E) == 1;

// The tile of a token's page with the keys or values of one head.
template <class E>
INLINE const E* page_tile(const Attention& a, const Item& item, int64_t head, int which, int64_t token) {
  const int64_t page = a.tables[item.seq * a.columns + token / a.page_size];
  const int64_t tile = (page * a.parts + (a.parts == 2 ? which : 0)) * a.kv_heads + head;
  return static_cast<const E*>(a.pool) + tile * a.page_size * (a.head_dim + IS_QUANTIZED<E>);
}

// The first element of a token's keys or values in one head.
template <class E>
INLINE const E* token_at(const Attention& a, const Item& item, int64_t head, int which, int64_t token) {
  return page_tile<E>(a, item, head, which, token) + token % a.page_size * a.head_dim;
}

// The scale of a token. The scales of the following tokens of its page come after it.
template <class E>
INLINE const E* scales_at(const Attention& a, const Item& item, int64_t head, int which, int64_t token) {
  return page_tile<E>(a, item, head, which, token) + a.page_size * a.head_dim + token % a.page_size;
}

template <class E>
INLINE float scale_of(const E* at) {
  return bits_as<float>(uint32_t(uint8_t(at->bits)) << 23);
}

// The number of tokens in [token, end) that are in the same page as `token`.
INLINE int64_t tokens_together(const Attention& a, int64_t token, int64_t end) {
  return lesser(a.page_size - token % a.page_size, end - token);
}

template <class E>
INLINE const E* query_at(const Attention& a, const Item& item, int64_t head, int64_t lane) {
  const int64_t group = a.group(), row = item.row_at(lane / group);
  return static_cast<const E*>(a.q) + (row * a.heads + head * group + lane % group) * a.head_dim;
}

// Completes the softmax of a lane, including the sink, and writes the output.
template <class E>
INLINE void finish(const Attention& a, const Item& item, int64_t head, int64_t lane, const float* sums,
                   float largest, float total) {
  const int64_t group = a.group(), query_head = head * group + lane % group;
  float factor = 1;
  if (a.sinks) {
    const float sink = a.sinks[query_head], old = largest;
    largest = sink > old ? sink : old;
    factor = exp(broadcast(old - largest))[0];
    total = total * factor + exp(broadcast(sink - largest))[0];
  }
  factor /= total == 0 ? 1 : total;
  E* out = static_cast<E*>(a.out) + ((item.first_row + lane / group) * a.heads + query_head) * a.value_dim;
  for (int64_t d = 0; d < a.value_dim; d += WIDTH) store(out + d, load(sums + d) * factor, a.value_dim - d);
}

// An unfinished softmax in memory, with the size partial_floats.
struct Partial {
  float *largest, *total, *sums;
  Partial(int64_t lanes, float* at) : largest(at), total(at + lanes), sums(at + 2 * lanes) {}

  // Copies the state of `lanes` lanes to this memory.
  void store_lanes(const Attention& a, int64_t lanes, const float* sums_from, const float* largest_from,
                   const float* total_from) const {
    __builtin_memcpy(largest, largest_from, lanes * sizeof(float));
    __builtin_memcpy(total, total_from, lanes * sizeof(float));
    __builtin_memcpy(sums, sums_from, lanes * a.value_row() * sizeof(float));
  }
};

// Completes the softmax of `lanes` lanes, or stores it for `join`.
template <class E>
static void write_out(const Attention& a, const Item& item, int64_t head, int64_t lanes, const float* sums,
                      const float* largest, const float* total) {
  const int64_t row = a.value_row(), group = a.group();
  if (item.members) {
    for (int64_t i = 0; i < lanes; i += group) {
      const Partial to(group, item.members[i / group].partial);
      to.store_lanes(a, group, sums + i * row, largest + i, total + i);
    }
  } else if (item.partial) {
    const Partial to(lanes, item.partial + (head - item.head) * partial_floats(a, item));
    to.store_lanes(a, lanes, sums, largest, total);
  } else {
    for (int64_t i = 0; i < lanes; i++) finish<E>(a, item, head, i, sums + i * row, largest[i], total[i]);
  }
}

template <class E>
static void join(const Attention& a, const Item& item, float* partials, int64_t splits, int64_t stride) {
  for (int64_t i = 0; i < item.num_heads; i++) {
    const Partial first(item.lanes(a), partials + i * partial_floats(a, item));
    for (int64_t lane = 0; lane < item.lanes(a); lane++) {
      float* sums = first.sums + lane * a.value_row();
      for (int64_t split = 1; split < splits; split++) {
        const Partial next(item.lanes(a), partials + split * stride + i * partial_floats(a, item));
        const float old = first.largest[lane], other = next.largest[lane], now = other > old ? other : old;
        const float factor = exp(broadcast(old - now))[0], other_factor = exp(broadcast(other - now))[0];
        first.largest[lane] = now;
        first.total[lane] = first.total[lane] * factor + next.total[lane] * other_factor;
        for (int64_t d = 0; d < a.value_row(); d += WIDTH) {
          store(sums + d, load(sums + d) * factor + load(next.sums + lane * a.value_row() + d) * other_factor);
        }
      }
      finish<E>(a, item, item.head + i, lane, sums, first.largest[lane], first.total[lane]);
    }
  }
}

// Applies the soft cap to scores, or adds the distance bias of each lane's query head and distance from query to key.
INLINE Vec with_cap_or_bias(const Attention& a, Vec score, IntVec query_head, IntVec distance) {
  if (a.soft_cap > 0) return tanh(score / a.soft_cap) * a.soft_cap;
  if (a.bias) {
    for (int i = 0; i < WIDTH; i++) {
      score[i] += a.bias[query_head[i] * a.bias_len + lesser(greater(distance[i], 0), a.bias_len - 1)];
    }
  }
  return score;
}

INLINE IntVec iota() {
  IntVec v;
  for (int i = 0; i < WIDTH; i++) v[i] = i;
  return v;
}

#include "by_rows.h"

#include "by_lanes.h"

#if defined(TILES)
#include "by_tiles.h"
#endif

template <class E, class P>
static void attend_over(const Attention& a, const Item& item, float* scratch) {
  if (is_by_rows(a, item)) return attend_by_rows<E, P>(a, item, scratch);
#if defined(TILES)
  if constexpr (std::is_same_v<E, BFloat16>) {
    if (is_by_tiles(a, item)) return attend_by_tiles<P>(a, item, scratch);
  }
#endif
  return attend_by_lanes<E, P>(a, item, scratch);
}

template <class E>
static void attend_in(const Attention& a, const Item& item, float* scratch) {
  if (a.pool_type == PoolType::kInt8) return attend_over<E, Int8>(a, item, scratch);
  if (a.pool_type == PoolType::kFloat8) return attend_over<E, Float8>(a, item, scratch);
  return attend_over<E, E>(a, item, scratch);
}

static void attend(const Attention& a, const Item& item, float* scratch) {
  if (a.dtype == DType::kFloat32) return attend_in<float>(a, item, scratch);
  if (a.dtype == DType::kBFloat16) return attend_in<BFloat16>(a, item, scratch);
  return attend_in<Float16>(a, item, scratch);
}

static void join_partials(const Attention& a, const Item& item, float* partials, int64_t splits,
                          int64_t stride) {
  if (a.dtype == DType::kFloat32) return join<float>(a, item, partials, splits, stride);
  if (a.dtype == DType::kBFloat16) return join<BFloat16>(a, item, partials, splits, stride);
  return join<Float16>(a, item, partials, splits, stride);
}

}  // namespace VARIANT
}  // namespace
}  // namespace jax_paged
