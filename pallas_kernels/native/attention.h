// What an attention op works on, and the work that it is divided into.
//
// A tile is one query row of a sequence (decode) or up to TILE_LANES / group rows (prefill). Its context is cut at
// fixed positions into splits, and an item is a tile, a split and some kv heads. A sequence of 1200 tokens that
// decodes, and a prompt of 40 tokens with two query heads per kv head:
//
//     a0    | tokens 0-511 | 512-1023 | 1024-1199 |    three splits, whose softmaxes are joined
//     b0    | 0-31 |                                   query rows 0-31 of b
//     b1    | 0-39 |                                   query rows 32-39 of b
//
// Decodes that share leading pages attend to these together: their rows form tiles of several sequences, and each row
// goes on with the rest of its own context. Here c0 to c3 share 512 tokens:
//
//     c0-c3 | tokens 0-511 |                           one item: its keys and values are read once for all
//     c0    |              | 512-543 |                 an item each, whose softmaxes are joined with that one's
//     ...
//
// Nothing of this depends on the number of threads, nor on the other sequences, and the softmax of a row goes over
// blocks of BLOCK tokens that begin at fixed positions too. So a row's result is the same, to the bit, in every batch;
// but for what it shares, as in a tile of several sequences it may be added up in another way than alone.
#pragma once

#include <cstdint>

namespace jax_paged {

// Tokens that a row's softmax takes at once.
constexpr int64_t BLOCK = 64;
// Tokens of the context in an item; multiples of BLOCK.
constexpr int64_t DECODE_SPLIT = 512, PREFILL_SPLIT = 2048;
// Rows times query heads per kv head that a tile of several rows aims at.
constexpr int64_t TILE_LANES = 64;
// From so many query heads per kv head on, a decode is computed like a prefill.
constexpr int64_t MANY_HEADS = 8;
// Floats of a cache line: what is stored for each vector is padded to it.
constexpr int64_t LINE = 16;

enum class DType { kFloat32, kBFloat16, kFloat16 };
// What the pool holds: numbers of that type, or bytes and scales, see quantization.py.
enum class PoolType { kAsQueries, kInt8, kFloat8 };

// The arguments of an op, with the names that ops.py has for them.
struct Attention {
  DType dtype;          // of q and out
  PoolType pool_type;
  const void* q;        // [rows, heads, head_dim]
  const void* pool;     // [pages, parts, kv_heads, page_size, elements of a row]
  const int32_t* tables;  // [sequences, columns]
  const int32_t* lens;  // [sequences]
  const int32_t* starts;  // [sequences + 1], or null where every sequence has one row
  void* out;            // [rows, heads, value_dim]
  int64_t rows, seqs, heads, kv_heads, pages, page_size, head_dim, columns;
  int64_t parts;        // 2: keys and values; 1: keys, whose first value_dim numbers are the values
  int64_t value_dim;
  float scale;
  float soft_cap;       // 0 for none
  int64_t window;       // INT64_MAX / 2 for none
  const float* sinks;   // [heads] or null
  const float* bias;    // [heads, bias_len] or null
  int64_t bias_len;
  const int32_t* shared;  // [sequences] or null: leading pages that a decode may share

  int64_t group() const { return heads / kv_heads; }
  // Floats per row of keys and values in the kernels, and of sums: head_dim and value_dim, padded to vectors.
  int64_t row() const { return (head_dim + LINE - 1) / LINE * LINE; }
  int64_t value_row() const { return (value_dim + LINE - 1) / LINE * LINE; }
};

// What waits for several items, see plan.h.
struct Group;

// A row that decodes, in a tile of several sequences.
struct Member {
  int64_t row, position;
  float* partial;  // where the row's unfinished softmax goes
  Group* group;
};

// Some rows of a sequence, or of sequences that share what they attend to here, and a part of their context.
struct Item {
  int64_t seq;              // row of the block tables
  int64_t first_row, rows;  // query rows
  int64_t position;         // of the first row in the sequence
  int64_t head, num_heads;  // kv heads
  int64_t begin, end;       // tokens
  float* partial;           // where an unfinished softmax goes, as partial_floats says; null if it is finished
  const Member* members = nullptr;  // of several sequences: all rows, and `position` is the lowest of theirs

  int64_t row_at(int64_t i) const { return members ? members[i].row : first_row + i; }
  int64_t position_at(int64_t i) const { return members ? members[i].position : position + i; }
  int64_t lanes(const Attention& a) const { return rows * a.group(); }
};

// Floats of the unfinished softmax of one kv head: for each lane (a query row and query head) the largest score,
// the sum of the exponentials, and the sum of the weighted values.
inline int64_t partial_floats(const Attention& a, const Item& item) {
  return item.lanes(a) * (a.value_row() + 2);
}

// The same code, compiled for instructions of different processors.
struct Kernels {
  // Computes an item; `scratch` has scratch_floats of that item.
  void (*attend)(const Attention&, const Item&, float* scratch);
  // Joins `splits` partial results, `stride` floats apart, into the output. They are overwritten.
  void (*join)(const Attention&, const Item&, float* partials, int64_t splits, int64_t stride);
  int64_t (*scratch_floats)(const Attention&, const Item&);
  // In place of TILE_LANES, in bfloat16.
  int64_t bfloat16_lanes;
  // out[i] = silu(x[i]) * factors[i] in bfloat16, for n numbers, a multiple of 32; null where oneDNN does it as well.
  void (*multiply_silu)(const float* x, const float* factors, void* out, int64_t n);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels, kAmxKernels;
#endif

// The widest vectors that this processor has, of up to `max_width` floats; 256 are a tile, and 32 are numbers of bfloat16
// in a vector that is multiplied as such.
const Kernels& choose_kernels(int64_t max_width);

}  // namespace jax_paged
