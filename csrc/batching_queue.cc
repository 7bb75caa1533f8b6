// SPDX-License-Identifier: Apache-2.0
#include "batching_queue.h"

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;

std::exception_ptr queue_is_closed() {
  return std::make_exception_ptr(ClosedBatchingQueue("the batching queue is closed"));
}

}  // namespace

BatchingQueue::BatchingQueue(Options options)
    : options_(std::move(options)), pool_(options_.hooks) {
  options_.sizes.check();
  if (options_.maximum_queue_size &&
      *options_.maximum_queue_size < options_.sizes.minimum) {
    throw std::invalid_argument(
        "maximum_queue_size: expected at least minimum_batch_size=" +
        std::to_string(options_.sizes.minimum) + ", or no batch is ever made; got " +
        std::to_string(*options_.maximum_queue_size));
  }
}

BatchingQueue::~BatchingQueue() { close(); }

BatchingQueue::Item BatchingQueue::check(Nest nest) {
  const int64_t rows = num_rows(nest, options_.sizes.batch_dim);
  return {std::move(nest), rows, 0, Clock::now()};
}

bool BatchingQueue::full() const {
  return options_.maximum_queue_size && rows_ >= *options_.maximum_queue_size;
}

void BatchingQueue::put(Item item) {
  rows_ += item.rows;
  items_.push_back(std::move(item));
}

std::list<BatchingQueue::Parked> BatchingQueue::admit() {
  std::list<Parked> admitted;
  while (!parked_.empty() && !full()) {
    put(std::move(parked_.front().item));
    admitted.splice(admitted.end(), parked_, parked_.begin());
  }
  return admitted;
}

void BatchingQueue::enqueue_async(Nest nest, Done done) {
  Item item = check(std::move(nest));
  {
    std::lock_guard lock(mu_);
    if (closed_) std::rethrow_exception(queue_is_closed());
    if (options_.check_inputs) {
      if (!signature_) signature_ = Signature::of(item.nest);
      check_alike(item.nest, *signature_, options_.sizes.batch_dim);
    }
    if (full() || !parked_.empty()) {
      parked_.push_back({std::move(item), std::move(done)});
      return;
    }
    put(std::move(item));
  }
  arrived_.notify_one();  // Not under the lock: who wakes up would wait for it at once.
  done(nullptr);
}

void BatchingQueue::enqueue(Nest nest, const Tick& tick) {
  struct Waiter {
    std::mutex mu;
    std::condition_variable changed;
    bool is_done = false;      // Guarded by mu.
    std::exception_ptr error;  // Guarded by mu.
  };
  auto waiter = std::make_shared<Waiter>();
  enqueue_async(std::move(nest), [waiter](std::exception_ptr error) {
    std::lock_guard lock(waiter->mu);
    waiter->is_done = true;
    waiter->error = error;
    waiter->changed.notify_one();
  });
  std::unique_lock lock(waiter->mu);
  while (!waiter->is_done) {
    waiter->changed.wait_for(lock, kTickInterval);
    if (!tick || waiter->is_done) continue;
    lock.unlock();
    tick();  // Where it throws, the item stays parked; it was offered, after all.
    lock.lock();
  }
  if (waiter->error) std::rethrow_exception(waiter->error);
}

bool BatchingQueue::ready(Clock::time_point now) const {
  const BatchSizes& sizes = options_.sizes;
  return rows_ >= sizes.minimum ||
         (rows_ > 0 && sizes.timeout && now >= items_.front().arrived + *sizes.timeout);
}

Nest BatchingQueue::dequeue(const Tick& tick) {
  const BatchSizes& sizes = options_.sizes;
  std::deque<Item> items;
  std::vector<Piece> pieces;
  std::list<Parked> admitted;
  {
    std::unique_lock lock(mu_);
    auto next_tick = Clock::now() + kTickInterval;
    while (!closed_ && !ready(Clock::now())) {
      auto until = next_tick;
      if (rows_ > 0 && sizes.timeout) {
        until = std::min(until, items_.front().arrived + *sizes.timeout);
      }
      arrived_.wait_until(lock, until);
      if (Clock::now() < next_tick) continue;
      if (tick) {
        lock.unlock();
        tick();
        lock.lock();
      }
      next_tick = Clock::now() + kTickInterval;
    }
    // A closed queue hands out all that it has accepted, the last rows too.
    if (rows_ == 0) std::rethrow_exception(queue_is_closed());
    int64_t rows = 0;
    while (!items_.empty() && rows < sizes.maximum) {
      Item& item = items_.front();
      const int64_t end = std::min(item.rows, item.taken + sizes.maximum - rows);
      rows += end - item.taken;
      if (end < item.rows) {
        items.push_back(item);  // The rest is for the next batch.
        item.taken = end;
        items.back().rows = end;
        break;
      }
      items.push_back(std::move(item));
      items_.pop_front();
    }
    rows_ -= rows;
    admitted = admit();
    if (ready(Clock::now())) arrived_.notify_one();
  }
  for (Parked& parked : admitted) parked.done(nullptr);
  pieces.reserve(items.size());
  const Signature first = Signature::of(items.front().nest);
  for (const Item& item : items) {
    if (!options_.check_inputs) check_alike(item.nest, first, sizes.batch_dim);
    pieces.push_back({&item.nest, item.taken, item.rows});
  }
  return concatenate(pieces, sizes.batch_dim, pool_);
}

int64_t BatchingQueue::size() const {
  std::lock_guard lock(mu_);
  return rows_;
}

bool BatchingQueue::close(bool discard) {
  std::list<Parked> parked;
  std::deque<Item> discarded;  // Destroyed without the lock: it may take the GIL.
  bool was_closed;
  {
    std::lock_guard lock(mu_);
    was_closed = closed_.exchange(true);
    parked.swap(parked_);
    if (discard) {
      discarded.swap(items_);
      rows_ = 0;
    }
    arrived_.notify_all();
  }
  for (Parked& producer : parked) producer.done(queue_is_closed());
  return !was_closed;
}

}  // namespace beast
