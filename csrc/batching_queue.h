// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <optional>

#include "batching.h"
#include "errors.h"

namespace beast {

// Gathers items from many producers and hands their rows out in batches, in order.
// Thread-safe. An item is a nest with one or more rows in dimension batch_dim; a batch
// has between minimum and maximum rows and may take a part of an item, so that with
// minimum == maximum every batch has exactly that size.
//
// enqueue() waits while maximum_queue_size rows or more are there; dequeue() waits for
// minimum rows, or past the timeout for any.
//
// After close() the queue takes no item: enqueue() throws ClosedBatchingQueue, also
// where it waits for room. No item that enqueue() accepted is lost: dequeue() hands out
// the rest, and throws ClosedBatchingQueue when there is none. The last batch may then
// be smaller than the minimum. close(discard) drops the rest instead; that is for a
// learner that needs batches of one size, or that is done.
// Items are not copied before they are put into their batch: do not write to them.
class BatchingQueue {
 public:
  struct Options {
    BatchSizes sizes;
    bool check_inputs = true;  // Against the first item, in enqueue().
    std::optional<int64_t> maximum_queue_size;
    BufferPool::Hooks hooks;  // For pinned memory.
  };
  // Told once whether the item was taken (null) or why not.
  using Done = std::function<void(std::exception_ptr)>;

  explicit BatchingQueue(Options options);  // Throws std::invalid_argument.
  ~BatchingQueue();

  void enqueue(Nest item, const Tick& tick = {});
  // Like enqueue, but never waits: done is called before it returns where there is
  // room, and otherwise later, by the thread that makes room or closes the queue, which
  // holds no lock then. Throws what is wrong with the item.
  void enqueue_async(Nest item, Done done);
  Nest dequeue(const Tick& tick = {});

  int64_t size() const;  // Rows that wait, without those of producers that wait.
  // False if it was closed already; discard drops what is left in that case, too.
  bool close(bool discard = false);
  bool is_closed() const { return closed_; }
  int64_t batch_dim() const { return options_.sizes.batch_dim; }

 private:
  struct Item {
    Nest nest;
    int64_t rows;
    int64_t taken = 0;  // Rows that earlier batches took.
    std::chrono::steady_clock::time_point arrived;
  };
  struct Parked {
    Item item;
    Done done;
  };

  Item check(Nest nest);
  bool full() const;          // These need mu_ held.
  void put(Item item);        //
  std::list<Parked> admit();  // Takes in what there is room for.
  bool ready(std::chrono::steady_clock::time_point now) const;

  const Options options_;
  BufferPool pool_;
  std::atomic<bool> closed_{false};  // Written with mu_ held.
  mutable std::mutex mu_;
  std::condition_variable arrived_;
  std::deque<Item> items_;              // Guarded by mu_, as all below.
  std::list<Parked> parked_;            // Producers that wait for room, in order.
  int64_t rows_ = 0;                    // In items_, not yet taken.
  std::optional<Signature> signature_;  // Of the first item.
};

}  // namespace beast
