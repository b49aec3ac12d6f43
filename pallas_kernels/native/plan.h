// Divides an attention op into items, checking every index on the way, and runs them. attention.h draws them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "parallel.h"

namespace jax_paged {

class Plan {
 public:
  // Items of about as many tokens are made for `threads` threads. A message is left in error() if an index is out of
  // range; then nothing may run.
  Plan(const Attention& a, const Kernels& kernels, int64_t threads) : a_(a), kernels_(kernels) {
    if (!check_rows()) return;
    // Decodes are cut by heads too where they are few. No head knows of the others, so results stay the same.
    int64_t decode_splits = 0;
    for (int64_t b = 0; b < a_.seqs; b++) {
      if (rows_of(b) == 1) decode_splits += num_splits(first_token(a_.lens[b] - 1), a_.lens[b], DECODE_SPLIT);
    }
    const int64_t parts = std::min(a_.kv_heads, (4 * threads + decode_splits) / std::max<int64_t>(decode_splits, 1));
    for (int64_t b = 0; b < a_.seqs && error_.empty(); b++) {
      const int64_t rows = rows_of(b), len = a_.lens[b];
      if (rows == 0 || len == 0) continue;
      if (!check_pages(b, first_token(len - rows))) return;
      if (rows == 1) {
        add_tile(b, row_of(b), 1, len - 1, DECODE_SPLIT, (a_.kv_heads + parts - 1) / parts);
        continue;
      }
      const int64_t lanes = a_.dtype == DType::kBFloat16 ? kernels_.bfloat16_lanes : TILE_LANES;
      const int64_t tile = std::max<int64_t>(1, lanes / a_.group());
      for (int64_t first = 0; first < rows; first += tile) {
        add_tile(b, row_of(b) + first, std::min(tile, rows - first), len - rows + first, PREFILL_SPLIT, 1);
      }
    }
    // The longest first, so that threads end at about the same time.
    std::stable_sort(items_.begin(), items_.end(), [this](const Job& x, const Job& y) { return cost(x) > cost(y); });
  }

  const std::string& error() const { return error_; }

  // Computes all items, `schedule` and `threads` as parallel_for has them.
  template <class Schedule>
  void run(int64_t threads, Schedule schedule) {
    clear_rows_without_context();
    int64_t total = 0;
    for (const Job& job : items_) total += cost(job);
    const int64_t n = int64_t(items_.size());
    const int64_t helpers = total < SMALL ? 0 : std::min(threads, n) - 1;
    parallel_for(n, std::max<int64_t>(helpers, 0), schedule, [this](int64_t i) { run_item(items_[i]); });
  }

 private:
  // Work that takes less time than to wake a thread: bytes of the pool, read once.
  static constexpr int64_t SMALL = 64 * 1024;

  // Splits of one tile and some heads. The last one to be done joins them.
  struct Group {
    std::unique_ptr<float[]> partials;
    int64_t splits, stride;
    std::atomic<int64_t> missing;
    Group(int64_t splits, int64_t stride)
        : partials(new float[splits * stride]), splits(splits), stride(stride), missing(splits) {}
  };
  struct Job {
    Item item;
    Group* group;
  };

  int64_t row_of(int64_t b) const { return a_.starts ? a_.starts[b] : b; }
  int64_t rows_of(int64_t b) const { return row_of(b + 1) - row_of(b); }
  // The first token that a row at `position` sees.
  int64_t first_token(int64_t position) const { return std::max<int64_t>(0, position - a_.window + 1); }
  static int64_t num_splits(int64_t begin, int64_t end, int64_t split) {
    return end <= begin ? 0 : (end - 1) / split - begin / split + 1;
  }
  // A lane costs a prefill as much as reading costs a decode.
  int64_t cost(const Job& job) const {
    const Item& item = job.item;
    return (item.end - item.begin) * item.num_heads * a_.head_dim * (8 + 4 * (item.lanes(a_) - 1) / 4);
  }

  bool check_rows() {
    if (row_of(0) < 0 || row_of(a_.seqs) > a_.rows) return fail("query_start_loc leaves the rows of q");
    for (int64_t b = 0; b < a_.seqs; b++) {
      const int64_t rows = rows_of(b), len = a_.lens[b];
      if (rows < 0) return fail("query_start_loc decreases at sequence " + std::to_string(b));
      if (len < 0) return fail("context_lens is negative at sequence " + std::to_string(b));
      if (len > a_.columns * a_.page_size) return fail("the context is longer than the block table of sequence " + std::to_string(b));
      if (len > 0 && rows > len) return fail("there are more queries than tokens in sequence " + std::to_string(b));
    }
    return true;
  }

  bool check_pages(int64_t b, int64_t first) {
    const int32_t* table = a_.tables + b * a_.columns;
    for (int64_t i = first / a_.page_size; i * a_.page_size < a_.lens[b]; i++) {
      if (table[i] < 0 || table[i] >= a_.pages) {
        return fail("block_tables has page " + std::to_string(table[i]) + " in sequence " + std::to_string(b) +
                    "; the pool has " + std::to_string(a_.pages));
      }
    }
    return true;
  }

  bool fail(std::string message) {
    error_ = std::move(message);
    return false;
  }

  void add_tile(int64_t b, int64_t row, int64_t rows, int64_t position, int64_t split, int64_t heads) {
    const int64_t begin = first_token(position), end = position + rows;
    const int64_t splits = num_splits(begin, end, split);
    for (int64_t head = 0; head < a_.kv_heads; head += heads) {
      Item item = {b, row, rows, position, head, std::min(heads, a_.kv_heads - head), begin, end, nullptr};
      Group* group = nullptr;
      if (splits > 1) {
        groups_.emplace_back(splits, item.num_heads * partial_floats(a_, item));
        group = &groups_.back();
      }
      for (int64_t i = 0; i < splits; i++) {
        item.begin = std::max(begin, (begin / split + i) * split);
        item.end = std::min(end, (begin / split + i + 1) * split);
        item.partial = group ? group->partials.get() + i * group->stride : nullptr;
        items_.push_back({item, group});
      }
    }
  }

  void clear(int64_t row, int64_t rows) {
    const int64_t bytes = a_.heads * a_.head_dim * (a_.dtype == DType::kFloat32 ? 4 : 2);
    std::memset(static_cast<char*>(a_.out) + row * bytes, 0, rows * bytes);
  }

  void clear_rows_without_context() {
    clear(0, row_of(0));
    for (int64_t b = 0; b < a_.seqs; b++) {
      if (a_.lens[b] == 0) clear(row_of(b), rows_of(b));
    }
    clear(row_of(a_.seqs), a_.rows - row_of(a_.seqs));
  }

  void run_item(const Job& job) {
    // Kept from one op to the next: fresh memory would be mapped page by page.
    thread_local std::vector<float> scratch;
    const size_t needed = kernels_.scratch_floats(a_, job.item) + LINE;
    if (scratch.size() < needed) scratch.resize(needed);
    const auto misaligned = reinterpret_cast<uintptr_t>(scratch.data()) / sizeof(float) % LINE;
    kernels_.attend(a_, job.item, scratch.data() + (LINE - misaligned) % LINE);
    Group* group = job.group;
    if (group && group->missing.fetch_sub(1) == 1) {
      kernels_.join(a_, job.item, group->partials.get(), group->splits, group->stride);
    }
  }

  const Attention& a_;
  const Kernels& kernels_;
  std::string error_;
  std::vector<Job> items_;
  std::deque<Group> groups_;
};

}  // namespace jax_paged
