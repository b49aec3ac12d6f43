// The arguments of an attention op, and the items of work that it is divided into.
//
// A tile is one query row of a sequence (decode) or up to TILE_LANES / group rows (prefill). Its context is cut at
// fixed positions into splits. An item is one tile, one split and some kv heads. Example with two query heads per kv
// head: sequence a decodes with a context of 1200 tokens, and sequence b is a prompt of 40 tokens. Their tiles are a0,
// b0 and b1:
//
//     a0    | tokens 0-511 | 512-1023 | 1024-1199 |    three splits, whose softmaxes are joined
//     b0    | 0-31 |                                   query rows 0-31 of b
//     b1    | 0-39 |                                   query rows 32-39 of b
//
// Decodes that share leading pages attend to these pages together: their rows form tiles of several sequences. Each
// row also attends to the rest of its own context, in items of its own. Here c0 to c3 share 512 tokens:
//
//     c0-c3 | tokens 0-511 |                           one item: its keys and values are read once for all rows
//     c0    |              | 512-543 |                 one item per row; its softmax is joined with the row's part of
//     ...                                              the shared item
//
// The positions of the splits, and of the blocks of BLOCK tokens within them, are fixed. They do not depend on other
// sequences or on the number of threads, which only determines the number of kv heads per item. A row's result is
// therefore bit-identical in every batch, with two exceptions: tokens shared with other sequences, and a prompt chunk
// of a single row, may be computed by another loop, which adds in another order.
#pragma once

#include <cstdint>

namespace jax_paged {

// Tokens of one iteration of the online softmax.
constexpr int64_t BLOCK = 64;
// Tokens of a split; multiples of BLOCK.
constexpr int64_t DECODE_SPLIT = 512, PREFILL_SPLIT = 2048;
// Maximum number of lanes (query rows times query heads per kv head) in a tile of several rows.
constexpr int64_t TILE_LANES = 64;
// Number of query heads per kv head from which on a decode uses the loops of a prefill.
constexpr int64_t MANY_HEADS = 8;
// Floats of a cache line. Rows of queries, keys, values and sums are padded to a multiple of it.
constexpr int64_t LINE = 16;

enum class DType { kFloat32, kBFloat16, kFloat16 };
// Elements of the pool: the dtype of the queries, or the bytes and scales of quantization.py.
enum class PoolType { kAsQueries, kInt8, kFloat8 };

// The arguments of ops.paged_decode and ops.ragged_attention.
struct Attention {
  DType dtype;          // of q and out
  PoolType pool_type;
  const void* q;        // [rows, heads, head_dim]
  const void* pool;     // [pages, parts, kv_heads, page_size, elements of a row]
  const int32_t* tables;  // [sequences, columns], block_tables
  const int32_t* lens;  // [sequences], context_lens
  const int32_t* starts;  // [sequences + 1], query_start_loc; null if every sequence has one row
  void* out;            // [rows, heads, value_dim]
  int64_t rows, seqs, heads, kv_heads, pages, page_size, head_dim, columns;
  int64_t parts;        // 2: keys and values; 1: keys, whose first value_dim elements are the values
  int64_t value_dim;
  float scale;
  float soft_cap;       // 0 for none
  int64_t window;       // tokens; a number larger than all contexts for none
  const float* sinks;   // [heads] or null
  const float* bias;    // [heads, bias_len] or null
  int64_t bias_len;
  const int32_t* shared;  // [sequences] or null, shared_blocks

  // Query heads per kv head.
  int64_t group() const { return heads / kv_heads; }
  // Floats per row of queries, keys and values in scratch memory, and per row of sums: head_dim and value_dim, padded.
  int64_t row() const { return (head_dim + LINE - 1) / LINE * LINE; }
  int64_t value_row() const { return (value_dim + LINE - 1) / LINE * LINE; }
};

// Items whose softmaxes are joined, see plan.h. Not related to Attention::group().
struct Group;

// A row of a tile of several sequences. Its sequence decodes.
struct Member {
  int64_t row, position;
  float* partial;  // receives the row's unfinished softmax
  Group* group;
};

// A unit of work: query rows of one sequence, or of sequences that share pages, with a range of their context and some
// kv heads.
struct Item {
  int64_t seq;              // row of the block tables
  int64_t first_row, rows;  // query rows
  int64_t position;         // position of the first row in its sequence
  int64_t head, num_heads;  // kv heads
  int64_t begin, end;       // tokens
  float* partial;           // receives the unfinished softmax (see partial_floats); null if this item finishes it
  // One entry per row of a tile of several sequences, and `position` is the lowest of their positions; null for a tile
  // of one sequence.
  const Member* members = nullptr;

  int64_t row_at(int64_t i) const { return members ? members[i].row : first_row + i; }
  int64_t position_at(int64_t i) const { return members ? members[i].position : position + i; }
  int64_t lanes(const Attention& a) const { return rows * a.group(); }
};

// Floats of the unfinished softmax of one kv head: for each lane (a query row and query head) the largest score,
// the sum of the weights, and the sum of the weighted values.
inline int64_t partial_floats(const Attention& a, const Item& item) {
  return item.lanes(a) * (a.value_row() + 2);
}

// The functions of kernels.h, compiled for the instructions of one type of processor.
struct Kernels {
  // Computes an item. The size of `scratch` is scratch_floats of that item.
  void (*attend)(const Attention&, const Item&, float* scratch);
  // Joins `splits` partial results, `stride` floats apart, and writes the output. Overwrites the partial results.
  void (*join)(const Attention&, const Item&, float* partials, int64_t splits, int64_t stride);
  int64_t (*scratch_floats)(const Attention&, const Item&);
  // Replaces TILE_LANES in bfloat16.
  int64_t bfloat16_lanes;
  // out[i] = silu(x[i]) * factors[i] in bfloat16, for n numbers, a multiple of 32. Null if oneDNN's activation is used.
  void (*multiply_silu)(const float* x, const float* factors, void* out, int64_t n);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels, kAmxKernels;
#endif

// Returns the kernels with the widest instructions of this processor up to `max_width`, see attention.py.
const Kernels& choose_kernels(int64_t max_width);

}  // namespace jax_paged
