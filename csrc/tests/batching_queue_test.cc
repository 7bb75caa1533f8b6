// SPDX-License-Identifier: Apache-2.0
#include "batching_queue.h"

#include <algorithm>
#include <random>

#include "arrays.h"
#include "check.h"

namespace beast::test {
namespace {

using std::chrono::milliseconds;
using Ints = std::vector<int64_t>;

BatchingQueue::Options sizes(int64_t minimum, int64_t maximum,
                             std::optional<milliseconds> timeout = {}) {
  BatchingQueue::Options options;
  options.sizes = {0, minimum, maximum, timeout};
  return options;
}

BatchingQueue::Options bounded(int64_t batch_size, int64_t maximum_queue_size) {
  BatchingQueue::Options options = sizes(batch_size, batch_size);
  options.maximum_queue_size = maximum_queue_size;
  return options;
}

// Until the condition holds; the watchdog ends a wait that has no end.
template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) std::this_thread::sleep_for(1ms);
}

// Long enough for a thread to have begun to wait, most of the time.
void let_it_wait() { std::this_thread::sleep_for(20ms); }

bool is_waiting(const std::future<void>& future) {
  return future.wait_for(20ms) == std::future_status::timeout;
}

// --- Batches ---

TEST(items_come_back_in_order_as_one_batch) {
  BatchingQueue queue(sizes(4, 4));
  queue.enqueue(rows(0, 1));
  queue.enqueue(rows(1, 2));
  queue.enqueue(rows(3, 1));
  CHECK_EQ(queue.size(), 4);
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1, 2, 3}));
  CHECK_EQ(queue.size(), 0);
}

TEST(with_minimum_and_maximum_equal_every_batch_has_that_size) {
  BatchingQueue queue(sizes(3, 3));
  queue.enqueue(rows(0, 7));
  queue.enqueue(rows(7, 1));
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1, 2}));
  CHECK_EQ(ints(queue.dequeue()), (Ints{3, 4, 5}));
  CHECK_EQ(queue.size(), 2);
  queue.enqueue(rows(8, 2));
  CHECK_EQ(ints(queue.dequeue()), (Ints{6, 7, 8}));
  CHECK_EQ(queue.size(), 1);
}

TEST(many_splits_lose_no_row_and_keep_the_order) {
  BatchingQueue queue(sizes(5, 5));
  std::mt19937 random(1);
  int64_t next = 0, seen = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t count = 1 + random() % 13;
    queue.enqueue(rows(next, count));
    next += count;
    while (queue.size() >= 5) {
      const Ints batch = ints(queue.dequeue());
      CHECK_EQ(batch.size(), 5);
      for (int64_t row : batch) CHECK_EQ(row, seen++);
    }
  }
  CHECK_EQ(seen + queue.size(), next);
}

TEST(a_batch_takes_all_there_is_up_to_the_maximum) {
  BatchingQueue queue(sizes(2, 4));
  queue.enqueue(rows(0, 3));
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1, 2}));
  queue.enqueue(rows(3, 6));
  CHECK_EQ(ints(queue.dequeue()), (Ints{3, 4, 5, 6}));
  CHECK_EQ(ints(queue.dequeue()), (Ints{7, 8}));
}

TEST(every_leaf_is_concatenated_along_batch_dim) {
  BatchingQueue::Options options;
  options.sizes = {1, 3, 3, {}};
  BatchingQueue queue(options);
  for (int64_t i = 0; i < 3; ++i) {
    queue.enqueue(Nest::dict({{"x", Nest::leaf(counting<int64_t>({2, 1}, 10 * i))},
                              {"y", Nest::leaf(counting<uint8_t>({2, 1, 2}, i))}}));
  }
  const Nest batch = queue.dequeue();
  CHECK_EQ(batch.structure->str(), "{x: *, y: *}");
  CHECK_EQ(batch.leaves[0].shape, Shape({2, 3}));
  CHECK_EQ(ints(batch), (Ints{0, 10, 20, 1, 11, 21}));
  CHECK_EQ(batch.leaves[1].shape, Shape({2, 3, 2}));
  CHECK_EQ(values<uint8_t>(batch.leaves[1]),
           (std::vector<uint8_t>{0, 1, 1, 2, 2, 3, 2, 3, 3, 4, 4, 5}));
}

