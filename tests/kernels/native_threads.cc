// Attention of random batches on threads that start late or never, for the thread sanitizer: the results must be those
// of a single thread, to the bit. `make native-sanitize` builds and runs it.

#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "../../pallas_kernels/native/plan.h"

using namespace jax_paged;

namespace {

std::mt19937 rng(0);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

struct Batch {
  std::vector<float> q, pool, sinks;
  std::vector<int32_t> tables, lens, starts{0}, shared;
  Attention a = {};

  Batch() {
    a.dtype = DType::kFloat32;
    a.kv_heads = draw(1, 3), a.heads = a.kv_heads * (1 << draw(0, 4));
    a.page_size = 1 << draw(0, 5), a.head_dim = 8 * draw(1, 10);
    a.parts = draw(1, 2), a.value_dim = a.parts == 2 ? a.head_dim : draw(1, a.head_dim);
    a.seqs = draw(1, 9), a.columns = (draw(1, 3) == 3 ? 2500 : 150) / a.page_size + 1;
    a.scale = 0.2f, a.soft_cap = draw(0, 3) ? 0 : 5, a.window = draw(0, 1) ? INT64_MAX / 2 : draw(1, 2000);
    a.pages = 1;
    tables.assign(a.seqs * a.columns, -1);
    for (int64_t b = 0; b < a.seqs; b++) {
      lens.push_back(int32_t(draw(0, a.columns * a.page_size)));
      const int64_t most = std::min<int64_t>(lens.back(), 50);
      starts.push_back(starts.back() + int32_t(draw(0, 1) ? std::min<int64_t>(most, 1) : draw(0, most)));
      for (int64_t i = 0; i * a.page_size < lens.back(); i++) tables[b * a.columns + i] = int32_t(a.pages++);
    }
    a.rows = starts.back() + 3;
    share_pages();
    std::normal_distribution<float> normal;
    for (int64_t i = a.rows * a.heads * a.head_dim; i > 0; i--) q.push_back(normal(rng));
    for (int64_t i = a.pages * a.parts * a.kv_heads * a.page_size * a.head_dim; i > 0; i--) pool.push_back(normal(rng));
    for (int64_t i = 0; i < a.heads; i++) sinks.push_back(normal(rng));
    a.q = q.data(), a.pool = pool.data(), a.sinks = sinks.data();
    a.tables = tables.data(), a.lens = lens.data(), a.starts = starts.data();
    if (a.window > 2000) a.shared = shared.data();
  }

  // Lets most decodes begin with the pages of the first of them, as many as all can share.
  void share_pages() {
    shared.assign(a.seqs, 0);
    std::vector<int64_t> seqs;
    int64_t pages = INT64_MAX;
    for (int64_t b = 0; b < a.seqs; b++) {
      if (starts[b + 1] - starts[b] != 1 || lens[b] <= a.page_size || draw(0, 4) == 0) continue;
      seqs.push_back(b), pages = std::min(pages, (lens[b] - 1) / a.page_size);
    }
    for (int64_t b : seqs) {
      shared[b] = int32_t(pages), shares += seqs.size() > 1;
      std::copy_n(&tables[seqs[0] * a.columns], pages, &tables[b * a.columns]);
    }
  }
  int64_t shares = 0;

  std::vector<float> attend(const Kernels& kernels, int64_t threads, std::vector<std::thread>& started) {
    std::vector<float> out(a.rows * a.heads * a.value_dim, NAN);
    Attention attention = a;
    attention.out = out.data();
    Plan plan(attention, kernels, threads);
    if (!plan.error().empty()) {
      std::printf("%s\n", plan.error().c_str());
      std::exit(1);
    }
    plan.run(threads, [&](auto task) {
      const int64_t delay = draw(0, 3) * 100;
      started.emplace_back([task, delay] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
        task();
      });
    });
    return out;
  }
};

}  // namespace

int main() {
  std::vector<const Kernels*> variants = {&kBaselineKernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) variants.push_back(&kAvx2Kernels);
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) variants.push_back(&kAvx512Kernels);
  if (__builtin_cpu_supports("avx512bf16")) variants.push_back(&kAvx512Bf16Kernels);
#endif
  int64_t shares = 0;
  for (int i = 0; i < 60; i++) {
    Batch batch;
    if (batch.a.shared) shares += batch.shares;
    std::vector<float> first;
    for (const Kernels* kernels : variants) {
      std::vector<std::thread> started;
      const std::vector<float> alone = batch.attend(*kernels, 1, started);
      const std::vector<float> together = batch.attend(*kernels, 4, started);
      for (std::thread& thread : started) thread.join();
      if (first.empty()) first = alone;
      for (size_t j = 0; j < alone.size(); j++) {
        if (alone[j] != together[j] || !(std::abs(alone[j] - first[j]) < 1e-4f)) {
          std::printf("batch %d: %g alone, %g on four threads, %g with other vectors\n", i, alone[j], together[j],
                      first[j]);
          return 1;
        }
      }
    }
  }
  std::printf("60 batches: equal on one thread and on four, %d decodes with shared pages\n", int(shares));
  return shares > 0 ? 0 : 1;
}
