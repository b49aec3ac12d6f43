// Divides an attention op into items, checks every index, and runs the items. attention.h describes items.
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

// All splits of one tile and some kv heads, including the splits of a shared prefix. The thread that completes the last
// item joins their softmaxes.
struct Group {
  Item item;  // one of the tile's items
  std::unique_ptr<float[]> partials;
  int64_t splits, stride;
  std::atomic<int64_t> missing;  // items that are not complete
  Group(const Item& item, int64_t splits, int64_t stride, int64_t items)
      : item(item), partials(new float[splits * stride]), splits(splits), stride(stride), missing(items) {}
};

class Plan {
 public:
  // Makes the items. If an index is out of range, error() is not empty, and run() must not be called.
  Plan(const Attention& a, const Kernels& kernels, int64_t threads) : a_(a), kernels_(kernels) {
    if (!check_rows() || !find_prefixes()) return;
    // If there are few decode splits, their kv heads are divided among several items, at least four per thread if there
    // are enough heads. Heads are independent, so this does not change results.
    int64_t decode_splits = 0;
    for (int64_t b = 0; b < a_.seqs; b++) {
      if (rows_of(b) == 1) decode_splits += num_splits(first_own(b), a_.lens[b], DECODE_SPLIT);
    }
    const int64_t parts = std::min(a_.kv_heads, (4 * threads + decode_splits) / std::max<int64_t>(decode_splits, 1));
    const int64_t heads = (a_.kv_heads + parts - 1) / parts;
    for (int64_t b = 0; b < a_.seqs && error_.empty(); b++) {
      const int64_t rows = rows_of(b), len = a_.lens[b];
      if (rows == 0 || len == 0) continue;
      if (!check_pages(b, first_token(len - rows))) return;
      if (rows == 1) {
        add_tile(b, row_of(b), 1, len - 1, first_own(b), DECODE_SPLIT, heads, prefix_of(b));
        continue;
      }
      for (int64_t first = 0; first < rows; first += tile_rows()) {
        const int64_t position = len - rows + first;
        add_tile(b, row_of(b) + first, std::min(tile_rows(), rows - first), position, first_token(position), PREFILL_SPLIT, 1);
      }
    }
    for (const Prefix& prefix : prefixes_) {
      if (prefix.seqs.size() > 1) add_prefix(prefix, heads);
    }
    // The most expensive items run first, so that the threads finish at about the same time.
    std::stable_sort(items_.begin(), items_.end(), [this](const Job& x, const Job& y) { return cost(x) > cost(y); });
  }

  const std::string& error() const { return error_; }

  // Computes all items with at most `threads` threads; `schedule` is that of parallel_for.
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
  // Total cost below which waking a thread takes longer than the work, in the unit of cost().
  static constexpr int64_t SMALL = 64 * 1024;

  struct Job {
    Item item;
    Group* group;  // null if the item finishes its softmax, or has members
  };
  // Leading tokens that some decoding sequences share.
  struct Prefix {
    int64_t tokens;
    std::vector<int64_t> seqs;
    std::vector<Group*> groups;  // for each sequence, one group per range of kv heads
    int64_t splits() const { return num_splits(0, tokens, DECODE_SPLIT); }
  };

  int64_t row_of(int64_t b) const { return a_.starts ? a_.starts[b] : b; }
  int64_t rows_of(int64_t b) const { return row_of(b + 1) - row_of(b); }
  // The first token that a row at `position` attends to.
  int64_t first_token(int64_t position) const { return std::max<int64_t>(0, position - a_.window + 1); }
  static int64_t num_splits(int64_t begin, int64_t end, int64_t split) {
    return end <= begin ? 0 : (end - 1) / split - begin / split + 1;
  }
  // The prefix that sequence b shares with others; null for none.
  Prefix* prefix_of(int64_t b) {
    if (prefixes_.empty() || prefix_index_[b] < 0) return nullptr;
    Prefix& prefix = prefixes_[prefix_index_[b]];
    return prefix.seqs.size() > 1 ? &prefix : nullptr;
  }
  // The first token of a decode's own items, after a shared prefix.
  int64_t first_own(int64_t b) {
    const Prefix* prefix = prefix_of(b);
    return prefix ? prefix->tokens : first_token(a_.lens[b] - 1);
  }
  // Maximum number of query rows of a tile.
  int64_t tile_rows() const {
    const int64_t lanes = a_.dtype == DType::kBFloat16 ? kernels_.bfloat16_lanes : TILE_LANES;
    return std::max<int64_t>(1, lanes / a_.group());
  }
  // Estimated time of an item. For each token and element of a head, reading the key and the value costs 8 (their bytes
  // in float32), and computing costs 1 for each lane after the first.
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

