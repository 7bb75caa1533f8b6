// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "batching.h"
#include "errors.h"

namespace beast {

// Brings together those who want an answer (compute) and those who answer many at once
// (next_batch). Thread-safe. Items are nests of one or more rows; an item is never
// split and its answer has as many rows. close() ends every wait with
// ClosedBatchingQueue, also of those whose batch is being answered just now.
class DynamicBatcher {
 public:
  struct Options {
    BatchSizes sizes;
    bool check_outputs = true;  // Against the first outputs ever set.
    BufferPool::Hooks hooks;
  };
  // Called once, by whoever answers, fails or closes, with no lock held: rows
  // [begin, end) of outputs are for the item. With an error, outputs is null.
  using Answer = std::function<void(const Nest* outputs, int64_t begin, int64_t end,
                                    std::exception_ptr error)>;

  // Items that want an answer. Thread-safe. Unless answered by then, its destructor
  // fails the items: nobody waits for a batch that was lost.
  class Batch {
   public:
    ~Batch();
    const Nest& inputs() const { return inputs_; }
    int64_t num_rows() const { return num_rows_; }
    // Throws std::invalid_argument for outputs that do not fit, and may be called again
    // then. Does nothing once the batcher is closed.
    void set_outputs(const Nest& outputs);
    void fail(const std::string& reason);  // Does nothing if the batch is answered.
    bool is_answered() const;

   private:
    friend class DynamicBatcher;
    struct Shared;
    struct Waiter {
      Answer answer;
      int64_t rows;
    };
    enum class State { kOpen, kAnswered, kFailed };
    Batch() = default;
    std::vector<Waiter> settle(State state);  // Empty if it was settled before.
    // Each waiter gets an exception of its own: they rethrow it in threads of theirs.
    void fail(const std::function<std::exception_ptr()>& make_error);

    std::shared_ptr<Shared> shared_;  // What all batches of a batcher have in common.
    Nest inputs_;
    int64_t num_rows_ = 0;
    mutable std::mutex mu_;
    State state_ = State::kOpen;   // Guarded by mu_.
    std::vector<Waiter> waiters_;  // Guarded by mu_.
  };

  // Work that a thread does while it waits for a batch, instead of sleeping: where
  // answers are quick, the wake-ups from thread to thread cost more than the work.
  struct Helper {
    // Works until then, or until it has called compute_async, and returns true; or has
    // nothing to do for this thread, and returns false. `away` is how long the thread
    // has had its last batch, for every kRowsAtOnce rows of it, where that is news.
    std::function<bool(std::chrono::steady_clock::time_point until,
                       std::optional<std::chrono::steady_clock::duration> away)>
        work;
    std::function<void()> wake;  // Makes work() return soon.
  };

  explicit DynamicBatcher(Options options);  // Throws std::invalid_argument.
  ~DynamicBatcher();

  // The rows of the answer; throws std::runtime_error with the reason if there is none.
  Nest compute(Nest inputs, const Tick& tick = {});
  // Like compute, without a wait; throws what is wrong with the inputs, or that closed.
  // With more_follow, nobody is woken up for it: the next call will come at once.
  void compute_async(Nest inputs, Answer answer, bool more_follow = false);
  std::shared_ptr<Batch> next_batch(const Tick& tick = {});

  void set_helper(std::shared_ptr<const Helper> helper);  // Null for none.

  int64_t size() const;  // Rows that wait for a batch.
  bool close();          // False if it was closed already.
  bool is_closed() const { return closed_; }
  int64_t batch_dim() const { return options_.sizes.batch_dim; }
  int64_t maximum_batch_size() const { return options_.sizes.maximum; }

 private:
  static constexpr int64_t kRowsAtOnce = 8;
  struct Item {
    Nest nest;
    Batch::Waiter waiter;
    std::chrono::steady_clock::time_point arrived;
  };
  // These need mu_ held; the second gives it back for a while.
  bool ready(std::chrono::steady_clock::time_point now) const;
  bool help(std::unique_lock<std::mutex>& lock,
            std::chrono::steady_clock::time_point until,
            std::optional<std::chrono::steady_clock::duration> away);

  const Options options_;
  BufferPool pool_;
  const std::shared_ptr<Batch::Shared> shared_;
  std::atomic<bool> closed_{false};  // Written with mu_ held.
  mutable std::mutex mu_;
  std::condition_variable arrived_;
  std::deque<Item> items_;                         // Guarded by mu_, as all below.
  int64_t rows_ = 0;                               // In items_.
  std::optional<Signature> signature_;             // Of the first item.
  std::vector<std::weak_ptr<Batch>> outstanding_;  // Those that are out.
  std::shared_ptr<const Helper> helper_;
  std::thread::id helping_;  // The thread in helper_->work(), if any.
};

}  // namespace beast