TEST(strided_and_empty_leaves_are_batched) {
  BatchingQueue queue(sizes(4, 4));
  const Array wide = counting<int64_t>({4, 3});
  for (int64_t i = 0; i < 2; ++i) {
    const Array column = wide.narrow(0, 2 * i, 2 * i + 2).narrow(1, 1, 2);
    queue.enqueue(
        Nest::tuple({Nest::leaf(column), Nest::leaf(counting<float>({2, 0}))}));
  }
  const Nest batch = queue.dequeue();
  CHECK_EQ(ints(batch), (Ints{1, 4, 7, 10}));
  CHECK_EQ(batch.leaves[1].shape, Shape({4, 0}));
}

TEST(images_that_are_channels_last_stay_so) {
  BatchingQueue::Options options;
  options.sizes = {1, 3, 3, {}};
  BatchingQueue queue(options);
  const Array memory = counting<uint8_t>({2, 4, 3, 5, 2});  // [T, B, H, W, C]
  const Array images = memory.move(4, 2);
  queue.enqueue(Nest::leaf(images.narrow(1, 0, 1)));
  Array turned = counting<uint8_t>({2, 3, 2, 3, 5});  // The order of the first is kept.
  copy(images.narrow(1, 1, 4), turned);
  queue.enqueue(Nest::leaf(turned));
  const Nest batch = queue.dequeue();
  CHECK_EQ(batch.leaves[0].shape, Shape({2, 3, 2, 3, 5}));
  CHECK(batch.leaves[0].is_channels_last());
  CHECK_EQ(values<uint8_t>(batch.leaves[0]), values<uint8_t>(images.narrow(1, 0, 3)));
}

TEST(an_item_is_dropped_once_all_its_rows_are_handed_out) {
  BatchingQueue queue(sizes(2, 2));
  std::weak_ptr<void> owner;
  {
    Nest item = rows(0, 4);
    owner = item.leaves[0].owner;
    queue.enqueue(std::move(item));
  }
  queue.dequeue();
  CHECK(!owner.expired());
  queue.dequeue();
  CHECK(owner.expired());
}

TEST(batches_use_their_memory_again_and_outlive_the_queue) {
  int num_allocated = 0;
  Nest batch;
  {
    BatchingQueue::Options options = sizes(4, 4);
    options.hooks.allocated = [&](void*, size_t) { ++num_allocated; };
    BatchingQueue queue(options);
    for (int64_t i = 0; i < 100; ++i) {
      queue.enqueue(rows(i, 4));
      batch = queue.dequeue();
    }
  }
  CHECK_EQ(num_allocated, 2);  // The next one is made while we hold the last.
  CHECK_EQ(ints(batch), (Ints{99, 100, 101, 102}));
}

// --- Waiting ---

TEST(dequeue_waits_for_the_minimum) {
  BatchingQueue queue(sizes(3, 8));
  queue.enqueue(rows(0, 2));
  auto consumer = in_thread([&] { CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1, 2})); });
  CHECK(is_waiting(consumer));
  queue.enqueue(rows(2, 1));
  CHECK_SOON(consumer);
  consumer.get();
}

TEST(to_wait_for_long_costs_no_work) {
  BatchingQueue queue(sizes(2, 2));
  queue.enqueue(rows(0, 1));
  auto consumer = in_thread([&] {
    queue.dequeue();
    CHECK(cpu_time_of_this_thread() < kTickInterval / 2);
  });
  std::this_thread::sleep_for(4 * kTickInterval);
  queue.enqueue(rows(1, 1));
  consumer.get();
}