  // Groups the decodes whose leading a.shared pages are equal.
  bool find_prefixes() {
    if (!a_.shared) return true;
    prefix_index_.assign(a_.seqs, -1);
    for (int64_t b = 0; b < a_.seqs; b++) {
      const int64_t pages = a_.shared[b], tokens = pages * a_.page_size;
      if (pages < 0) return fail("shared_blocks is negative at sequence " + std::to_string(b));
      if (pages == 0 || a_.lens[b] == 0 || rows_of(b) != 1) continue;
      if (tokens >= a_.lens[b]) return fail("shared_blocks leaves no token to sequence " + std::to_string(b));
      const auto shares = [&](const Prefix& prefix) {
        const int32_t *table = a_.tables + b * a_.columns, *other = a_.tables + prefix.seqs[0] * a_.columns;
        return prefix.tokens == tokens && std::equal(table, table + pages, other);
      };
      const auto found = std::find_if(prefixes_.begin(), prefixes_.end(), shares);
      prefix_index_[b] = found - prefixes_.begin();
      if (found == prefixes_.end()) {
        prefixes_.push_back({tokens, {b}, {}});
      } else {
        found->seqs.push_back(b);
      }
    }
    return true;
  }

  bool fail(std::string message) {
    error_ = std::move(message);
    return false;
  }

  // Adds the items of a tile of sequence b: `rows` query rows that begin at row `row` of q and at `position` of the
  // sequence. They attend to the tokens from `begin` on, in splits of `split` tokens, and an item has up to `heads` kv
  // heads. The splits of `prefix`, which end at `begin`, are only counted: add_prefix adds their items.
  void add_tile(int64_t b, int64_t row, int64_t rows, int64_t position, int64_t begin, int64_t split, int64_t heads,
                Prefix* prefix = nullptr) {
    const int64_t end = position + rows, splits = num_splits(begin, end, split), shared = prefix ? prefix->splits() : 0;
    for (int64_t head = 0; head < a_.kv_heads; head += heads) {
      Item item = {b, row, rows, position, head, std::min(heads, a_.kv_heads - head), begin, end, nullptr};
      Group* group = nullptr;
      if (splits + shared > 1) {
        // A shared split has one item per kv head.
        const int64_t items = splits + shared * item.num_heads;
        groups_.emplace_back(item, splits + shared, item.num_heads * partial_floats(a_, item), items);
        group = &groups_.back();
        if (prefix) prefix->groups.push_back(group);
      }
      for (int64_t i = 0; i < splits; i++) {
        item.begin = std::max(begin, (begin / split + i) * split);
        item.end = std::min(end, (begin / split + i + 1) * split);
        item.partial = group ? group->partials.get() + (shared + i) * group->stride : nullptr;
        items_.push_back({item, group});
      }
    }
  }

  // Adds the items of a shared prefix. `heads` is the value with which add_tile was called for its sequences.
  void add_prefix(const Prefix& prefix, int64_t heads) {
    const int64_t n = int64_t(prefix.seqs.size()), head_ranges = int64_t(prefix.groups.size()) / n;
    for (int64_t first = 0; first < n; first += tile_rows()) {
      const int64_t rows = std::min(tile_rows(), n - first);
      for (int64_t head = 0; head < a_.kv_heads; head++) {
        for (int64_t i = 0; i < prefix.splits(); i++) {
          members_.emplace_back();
          int64_t lowest = INT64_MAX;
          for (int64_t m = first; m < first + rows; m++) {
            const int64_t b = prefix.seqs[m], position = a_.lens[b] - 1;
            Group* const group = prefix.groups[m * head_ranges + head / heads];
            float* const partial = group->partials.get() + i * group->stride + head % heads * a_.group() * (a_.value_row() + 2);
            members_.back().push_back({row_of(b), position, partial, group});
            lowest = std::min(lowest, position);
          }
          const int64_t begin = i * DECODE_SPLIT, end = std::min(prefix.tokens, begin + DECODE_SPLIT);
          items_.push_back({{prefix.seqs[first], -1, rows, lowest, head, 1, begin, end, nullptr, members_.back().data()}, nullptr});
        }
      }
    }
  }

  void clear(int64_t row, int64_t rows) {
    const int64_t bytes = a_.heads * a_.value_dim * (a_.dtype == DType::kFloat32 ? 4 : 2);
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
    // Reused by later ops, because the system maps new memory page by page.
    thread_local std::vector<float> scratch;
    const size_t needed = kernels_.scratch_floats(a_, job.item) + LINE;
    if (scratch.size() < needed) scratch.resize(needed);
    const auto misaligned = reinterpret_cast<uintptr_t>(scratch.data()) / sizeof(float) % LINE;
    kernels_.attend(a_, job.item, scratch.data() + (LINE - misaligned) % LINE);
    if (job.group) leave(*job.group);
    for (int64_t i = 0; job.item.members && i < job.item.rows; i++) leave(*job.item.members[i].group);
  }

  // Marks one item of a group as complete, and joins the splits after the last one.
  void leave(Group& group) {
    if (group.missing.fetch_sub(1) == 1) {
      kernels_.join(a_, group.item, group.partials.get(), group.splits, group.stride);
    }
  }

  const Attention& a_;
  const Kernels& kernels_;
  std::string error_;
  std::vector<Job> items_;
  std::deque<Group> groups_;
  std::vector<Prefix> prefixes_;
  std::vector<int64_t> prefix_index_;  // per sequence, -1 for none; empty without a.shared
  std::deque<std::vector<Member>> members_;
};

}  // namespace jax_paged
