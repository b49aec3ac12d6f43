// Work on XLA's threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace jax_paged {

// Calls f(i) for all i < n, in this thread and in `helpers` tasks that are passed to schedule(task). Returns when all
// calls have returned. Each thread repeatedly takes the next i. If no task ever runs, this thread makes all calls, so
// that it may itself belong to the thread pool that runs the tasks. A task that starts after all calls are taken
// returns without using f, which may no longer exist.
template <class Schedule, class F>
void parallel_for(int64_t n, int64_t helpers, Schedule schedule, const F& f) {
  struct Claims {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const auto claims = std::make_shared<Claims>();
  const auto work = [claims, n, f = &f] {
    for (int64_t i; (i = claims->next.fetch_add(1)) < n;) {
      (*f)(i);
      if (claims->done.fetch_add(1) + 1 == n) {
        const std::lock_guard<std::mutex> lock(claims->mutex);
        claims->all_done.notify_one();
      }
    }
  };
  for (int64_t i = 0; i < helpers; i++) schedule([work] { work(); });
  work();
  // The other threads finish soon. Sleeping and waking up would take longer than most of these waits.
  for (int spins = 0; spins < 4000; spins++) {
    if (claims->done.load() == n) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(claims->mutex);
  claims->all_done.wait(lock, [&] { return claims->done.load() == n; });
}

}  // namespace jax_paged