TEST(past_the_timeout_a_batch_is_made_of_what_there_is) {
  BatchingQueue queue(sizes(10, 10, 50ms));
  const auto begin = Clock::now();
  queue.enqueue(rows(0, 2));
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1}));
  CHECK(Clock::now() - begin >= 50ms);
  CHECK(Clock::now() - begin < kSoon);
}

TEST(the_timeout_counts_from_the_arrival_of_the_oldest_row) {
  BatchingQueue queue(sizes(10, 10, 300ms));
  queue.enqueue(rows(0, 1));
  std::this_thread::sleep_for(310ms);
  queue.enqueue(rows(1, 1));
  const auto begin = Clock::now();
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1}));
  CHECK(Clock::now() - begin < 250ms);
}

TEST(a_timeout_that_began_before_the_first_row_yields_no_empty_batch) {
  BatchingQueue queue(sizes(2, 2, 10ms));
  auto consumer = in_thread([&] { CHECK_EQ(ints(queue.dequeue()), (Ints{0})); });
  CHECK(is_waiting(consumer));
  CHECK(is_waiting(consumer));
  queue.enqueue(rows(0, 1));
  CHECK_SOON(consumer);
  consumer.get();
}

TEST(a_timeout_of_zero_takes_what_is_there) {
  BatchingQueue queue(sizes(10, 10, 0ms));
  queue.enqueue(rows(0, 2));
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1}));
}

TEST(one_large_item_wakes_every_consumer_it_serves) {
  BatchingQueue queue(sizes(2, 2));
  const auto begin = Clock::now();
  for (int i = 0; i < 50; ++i) {
    std::vector<std::future<Nest>> consumers;
    for (int j = 0; j < 3; ++j) {
      consumers.push_back(in_thread([&] { return queue.dequeue(); }));
    }
    std::this_thread::sleep_for(1ms);
    queue.enqueue(rows(0, 6));
    for (auto& consumer : consumers) CHECK_EQ(consumer.get().leaves[0].shape[0], 2);
  }
  // A wake-up that is lost costs a tick.
  CHECK(Clock::now() - begin < 50 * kTickInterval / 2);
}

// --- Back-pressure ---

TEST(a_full_queue_holds_producers_back_until_rows_are_taken) {
  BatchingQueue queue(bounded(2, 4));
  queue.enqueue(rows(0, 2));
  queue.enqueue(rows(2, 2));
  auto producer = in_thread([&] { queue.enqueue(rows(4, 2)); });
  CHECK(is_waiting(producer));
  CHECK_EQ(queue.size(), 4);
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1}));
  CHECK_SOON(producer);
  producer.get();
  CHECK_EQ(queue.size(), 4);
}

TEST(the_limit_is_soft_an_item_is_never_too_large_for_it) {
  BatchingQueue queue(bounded(2, 4));
  queue.enqueue(rows(0, 3));
  queue.enqueue(rows(3, 100));
  CHECK_EQ(queue.size(), 103);
}

TEST(producers_that_wait_are_let_in_in_their_order) {
  BatchingQueue queue(bounded(1, 3));
  queue.enqueue(rows(0, 3));
  std::vector<std::future<void>> producers;
  for (int64_t i = 3; i < 8; ++i) {
    producers.push_back(in_thread([&queue, i] { queue.enqueue(rows(i, 1)); }));
    let_it_wait();
  }
  for (int64_t i = 0; i < 8; ++i) CHECK_EQ(ints(queue.dequeue()), (Ints{i}));
  for (auto& producer : producers) producer.get();
}

TEST(a_timeout_also_makes_room) {
  BatchingQueue::Options options = sizes(3, 3, 10ms);
  options.maximum_queue_size = 3;
  BatchingQueue queue(options);
  queue.enqueue(rows(0, 2));
  queue.enqueue(rows(2, 2));
  auto producer = in_thread([&] { queue.enqueue(rows(4, 1)); });
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1, 2}));
  producer.get();
  CHECK_EQ(ints(queue.dequeue()), (Ints{3, 4}));
}

