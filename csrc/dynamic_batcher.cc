// SPDX-License-Identifier: Apache-2.0
#include "dynamic_batcher.h"

#include <utility>

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;

std::exception_ptr batcher_is_closed() {
  return std::make_exception_ptr(ClosedBatchingQueue("the dynamic batcher is closed"));
}

}  // namespace

struct DynamicBatcher::Batch::Shared {
  size_t batch_dim;
  bool check_outputs;
  std::mutex mu;
  std::optional<Signature> outputs;  // Of the first answer; guarded by mu.
};

DynamicBatcher::Batch::~Batch() { fail("the batch was dropped without outputs"); }

bool DynamicBatcher::Batch::is_answered() const {
  std::lock_guard lock(mu_);
  return state_ != State::kOpen;
}

std::vector<DynamicBatcher::Batch::Waiter> DynamicBatcher::Batch::settle(State state) {
  std::lock_guard lock(mu_);
  if (state_ != State::kOpen) return {};
  state_ = state;
  return std::move(waiters_);
}

void DynamicBatcher::Batch::set_outputs(const Nest& outputs) {
  {
    std::lock_guard lock(mu_);
    if (state_ == State::kFailed) return;
    if (state_ == State::kAnswered) {
      throw std::invalid_argument(
          "outputs: expected once for each batch, got them twice");
    }
  }
  const int64_t rows = beast::num_rows(outputs, shared_->batch_dim);
  if (rows != num_rows_) {
    throw std::invalid_argument(
        outputs.structure->path(0) + ": expected " + std::to_string(num_rows_) +
        " rows in dimension " + std::to_string(shared_->batch_dim) +
        " as in the inputs, got shape " + outputs.leaves[0].shape.str());
  }
  if (shared_->check_outputs) {
    std::lock_guard lock(shared_->mu);
    if (!shared_->outputs) shared_->outputs = Signature::of(outputs);
    check_alike(outputs, *shared_->outputs, shared_->batch_dim);
  }
  int64_t begin = 0;
  for (Waiter& waiter : settle(State::kAnswered)) {
    waiter.answer(&outputs, begin, begin + waiter.rows, nullptr);
    begin += waiter.rows;
  }
}

void DynamicBatcher::Batch::fail(const std::string& reason) {
  fail([&] { return std::make_exception_ptr(std::runtime_error(reason)); });
}

void DynamicBatcher::Batch::fail(
    const std::function<std::exception_ptr()>& make_error) {
  for (Waiter& waiter : settle(State::kFailed)) {
    waiter.answer(nullptr, 0, 0, make_error());
  }
}

DynamicBatcher::DynamicBatcher(Options options)
    : options_(std::move(options)),
      pool_(options_.hooks),
      shared_(std::make_shared<Batch::Shared>()) {
  options_.sizes.check();
  shared_->batch_dim = options_.sizes.batch_dim;
  shared_->check_outputs = options_.check_outputs;
}

DynamicBatcher::~DynamicBatcher() { close(); }

void DynamicBatcher::compute_async(Nest inputs, Answer answer, bool more_follow) {
  const int64_t rows = num_rows(inputs, options_.sizes.batch_dim);
  if (rows > options_.sizes.maximum) {
    throw std::invalid_argument(inputs.structure->path(0) + ": expected at most " +
                                std::to_string(options_.sizes.maximum) +
                                " rows (maximum_batch_size), got " +
                                std::to_string(rows));
  }
  std::shared_ptr<const Helper> to_wake;
  {
    std::lock_guard lock(mu_);
    if (closed_) std::rethrow_exception(batcher_is_closed());
    if (!signature_) signature_ = Signature::of(inputs);
    check_alike(inputs, *signature_, options_.sizes.batch_dim);
    rows_ += rows;
    items_.push_back({std::move(inputs), {std::move(answer), rows}, Clock::now()});
    if (helping_ == std::this_thread::get_id()) return;  // It looks for itself.
    if (helping_ != std::thread::id()) to_wake = helper_;
  }
  if (more_follow) return;
  // Not under the lock: who wakes up would wait for it at once.
  arrived_.notify_one();
  if (to_wake) to_wake->wake();
}

