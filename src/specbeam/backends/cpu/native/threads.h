// A pool of threads that share the items of a loop. They spin during a pass and for some milliseconds after it, because
// the next loop follows at once. Then they sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__clang__)
#define SPECBEAM_ONE_COPY __attribute__((noinline))
#else
#define SPECBEAM_ONE_COPY __attribute__((noipa))
#endif

namespace specbeam {

class Threads {
 public:
  // Takes fewer threads than `count` where the system makes no more: a limit on processes or on memory.
  explicit Threads(int count) : ranges(count) {
    workers.reserve(count - 1);
    try {
      for (int i = 1; i < count; i++) workers.emplace_back([this, i] { work(i); });
    } catch (const std::exception &) {
    }
  }

  ~Threads() {
    {
      std::lock_guard<std::mutex> held(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (auto &worker : workers) worker.join();
  }

  int count() const { return int(workers.size()) + 1; }

  // The workers stay awake while an object of this type lives.
  struct Awake {
    Threads &threads;
    explicit Awake(Threads &all) : threads(all) {
      if (threads.workers.empty()) return;
      {
        std::lock_guard<std::mutex> held(threads.mutex);
        threads.awake.store(true, std::memory_order_release);
      }
      threads.wake.notify_all();
    }
    ~Awake() { threads.awake.store(false, std::memory_order_release); }
    Awake(const Awake &) = delete;
  };

  // Runs the body for each item. Any thread may do any item, so an item's result must not depend on the thread. Throws
  // std::bad_alloc if an item ran out of memory.
  template <class Body> void each(int64_t items, int64_t chunk, const Body &body) {
    if (items <= 0) return;
    if (workers.empty() || items <= chunk) {
      for (int64_t i = 0; i < items; i++) call<Body>(&body, i);
      return;
    }
    run = call<Body>;
    this->data = &body;
    this->chunk = chunk;
    for (int i = 0; i < count(); i++) {
      ranges[i].next.store(items * i / count(), std::memory_order_relaxed);
      ranges[i].end = items * (i + 1) / count();
    }
    state.store(++round << 32 | OPEN_BIT, std::memory_order_release);
    share(0);
    // A worker that has not joined by now is not waited for: it may have lost its core to another process.
    state.fetch_and(~OPEN_BIT, std::memory_order_acq_rel);
    for (int spins = 0; state.load(std::memory_order_acquire) & WORKERS_MASK; spins++) rest(spins);
    if (failed.exchange(false)) throw std::bad_alloc();
  }

 private:
  // All callers share one copy of a body's code: two copies might round differently.
  template <class Body> SPECBEAM_ONE_COPY static void call(const void *body, int64_t i) {
    (*static_cast<const Body *>(body))(i);
  }

  static void rest([[maybe_unused]] int spins) {
#if defined(__x86_64__)
    if (spins < SPINS_BEFORE_YIELD) return __builtin_ia32_pause();
#elif defined(__aarch64__)
    if (spins < SPINS_BEFORE_YIELD) {
      __asm__ volatile("yield");
      return;
    }
#endif
    std::this_thread::yield();  // another thread may need the core
  }

  // A thread first does its own range, whose next weights it has prefetched already. Then it helps with the ranges of
  // other threads.
  void share(int own) {
    try {
      for (int i = 0; i < count(); i++) {
        Range &range = ranges[(own + i) % count()];
        for (;;) {
          const int64_t first = range.next.fetch_add(chunk, std::memory_order_relaxed);
          if (first >= range.end) break;
          const int64_t last = std::min(first + chunk, range.end);
          for (int64_t item = first; item < last; item++) run(data, item);
        }
      }
    } catch (const std::exception &) {  // an exception that leaves a thread would end the process
      failed.store(true);
    }
  }

  void work(int own) {
    using Clock = std::chrono::steady_clock;
    uint64_t seen = 0;
    Clock::time_point busy = Clock::now();
    for (int spins = 0;; spins++) {
      uint64_t now = state.load(std::memory_order_acquire);
      if (now >> 32 != seen && now & OPEN_BIT) {
        if (!state.compare_exchange_strong(now, now + 1, std::memory_order_acq_rel)) continue;
        seen = now >> 32;
        share(own);
        state.fetch_sub(1, std::memory_order_release);
        spins = 0;
      } else if (awake.load(std::memory_order_acquire)) {
        rest(spins);
        busy = Clock::now();
      } else if (Clock::now() - busy < SPIN_TIME_AFTER_PASS) {
        rest(spins);
      } else {
        std::unique_lock<std::mutex> held(mutex);
        wake.wait(held, [&] { return stopping || awake.load(); });
        if (stopping) return;
        busy = Clock::now();
        spins = 0;
      }
    }
  }

  // The next pass often follows within a millisecond. Waking up can take as long, above all on a virtual machine.
  static constexpr std::chrono::milliseconds SPIN_TIME_AFTER_PASS{3};

  static constexpr int SPINS_BEFORE_YIELD = 4000;
  static constexpr uint64_t OPEN_BIT = uint64_t(1) << 31, WORKERS_MASK = OPEN_BIT - 1;
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  bool stopping = false;
  std::atomic<bool> awake{false};
  std::atomic<uint64_t> state{0};  // the loop's number, OPEN_BIT, and the number of workers in the loop
  uint64_t round = 0;
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Range> ranges;  // of items, one per thread
  std::atomic<bool> failed{false};
  void (*run)(const void *, int64_t) = nullptr;
  const void *data = nullptr;
  int64_t chunk = 1;
};

}  // namespace specbeam