TEST(enqueue_async_is_done_at_once_where_there_is_room) {
  BatchingQueue queue(bounded(1, 2));
  bool is_done = false;
  queue.enqueue_async(rows(0, 1), [&](std::exception_ptr error) {
    CHECK(error == nullptr);
    is_done = true;
  });
  CHECK(is_done);
}

TEST(enqueue_async_parks_in_order_and_is_called_back_by_who_makes_room) {
  BatchingQueue queue(bounded(1, 1));
  Ints done;
  for (int64_t i = 0; i < 4; ++i) {
    queue.enqueue_async(rows(i, 1), [&done, i](std::exception_ptr error) {
      CHECK(error == nullptr);
      done.push_back(i);
    });
  }
  CHECK_EQ(done, (Ints{0}));
  CHECK_EQ(queue.size(), 1);  // Without those that are parked.
  for (int64_t i = 0; i < 4; ++i) {
    CHECK_EQ(ints(queue.dequeue()), (Ints{i}));
    CHECK_EQ(done.size(), std::min<size_t>(i + 2, 4));
  }
  CHECK_EQ(done, (Ints{0, 1, 2, 3}));
}

TEST(a_callback_may_use_the_queue) {
  BatchingQueue queue(bounded(1, 1));
  int num_done = 0;
  queue.enqueue(rows(0, 1));
  queue.enqueue_async(rows(1, 1), [&](std::exception_ptr) {
    CHECK_EQ(queue.size(), 1);
    queue.enqueue_async(rows(2, 1), [&](std::exception_ptr) { ++num_done; });
  });
  for (int64_t i = 0; i < 3; ++i) CHECK_EQ(ints(queue.dequeue()), (Ints{i}));
  CHECK_EQ(num_done, 1);
}

// --- Errors ---

TEST(sizes_that_make_no_sense_are_refused_by_name) {
  CHECK_THROWS(std::invalid_argument, BatchingQueue(sizes(0, 1)),
               "minimum_batch_size: expected at least 1, got 0");
  CHECK_THROWS(std::invalid_argument, BatchingQueue(sizes(3, 2)),
               "maximum_batch_size: expected at least minimum_batch_size=3, got 2");
  CHECK_THROWS(std::invalid_argument, BatchingQueue(sizes(1, 2, -1ms)),
               "timeout_ms: expected at least 0");
  CHECK_THROWS(std::invalid_argument, BatchingQueue(bounded(4, 3)),
               "maximum_queue_size: expected at least minimum_batch_size=4");
  BatchingQueue::Options options;
  for (int64_t dim : {-1, 8}) {
    options.sizes.batch_dim = dim;
    CHECK_THROWS(std::invalid_argument, BatchingQueue(options), "batch_dim: expected");
  }
}

Nest observation(Array image, Array more) {
  return Nest::dict(
      {{"image", Nest::leaf(std::move(image))}, {"more", Nest::leaf(std::move(more))}});
}

TEST(items_without_rows_are_refused) {
  BatchingQueue queue(sizes(1, 1));
  CHECK_THROWS(std::invalid_argument, queue.enqueue(Nest::tuple({})),
               "expected at least one array, got ()");
  CHECK_THROWS(std::invalid_argument, queue.enqueue(rows(0, 0)),
               "expected at least one row, got 0");
  CHECK_EQ(queue.size(), 0);
}

TEST(leaves_must_have_the_batch_dimension_and_agree_on_it) {
  BatchingQueue queue(sizes(1, 1));
  CHECK_THROWS(std::invalid_argument,
               queue.enqueue(observation(counting<float>({2, 3}), counting<float>({}))),
               "more: expected at least 1 dimensions (batch_dim=0), got shape ()");
  CHECK_THROWS(
      std::invalid_argument,
      queue.enqueue(observation(counting<float>({2, 3}), counting<float>({3}))),
      "more: expected 2 rows in dimension 0 as in image, got shape (3,)");
}