Nest DynamicBatcher::compute(Nest inputs, const Tick& tick) {
  struct Wait {
    std::mutex mu;
    std::condition_variable changed;
    bool is_done = false;  // Guarded by mu, as all below.
    Nest outputs;
    std::exception_ptr error;
  };
  auto wait = std::make_shared<Wait>();
  const size_t batch_dim = options_.sizes.batch_dim;
  compute_async(std::move(inputs),
                [wait, batch_dim](const Nest* outputs, int64_t begin, int64_t end,
                                  std::exception_ptr error) {
                  std::lock_guard lock(wait->mu);
                  if (outputs) wait->outputs = outputs->narrow(batch_dim, begin, end);
                  wait->error = error;
                  wait->is_done = true;
                  wait->changed.notify_one();
                });
  std::unique_lock lock(wait->mu);
  while (!wait->is_done) {
    wait->changed.wait_for(lock, kTickInterval);
    if (!tick || wait->is_done) continue;
    lock.unlock();
    tick();
    lock.lock();
  }
  if (wait->error) std::rethrow_exception(wait->error);
  return std::move(wait->outputs);
}

bool DynamicBatcher::ready(Clock::time_point now) const {
  const BatchSizes& sizes = options_.sizes;
  if (rows_ >= sizes.minimum) return true;
  return rows_ > 0 && sizes.timeout && now >= items_.front().arrived + *sizes.timeout;
}

bool DynamicBatcher::help(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                          std::optional<Clock::duration> away) {
  if (!helper_ || helping_ != std::thread::id()) return false;
  const std::shared_ptr<const Helper> helper = helper_;
  helping_ = std::this_thread::get_id();
  lock.unlock();
  const bool has_worked = helper->work(until, away);
  lock.lock();
  helping_ = {};
  // What came while it found nothing to do for it has woken up nobody.
  return has_worked || ready(Clock::now()) || closed_;
}

void DynamicBatcher::set_helper(std::shared_ptr<const Helper> helper) {
  std::lock_guard lock(mu_);
  helper_ = std::move(helper);
}

std::shared_ptr<DynamicBatcher::Batch> DynamicBatcher::next_batch(const Tick& tick) {
  const BatchSizes& sizes = options_.sizes;
  std::shared_ptr<Batch> batch(new Batch);
  batch->shared_ = shared_;
  std::vector<Nest> inputs;
  {
    std::unique_lock lock(mu_);
    auto next_tick = Clock::now() + kTickInterval;
    static thread_local Clock::time_point left;  // When this thread had its last batch.
    static thread_local int64_t rows_taken;      // With that.
    std::optional<Clock::duration> away;
    if (left != Clock::time_point()) {
      away = (Clock::now() - left) / std::max<int64_t>(rows_taken / kRowsAtOnce, 1);
    }
    while (!closed_ && !ready(Clock::now())) {
      auto until = next_tick;
      if (rows_ > 0 && sizes.timeout) {
        until = std::min(until, items_.front().arrived + *sizes.timeout);
      }
      if (!help(lock, until, std::exchange(away, std::nullopt))) {
        arrived_.wait_until(lock, until);
      }
      if (Clock::now() < next_tick) continue;
      if (tick) {
        lock.unlock();
        tick();
        lock.lock();
      }
      next_tick = Clock::now() + kTickInterval;
    }
    if (closed_) std::rethrow_exception(batcher_is_closed());
    while (!items_.empty()) {
      Item& item = items_.front();
      const int64_t rows = item.waiter.rows;
      if (batch->num_rows_ + rows > sizes.maximum) break;
      batch->num_rows_ += rows;
      inputs.push_back(std::move(item.nest));
      batch->waiters_.push_back(std::move(item.waiter));
      items_.pop_front();
    }
    rows_ -= batch->num_rows_;
    std::erase_if(outstanding_, [](const auto& weak) { return weak.expired(); });
    outstanding_.push_back(batch);
    if (ready(Clock::now())) arrived_.notify_one();
    left = Clock::now();
    rows_taken = batch->num_rows_;
  }
  std::vector<Piece> pieces;
  pieces.reserve(inputs.size());
  for (const Nest& item : inputs) {
    pieces.push_back({&item, 0, item.leaves[0].shape[sizes.batch_dim]});
  }
  batch->inputs_ = concatenate(pieces, sizes.batch_dim, pool_);
  return batch;
}

int64_t DynamicBatcher::size() const {
  std::lock_guard lock(mu_);
  return rows_;
}

bool DynamicBatcher::close() {
  std::deque<Item> items;
  std::vector<std::weak_ptr<Batch>> outstanding;
  std::shared_ptr<const Helper> to_wake;
  {
    std::lock_guard lock(mu_);
    if (closed_) return false;
    closed_ = true;
    items.swap(items_);
    outstanding.swap(outstanding_);
    rows_ = 0;
    if (helping_ != std::thread::id()) to_wake = helper_;
    arrived_.notify_all();
  }
  if (to_wake) to_wake->wake();
  for (Item& item : items) item.waiter.answer(nullptr, 0, 0, batcher_is_closed());
  for (const auto& weak : outstanding) {
    if (auto batch = weak.lock()) batch->fail(batcher_is_closed);
  }
  return true;
}

}  // namespace beast
