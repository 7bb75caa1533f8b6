// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "named_thread.h"

namespace beast::atari {

// Calls fn(thread, i) once for every i below count, on num_threads threads. Each has
// its own share of the i and helps the others once it is done. One caller at a time.
class SharedLoop {
 public:
  using Fn = std::function<void(int thread, int i)>;

  SharedLoop(int num_threads, int count)
      : num_threads_(std::max(std::min(num_threads, count), 1)), shares_(num_threads_) {
    for (int k = 0; k < num_threads_; ++k) {
      shares_[k].begin = static_cast<int>(int64_t{count} * k / num_threads_);
      shares_[k].end = static_cast<int>(int64_t{count} * (k + 1) / num_threads_);
    }
    for (int k = 1; k < num_threads_; ++k) start_worker(k);
  }
  ~SharedLoop() {
    {
      const std::lock_guard lock(mu_);
      closing_ = true;
    }
    changed_.notify_all();
    workers_.clear();  // Joins them.
  }

  int num_threads() const { return num_threads_; }

  // The caller is one of the threads and returns when all is done.
  void run(Fn fn) {
    begin(std::move(fn), /*caller_helps=*/true);
    work(0);
    wait();
  }

  // Returns at once; wait() must follow.
  void start(Fn fn) {
    if (!has_worker_0_) {
      start_worker(0);
      has_worker_0_ = true;
    }
    begin(std::move(fn), /*caller_helps=*/false);
  }

  void wait() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return num_working_ == 0; });
  }

 private:
  struct alignas(64) Share {
    int begin = 0, end = 0;
    std::atomic<int> next{0};
  };

  void start_worker(int k) {
    workers_.emplace_back(
        "atari-" + std::to_string(k), [this, k, seen = round_]() mutable {
          while (true) {
            {
              std::unique_lock lock(mu_);
              changed_.wait(lock, [&] { return closing_ || round_ != seen; });
              if (round_ == seen) return;
              seen = round_;
              if (k == 0 && caller_helps_) continue;
            }
            work(k);
            const std::lock_guard lock(mu_);
            if (--num_working_ == 0) changed_.notify_all();
          }
        });
  }

  void begin(Fn fn, bool caller_helps) {
    fn_ = std::move(fn);
    for (Share& share : shares_) share.next = share.begin;
    {
      const std::lock_guard lock(mu_);
      num_working_ = num_threads_ - caller_helps;
      caller_helps_ = caller_helps;
      ++round_;
    }
    if (num_threads_ > caller_helps) changed_.notify_all();
  }

  void work(int k) {
    for (int j = 0; j < num_threads_; ++j) {
      Share& share = shares_[(k + j) % num_threads_];
      for (int i;
           (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        fn_(k, i);
      }
    }
  }

  const int num_threads_;
  std::vector<Share> shares_;
  Fn fn_;  // Changed only while nobody works.
  bool has_worker_0_ = false;

  std::mutex mu_;
  std::condition_variable changed_;
  int num_working_ = 0;        // Guarded by mu_.
  int64_t round_ = 0;          // Guarded by mu_.
  bool caller_helps_ = false;  // Guarded by mu_.
  bool closing_ = false;       // Guarded by mu_.

  std::vector<NamedThread> workers_;  // Last: they use all of the above.
};

}  // namespace beast::atari