TEST(items_must_be_like_the_first_in_all_but_rows) {
  BatchingQueue queue(sizes(1, 8));
  queue.enqueue(observation(counting<uint8_t>({2, 4}), counting<float>({2})));
  queue.enqueue(observation(counting<uint8_t>({3, 4}), counting<float>({3})));
  CHECK_THROWS(
      std::invalid_argument,
      queue.enqueue(observation(counting<uint8_t>({2, 5}), counting<float>({2}))),
      "image: expected uint8 of shape (2, 4) (any size in dimension 0), got uint8 of "
      "shape (2, 5)");
  CHECK_THROWS(
      std::invalid_argument,
      queue.enqueue(observation(counting<uint8_t>({2, 4}), counting<int32_t>({2}))),
      "more: expected float32 of shape (2,) (any size in dimension 0), got int32");
  CHECK_THROWS(
      std::invalid_argument,
      queue.enqueue(observation(counting<uint8_t>({2, 4}), counting<float>({2, 1}))),
      "more: expected float32 of shape (2,)");
  CHECK_THROWS(std::invalid_argument, queue.enqueue(rows(0, 2)),
               "the nest: expected {image: *, more: *}, got *");
  CHECK_EQ(queue.size(), 5);
  CHECK_EQ(queue.dequeue().leaves[0].shape, Shape({5, 4}));
}

TEST(without_check_inputs_a_batch_of_unlike_items_is_refused_when_it_is_made) {
  BatchingQueue::Options options = sizes(2, 2);
  options.check_inputs = false;
  BatchingQueue queue(options);
  queue.enqueue(rows(0, 1));
  queue.enqueue(Nest::leaf(counting<float>({1})));
  CHECK_THROWS(std::invalid_argument, queue.dequeue(), "the array: expected int64");
  queue.enqueue(Nest::leaf(counting<float>({1})));
  queue.enqueue(Nest::leaf(counting<float>({1})));
  CHECK(queue.dequeue().leaves[0].dtype == DType::kFloat32);
}

// --- Closing ---

TEST(close_wakes_a_blocked_producer) {
  BatchingQueue queue(bounded(1, 1));
  queue.enqueue(rows(0, 1));
  auto producer = in_thread([&] {
    CHECK_THROWS(ClosedBatchingQueue, queue.enqueue(rows(1, 1)), "is closed");
  });
  CHECK(is_waiting(producer));
  CHECK(queue.close());
  CHECK_SOON(producer);
  producer.get();
  CHECK_EQ(queue.size(), 1);  // What was accepted stays.
}

TEST(close_wakes_a_blocked_consumer) {
  for (bool discard : {false, true}) {
    BatchingQueue queue(sizes(2, 2, 60'000ms));
    if (discard) queue.enqueue(rows(0, 1));
    auto consumer = in_thread(
        [&] { CHECK_THROWS(ClosedBatchingQueue, queue.dequeue(), "is closed"); });
    CHECK(is_waiting(consumer));
    CHECK(queue.close(discard));
    CHECK_SOON(consumer);
    consumer.get();
  }
}

TEST(close_gives_a_blocked_consumer_the_rows_that_were_accepted) {
  for (auto timeout : {std::optional<milliseconds>(), std::optional(60'000ms)}) {
    BatchingQueue queue(sizes(2, 2, timeout));
    queue.enqueue(rows(0, 1));
    auto consumer = in_thread([&] {
      CHECK_EQ(ints(queue.dequeue()), (Ints{0}));
      CHECK_THROWS(ClosedBatchingQueue, queue.dequeue(), "is closed");
    });
    CHECK(is_waiting(consumer));
    CHECK(queue.close());
    CHECK_SOON(consumer);
    consumer.get();
  }
}

TEST(close_wakes_every_producer_and_consumer) {
  BatchingQueue full(bounded(1, 1)), empty(bounded(1, 1));
  full.enqueue(rows(0, 1));
  std::vector<std::future<void>> threads;
  for (int i = 0; i < 20; ++i) {
    threads.push_back(in_thread([&] {
      CHECK_THROWS(ClosedBatchingQueue, full.enqueue(rows(1, 1)), "is closed");
    }));
    threads.push_back(in_thread(
        [&] { CHECK_THROWS(ClosedBatchingQueue, empty.dequeue(), "is closed"); }));
  }
  let_it_wait();
  const auto begin = Clock::now();
  full.close();
  empty.close();
  for (auto& thread : threads) thread.get();
  CHECK(Clock::now() - begin < kSoon);
}

TEST(close_wakes_consumers_at_once_rather_than_at_their_next_tick) {
  const auto begin = Clock::now();
  for (int i = 0; i < 30; ++i) {
    BatchingQueue queue(sizes(1, 1));
    std::vector<std::future<void>> consumers;
    for (int j = 0; j < 4; ++j) {
      consumers.push_back(in_thread(
          [&] { CHECK_THROWS(ClosedBatchingQueue, queue.dequeue(), "is closed"); }));
    }
    std::this_thread::sleep_for(1ms);
    queue.close();
    for (auto& consumer : consumers) consumer.get();
  }
  CHECK(Clock::now() - begin < 30 * kTickInterval / 2);
}

TEST(a_closed_queue_takes_nothing_and_gives_what_it_has_accepted) {
  BatchingQueue queue(sizes(3, 3));
  queue.enqueue(rows(0, 7));
  CHECK(!queue.is_closed());
  CHECK(queue.close());
  CHECK(queue.is_closed());
  CHECK(!queue.close());
  CHECK_THROWS(ClosedBatchingQueue, queue.enqueue(rows(7, 1)), "is closed");
  CHECK_EQ(queue.size(), 7);
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1, 2}));
  CHECK_EQ(ints(queue.dequeue()), (Ints{3, 4, 5}));
  CHECK_EQ(ints(queue.dequeue()), (Ints{6}));  // Smaller than the minimum.
  CHECK_THROWS(ClosedBatchingQueue, queue.dequeue(), "is closed");
}

TEST(to_discard_is_explicit_and_possible_after_the_close) {
  for (bool is_closed_before : {false, true}) {
    BatchingQueue queue(sizes(1, 1));
    Nest item = rows(0, 3);
    const std::weak_ptr<void> owner = item.leaves[0].owner;
    queue.enqueue(std::move(item));
    if (is_closed_before) CHECK(queue.close());
    CHECK_EQ(queue.close(/*discard=*/true), !is_closed_before);
    CHECK(owner.expired());
    CHECK_EQ(queue.size(), 0);
    CHECK_THROWS(ClosedBatchingQueue, queue.dequeue(), "is closed");
  }
}

TEST(close_tells_those_who_are_parked) {
  BatchingQueue queue(bounded(1, 1));
  queue.enqueue(rows(0, 1));
  int num_told = 0;
  for (int i = 0; i < 3; ++i) {
    queue.enqueue_async(rows(1, 1), [&](std::exception_ptr error) {
      CHECK_THROWS(ClosedBatchingQueue, std::rethrow_exception(error), "is closed");
      CHECK(queue.is_closed());  // No lock is held.
      CHECK_EQ(queue.size(), 1);
      ++num_told;
    });
  }
  queue.close();
  CHECK_EQ(num_told, 3);
}

TEST(a_destroyed_queue_tells_those_who_are_parked) {
  bool is_told = false;
  {
    BatchingQueue queue(bounded(1, 1));
    queue.enqueue(rows(0, 1));
    queue.enqueue_async(rows(1, 1),
                        [&](std::exception_ptr error) { is_told = error != nullptr; });
  }
  CHECK(is_told);
}

// --- Ticks ---

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

TEST(what_a_tick_throws_ends_dequeue_and_no_row_is_lost) {
  BatchingQueue queue(sizes(2, 2));
  queue.enqueue(rows(0, 1));
  int num_ticks = 0;
  const auto begin = Clock::now();
  const Tick tick = [&] {
    if (++num_ticks == 2) throw Interrupted();
  };
  CHECK_THROWS(Interrupted, queue.dequeue(tick), "interrupted");
  CHECK(Clock::now() - begin >= 2 * kTickInterval);
  CHECK(Clock::now() - begin < kSoon);
  queue.enqueue(rows(1, 1));
  CHECK_EQ(ints(queue.dequeue()), (Ints{0, 1}));
}

TEST(dequeue_ticks_however_many_items_come) {
  BatchingQueue queue(sizes(1'000'000, 1'000'000));
  std::atomic<bool> stop{false};
  auto producer = in_thread([&] {
    while (!stop) queue.enqueue(rows(0, 1));
  });
  CHECK_THROWS(Interrupted, queue.dequeue([] { throw Interrupted(); }), "interrupted");
  stop = true;
}

TEST(what_a_tick_throws_ends_enqueue_and_the_item_stays_offered) {
  BatchingQueue queue(bounded(1, 1));
  queue.enqueue(rows(0, 1));
  CHECK_THROWS(Interrupted, queue.enqueue(rows(1, 1), [] { throw Interrupted(); }),
               "interrupted");
  CHECK_EQ(ints(queue.dequeue()), (Ints{0}));
  CHECK_EQ(ints(queue.dequeue()), (Ints{1}));
}

TEST(nothing_ticks_where_nothing_waits) {
  BatchingQueue queue(sizes(1, 1));
  const Tick tick = [] { throw Interrupted(); };
  queue.enqueue(rows(0, 1), tick);
  CHECK_EQ(ints(queue.dequeue(tick)), (Ints{0}));
}

// --- Stress ---

constexpr int64_t kProducers = 100;

// Producers offer so many items each, and consumers take batches, until close() after
// some time or, without one, when all is handed out. Item i of a producer is one row
// with the number producer * num_items + i. Accepted rows must be in exactly one batch.
void produce_and_close(BatchingQueue::Options options, int64_t num_items,
                       int num_consumers, std::optional<milliseconds> close_after) {
  BatchingQueue queue(std::move(options));
  const Array numbers = counting<int64_t>({kProducers * num_items});
  std::vector<std::future<int64_t>> producers;  // Items accepted.
  std::vector<std::future<Ints>> consumers;     // Rows handed out.
  std::atomic<int64_t> num_seen{0};
  for (int i = 0; i < num_consumers; ++i) {
    consumers.push_back(in_thread([&] {
      Ints seen;
      try {
        while (true) {
          const Nest batch = queue.dequeue();
          const auto* row = reinterpret_cast<const int64_t*>(batch.leaves[0].data);
          seen.insert(seen.end(), row, row + batch.leaves[0].shape[0]);
          num_seen += batch.leaves[0].shape[0];
        }
      } catch (const ClosedBatchingQueue&) {
      }
      return seen;
    }));
  }
  for (int64_t producer = 0; producer < kProducers; ++producer) {
    producers.push_back(in_thread([&queue, &numbers, num_items, producer] {
      int64_t i = 0;
      try {
        for (; i < num_items; ++i) {
          const int64_t row = producer * num_items + i;
          queue.enqueue(Nest::leaf(numbers.narrow(0, row, row + 1)));
        }
      } catch (const ClosedBatchingQueue&) {
      }
      return i;
    }));
  }
  if (close_after) {
    std::this_thread::sleep_for(*close_after);
  } else {
    wait_until([&] { return num_seen == kProducers * num_items; });
  }
  const auto closed = Clock::now();
  CHECK(queue.close());
  Ints accepted, num_handed_out(kProducers);
  for (auto& producer : producers) accepted.push_back(producer.get());
  std::vector<Ints> seen;
  for (auto& consumer : consumers) seen.push_back(consumer.get());
  CHECK(Clock::now() - closed < kSoon);

  std::vector<uint8_t> is_seen(kProducers * num_items);
  for (const Ints& numbers_seen : seen) {
    Ints last(kProducers, -1);
    for (int64_t number : numbers_seen) {
      CHECK_EQ(is_seen.at(number), 0);  // Not doubled.
      is_seen[number] = 1;
      const int64_t producer = number / num_items;
      CHECK(number > last[producer]);  // In the producer's order.
      last[producer] = number;
      ++num_handed_out[producer];
    }
  }
  int64_t num_left = 0;
  for (int64_t producer = 0; producer < kProducers; ++producer) {
    const int64_t handed_out = num_handed_out[producer];
    CHECK(handed_out <= accepted[producer]);
    for (int64_t i = 0; i < handed_out; ++i) {  // The first ones, without a hole.
      CHECK_EQ(is_seen[producer * num_items + i], 1);
    }
    num_left += accepted[producer] - handed_out;
  }
  CHECK_EQ(num_left, 0);
  CHECK_EQ(queue.size(), 0);
}

// While the producers are at it: a million items take longer.
milliseconds random_moment() { return milliseconds(std::random_device()() % 500); }

// The timeout is for the last rows.
BatchingQueue::Options unbounded(int round) {
  return round % 2 == 0 ? sizes(100, 100, 1ms) : sizes(1, 256);
}

BatchingQueue::Options bounded(int round) {
  BatchingQueue::Options options = sizes(64, 64, 1ms);
  options.maximum_queue_size = 64 * (1 + (round + 1) % 3);
  return options;
}

TEST(stress_an_unbounded_queue_hands_every_item_out_once_and_in_order) {
  produce_and_close(unbounded(0), 2'000, 1, std::nullopt);
  produce_and_close(unbounded(1), 2'000, 3, std::nullopt);
}

TEST(stress_a_bounded_queue_hands_every_item_out_once_and_in_order) {
  produce_and_close(bounded(0), 1'000, 2, std::nullopt);
}

TEST(stress_close_of_an_unbounded_queue_loses_and_doubles_nothing) {
  for (int round : Rounds{}) {
    produce_and_close(unbounded(round), 10'000, 1 + round % 3, random_moment());
  }
}

// 1,000 rounds: BEAST_ROUNDS=50.
TEST(stress_close_after_the_producers_ended_drops_no_item) {
  constexpr int kNumProducers = 16, kNumItems = 100, kNumConsumers = 64;
  const Nest item = rows(0, 1);
  for ([[maybe_unused]] int round : Rounds{}) {
    for (int i = 0; i < 20; ++i) {
      BatchingQueue queue(sizes(1, 1));
      std::atomic<int> num_seen{0};
      std::vector<std::thread> producers, consumers;
      for (int j = 0; j < kNumConsumers; ++j) {
        consumers.emplace_back([&] {
          try {
            for (;; ++num_seen) queue.dequeue();
          } catch (const ClosedBatchingQueue&) {
          }
        });
      }
      for (int j = 0; j < kNumProducers; ++j) {
        producers.emplace_back([&] {
          for (int k = 0; k < kNumItems; ++k) queue.enqueue(item);
        });
      }
      for (std::thread& producer : producers) producer.join();
      CHECK(queue.close());
      for (std::thread& consumer : consumers) consumer.join();
      CHECK_EQ(num_seen.load(), kNumProducers * kNumItems);
    }
  }
}

TEST(stress_close_of_a_bounded_queue_loses_and_doubles_nothing) {
  for (int round : Rounds{}) {
    produce_and_close(bounded(round), 10'000, 1 + round % 3, random_moment());
  }
}

}  // namespace
}  // namespace beast::test
