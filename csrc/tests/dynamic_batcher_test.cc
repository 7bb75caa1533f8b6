// SPDX-License-Identifier: Apache-2.0
#include "dynamic_batcher.h"

#include <random>

#include "arrays.h"
#include "check.h"

namespace beast::test {
namespace {

using std::chrono::milliseconds;
using Ints = std::vector<int64_t>;
using Batch = std::shared_ptr<DynamicBatcher::Batch>;

DynamicBatcher::Options sizes(int64_t minimum, int64_t maximum,
                              std::optional<milliseconds> timeout = {}) {
  DynamicBatcher::Options options;
  options.sizes = {0, minimum, maximum, timeout};
  return options;
}

bool is_waiting(const std::future<void>& future) {
  return future.wait_for(20ms) == std::future_status::timeout;
}

// What an item was told: its rows, or the error's message.
struct Told {
  int num_calls = 0;
  Ints rows;
  std::string error;
};

// Asks without a wait.
std::shared_ptr<Told> ask(DynamicBatcher& batcher, Nest inputs) {
  auto told = std::make_shared<Told>();
  batcher.compute_async(std::move(inputs),
                        [told](const Nest* outputs, int64_t begin, int64_t end,
                               std::exception_ptr error) {
                          ++told->num_calls;
                          if (outputs)
                            told->rows = ints(outputs->narrow(0, begin, end));
                          try {
                            if (error) std::rethrow_exception(error);
                          } catch (const ClosedBatchingQueue&) {
                            told->error = "closed";
                          } catch (const std::runtime_error& failure) {
                            told->error = failure.what();
                          }
                        });
  return told;
}

// Every input plus a hundred.
Nest plus_hundred(const DynamicBatcher::Batch& batch) {
  Ints numbers = ints(batch.inputs());
  for (int64_t& number : numbers) number += 100;
  const int64_t count = numbers.size();
  return Nest::leaf(array_of<int64_t>({count}, std::move(numbers)));
}

// --- Answers ---

TEST(items_with_several_rows_get_exactly_their_rows_back) {
  DynamicBatcher batcher(sizes(6, 6));
  auto one = ask(batcher, rows(0, 1));
  auto two = ask(batcher, rows(1, 2));
  auto three = ask(batcher, rows(3, 3));
  CHECK_EQ(batcher.size(), 6);
  Batch batch = batcher.next_batch();
  CHECK_EQ(batcher.size(), 0);
  CHECK_EQ(batch->num_rows(), 6);
  CHECK_EQ(ints(batch->inputs()), (Ints{0, 1, 2, 3, 4, 5}));
  CHECK(!batch->is_answered());
  batch->set_outputs(plus_hundred(*batch));
  CHECK(batch->is_answered());
  CHECK_EQ(one->rows, (Ints{100}));
  CHECK_EQ(two->rows, (Ints{101, 102}));
  CHECK_EQ(three->rows, (Ints{103, 104, 105}));
  batch.reset();
  CHECK_EQ(three->num_calls, 1);
  CHECK_EQ(three->error, "");
}

TEST(compute_waits_for_its_answer) {
  DynamicBatcher batcher(sizes(1, 8));
  auto asker = in_thread([&] {
    CHECK_EQ(ints(batcher.compute(rows(5, 2))), (Ints{105, 106}));
  });
  Batch batch = batcher.next_batch();
  CHECK(is_waiting(asker));
  batch->set_outputs(plus_hundred(*batch));
  CHECK_SOON(asker);
  asker.get();
}

TEST(outputs_may_have_another_structure_than_inputs_and_any_batch_dim) {
  DynamicBatcher::Options options;
  options.sizes = {1, 3, 3, {}};
  DynamicBatcher batcher(options);
  auto input = [](int64_t first, int64_t count) {
    return Nest::leaf(counting<int64_t>({1, count}, first));
  };
  auto one = in_thread([&] { return batcher.compute(input(0, 1)); });
  while (batcher.size() == 0) std::this_thread::yield();
  auto two = in_thread([&] { return batcher.compute(input(1, 2)); });
  Batch batch = batcher.next_batch();
  CHECK_EQ(batch->inputs().leaves[0].shape, Shape({1, 3}));
  batch->set_outputs(
      Nest::dict({{"action", Nest::leaf(counting<int64_t>({1, 3}))},
                  {"logits", Nest::leaf(counting<int64_t>({2, 3}, 10))}}));
  const Nest first = one.get(), second = two.get();
  CHECK_EQ(first.structure->str(), "{action: *, logits: *}");
  CHECK_EQ(ints(first.at("logits")), (Ints{10, 13}));
  CHECK_EQ(second.at("logits").leaves[0].shape, Shape({2, 2}));
  CHECK_EQ(ints(second.at("logits")), (Ints{11, 12, 14, 15}));
}

TEST(answers_outlive_batch_and_batcher) {
  Nest answer;
  {
    DynamicBatcher batcher(sizes(1, 1));
    auto asker = in_thread([&] { answer = batcher.compute(rows(1, 1)); });
    Batch batch = batcher.next_batch();
    batch->set_outputs(plus_hundred(*batch));
    asker.get();
  }
  CHECK_EQ(ints(answer), (Ints{101}));
}

TEST(an_answer_may_ask_again) {
  DynamicBatcher batcher(sizes(1, 1));
  std::shared_ptr<Told> again;
  batcher.compute_async(rows(0, 1),
                        [&](const Nest*, int64_t, int64_t, std::exception_ptr) {
                          again = ask(batcher, rows(1, 1));  // No lock is held.
                        });
  for (int i = 0; i < 2; ++i) {
    Batch batch = batcher.next_batch();
    batch->set_outputs(plus_hundred(*batch));
  }
  CHECK_EQ(again->rows, (Ints{101}));
}

// --- Batches ---

TEST(an_item_is_never_split) {
  DynamicBatcher batcher(sizes(4, 4));
  for (int i = 0; i < 3; ++i) ask(batcher, rows(3 * i, 3));
  CHECK_EQ(ints(batcher.next_batch()->inputs()), (Ints{0, 1, 2}));
  CHECK_EQ(ints(batcher.next_batch()->inputs()), (Ints{3, 4, 5}));
  CHECK_EQ(batcher.size(), 3);
}

TEST(a_batch_takes_all_there_is_up_to_the_maximum) {
  DynamicBatcher batcher(sizes(1, 3));
  for (int i = 0; i < 5; ++i) ask(batcher, rows(i, 1));
  CHECK_EQ(ints(batcher.next_batch()->inputs()), (Ints{0, 1, 2}));
  CHECK_EQ(ints(batcher.next_batch()->inputs()), (Ints{3, 4}));
}

TEST(next_batch_waits_for_the_minimum) {
  DynamicBatcher batcher(sizes(2, 2));
  auto one = ask(batcher, rows(0, 1));
  auto consumer = in_thread([&] { CHECK_EQ(batcher.next_batch()->num_rows(), 2); });
  CHECK(is_waiting(consumer));
  auto other = ask(batcher, rows(1, 1));
  CHECK_SOON(consumer);
  consumer.get();
}

TEST(items_that_come_together_wake_every_consumer_they_serve) {
  DynamicBatcher batcher(sizes(2, 2));
  const auto begin = Clock::now();
  for (int i = 0; i < 50; ++i) {
    std::vector<std::future<Batch>> consumers;
    for (int j = 0; j < 3; ++j) {
      consumers.push_back(in_thread([&] { return batcher.next_batch(); }));
    }
    std::this_thread::sleep_for(1ms);
    for (int j = 0; j < 6; ++j) {
      batcher.compute_async(
          rows(j, 1), [](const Nest*, int64_t, int64_t, std::exception_ptr) {}, j < 5);
    }
    for (auto& consumer : consumers) CHECK_EQ(consumer.get()->num_rows(), 2);
  }
  // A wake-up that is lost costs a tick.
  CHECK(Clock::now() - begin < 50 * kTickInterval / 2);
}

TEST(past_the_timeout_a_batch_is_made_of_what_there_is) {
  DynamicBatcher batcher(sizes(10, 10, 50ms));
  const auto begin = Clock::now();
  auto told = ask(batcher, rows(0, 2));
  CHECK_EQ(ints(batcher.next_batch()->inputs()), (Ints{0, 1}));
  CHECK(Clock::now() - begin >= 50ms);
  CHECK(Clock::now() - begin < kSoon);
}

TEST(the_batcher_uses_its_memory_again) {
  int num_allocated = 0;
  DynamicBatcher::Options options = sizes(1, 1);
  options.hooks.allocated = [&](void*, size_t) { ++num_allocated; };
  DynamicBatcher batcher(options);
  for (int64_t i = 0; i < 100; ++i) {
    auto told = ask(batcher, rows(i, 1));
    Batch batch = batcher.next_batch();
    batch->set_outputs(plus_hundred(*batch));
    CHECK_EQ(told->rows, (Ints{i + 100}));
  }
  CHECK_EQ(num_allocated, 1);
}

// --- Batches without an answer ---

TEST(a_dropped_batch_fails_its_items_at_once) {
  DynamicBatcher batcher(sizes(1, 4));
  auto asker = in_thread([&] {
    CHECK_THROWS(std::runtime_error, batcher.compute(rows(0, 1)),
                 "the batch was dropped without outputs");
  });
  Batch batch = batcher.next_batch();
  CHECK(is_waiting(asker));
  batch.reset();
  CHECK_SOON(asker);
  asker.get();
}

TEST(a_failed_batch_gives_its_reason) {
  DynamicBatcher batcher(sizes(2, 2));
  auto one = ask(batcher, rows(0, 1));
  auto other = ask(batcher, rows(1, 1));
  Batch batch = batcher.next_batch();
  batch->fail("CUDA out of memory");
  CHECK(batch->is_answered());
  batch->fail("again");
  batch->set_outputs(plus_hundred(*batch));  // Too late; does nothing.
  batch.reset();
  for (const auto& told : {one, other}) {
    CHECK_EQ(told->error, "CUDA out of memory");
    CHECK_EQ(told->num_calls, 1);
  }
}

TEST(to_fail_an_answered_batch_does_nothing) {
  DynamicBatcher batcher(sizes(1, 1));
  auto told = ask(batcher, rows(0, 1));
  Batch batch = batcher.next_batch();
  batch->set_outputs(plus_hundred(*batch));
  batch->fail("too late");
  CHECK_EQ(told->num_calls, 1);
  CHECK_EQ(told->error, "");
  CHECK_THROWS(std::invalid_argument, batch->set_outputs(plus_hundred(*batch)),
               "twice");
}

TEST(the_batcher_goes_on_after_a_failed_batch) {
  DynamicBatcher batcher(sizes(1, 1));
  auto one = ask(batcher, rows(0, 1));
  batcher.next_batch()->fail("no");
  auto other = ask(batcher, rows(1, 1));
  Batch batch = batcher.next_batch();
  batch->set_outputs(plus_hundred(*batch));
  CHECK_EQ(other->rows, (Ints{101}));
}

// --- Errors ---

TEST(outputs_are_set_once) {
  DynamicBatcher batcher(sizes(1, 1));
  auto told = ask(batcher, rows(0, 1));
  Batch batch = batcher.next_batch();
  batch->set_outputs(plus_hundred(*batch));
  CHECK_THROWS(std::invalid_argument, batch->set_outputs(plus_hundred(*batch)),
               "outputs: expected once for each batch, got them twice");
  CHECK_EQ(told->num_calls, 1);
}

TEST(outputs_that_do_not_fit_name_the_field_and_may_be_set_again) {
  DynamicBatcher batcher(sizes(2, 2));
  auto told = ask(batcher, rows(0, 2));
  Batch batch = batcher.next_batch();
  auto outputs = [](Array action, Array value) {
    return Nest::dict({{"action", Nest::leaf(action)}, {"value", Nest::leaf(value)}});
  };
  CHECK_THROWS(
      std::invalid_argument,
      batch->set_outputs(outputs(counting<int64_t>({3}), counting<float>({3}))),
      "action: expected 2 rows in dimension 0 as in the inputs, got shape (3,)");
  CHECK_THROWS(
      std::invalid_argument,
      batch->set_outputs(outputs(counting<int64_t>({2}), counting<float>({3}))),
      "value: expected 2 rows in dimension 0 as in action, got shape (3,)");
  CHECK_THROWS(std::invalid_argument,
               batch->set_outputs(outputs(counting<int64_t>({2}), counting<float>({}))),
               "value: expected at least 1 dimensions (batch_dim=0), got shape ()");
  CHECK_THROWS(std::invalid_argument, batch->set_outputs(Nest::tuple({})),
               "expected at least one array, got ()");
  CHECK_EQ(told->num_calls, 0);
  batch->set_outputs(outputs(counting<int64_t>({2}), counting<float>({2})));
  CHECK_EQ(told->rows, (Ints{0, 1}));
}

TEST(outputs_must_be_like_the_first_in_all_but_rows) {
  DynamicBatcher batcher(sizes(1, 3));
  ask(batcher, rows(0, 3));
  batcher.next_batch()->set_outputs(Nest::leaf(counting<int64_t>({3, 2})));
  auto told = ask(batcher, rows(0, 2));
  Batch batch = batcher.next_batch();
  CHECK_THROWS(
      std::invalid_argument, batch->set_outputs(Nest::leaf(counting<float>({2, 2}))),
      "the array: expected int64 of shape (3, 2) (any size in dimension 0), got "
      "float32 of shape (2, 2)");
  CHECK_THROWS(std::invalid_argument,
               batch->set_outputs(Nest::leaf(counting<int64_t>({2}))),
               "got int64 of shape (2,)");
  CHECK_THROWS(std::invalid_argument,
               batch->set_outputs(Nest::tuple({Nest::leaf(counting<int64_t>({2, 2}))})),
               "the nest: expected *, got (*,)");
  batch->set_outputs(Nest::leaf(counting<int64_t>({2, 2})));
  CHECK_EQ(told->rows, (Ints{0, 1, 2, 3}));
}

TEST(without_check_outputs_only_the_rows_must_fit) {
  DynamicBatcher::Options options = sizes(1, 1);
  options.check_outputs = false;
  DynamicBatcher batcher(options);
  for (const Array& outputs : {counting<float>({1}), counting<int64_t>({1, 2})}) {
    auto asker = in_thread([&] { return batcher.compute(rows(0, 1)); });
    batcher.next_batch()->set_outputs(Nest::leaf(outputs));
    CHECK_EQ(asker.get().leaves[0].shape, outputs.shape);
  }
}

TEST(inputs_that_do_not_fit_name_the_field) {
  DynamicBatcher batcher(sizes(1, 4));
  auto inputs = [](Array frame) { return Nest::dict({{"frame", Nest::leaf(frame)}}); };
  CHECK_THROWS(std::invalid_argument, batcher.compute(inputs(counting<float>({5}))),
               "frame: expected at most 4 rows (maximum_batch_size), got 5");
  CHECK_THROWS(std::invalid_argument, batcher.compute(inputs(counting<float>({0}))),
               "expected at least one row");
  ask(batcher, inputs(counting<int64_t>({1, 3})));
  CHECK_THROWS(std::invalid_argument, batcher.compute(inputs(counting<float>({1, 3}))),
               "frame: expected int64 of shape (1, 3) (any size in dimension 0), got "
               "float32 of shape (1, 3)");
  CHECK_EQ(batcher.size(), 1);
}

TEST(sizes_that_make_no_sense_are_refused_by_name) {
  CHECK_THROWS(std::invalid_argument, DynamicBatcher(sizes(0, 1)),
               "minimum_batch_size");
  CHECK_THROWS(std::invalid_argument, DynamicBatcher(sizes(2, 1)),
               "maximum_batch_size");
}

// --- Closing ---

TEST(to_wait_for_long_costs_no_work) {
  DynamicBatcher batcher(sizes(1, 1));
  auto consumer = in_thread([&] {
    batcher.next_batch();
    CHECK(cpu_time_of_this_thread() < kTickInterval / 2);
  });
  std::this_thread::sleep_for(4 * kTickInterval);
  ask(batcher, rows(0, 1));
  consumer.get();
}

TEST(close_wakes_those_who_wait_for_an_answer) {
  DynamicBatcher batcher(sizes(10, 10));
  std::vector<std::future<void>> askers;
  for (int i = 0; i < 9; ++i) {
    askers.push_back(in_thread([&] {
      CHECK_THROWS(ClosedBatchingQueue, batcher.compute(rows(0, 1)), "is closed");
    }));
  }
  while (batcher.size() < 9) std::this_thread::yield();
  CHECK(batcher.close());
  CHECK_EQ(batcher.size(), 0);
  for (auto& asker : askers) {
    CHECK_SOON(asker);
    asker.get();
  }
}

TEST(close_wakes_those_who_wait_for_a_batch) {
  DynamicBatcher batcher(sizes(2, 2, 60'000ms));
  auto told = ask(batcher, rows(0, 1));
  std::vector<std::future<void>> consumers;
  for (int i = 0; i < 5; ++i) {
    consumers.push_back(in_thread(
        [&] { CHECK_THROWS(ClosedBatchingQueue, batcher.next_batch(), "is closed"); }));
  }
  CHECK(is_waiting(consumers.front()));
  CHECK(batcher.close());
  for (auto& consumer : consumers) {
    CHECK_SOON(consumer);
    consumer.get();
  }
  CHECK_EQ(told->error, "closed");
}

TEST(close_fails_the_items_of_a_batch_that_is_being_answered) {
  DynamicBatcher batcher(sizes(1, 4));
  auto told = ask(batcher, rows(0, 1));
  auto asker = in_thread([&] {
    CHECK_THROWS(ClosedBatchingQueue, batcher.compute(rows(1, 1)), "is closed");
  });
  while (batcher.size() < 2) std::this_thread::yield();
  Batch batch = batcher.next_batch();
  CHECK_EQ(batch->num_rows(), 2);
  batcher.close();
  CHECK_SOON(asker);
  asker.get();
  CHECK_EQ(told->error, "closed");
  CHECK(batch->is_answered());
  batch->set_outputs(plus_hundred(*batch));  // Does nothing,
  batch->set_outputs(plus_hundred(*batch));
  batch->set_outputs(rows(0, 7));  // fit or not.
  batch->fail("too late");
  batch.reset();
  CHECK_EQ(told->num_calls, 1);
}

TEST(a_closed_batcher_takes_and_gives_nothing) {
  DynamicBatcher batcher(sizes(1, 1));
  CHECK(!batcher.is_closed());
  CHECK(batcher.close());
  CHECK(batcher.is_closed());
  CHECK(!batcher.close());
  CHECK_THROWS(ClosedBatchingQueue, batcher.compute(rows(0, 1)), "is closed");
  CHECK_THROWS(ClosedBatchingQueue, ask(batcher, rows(0, 1)), "is closed");
  CHECK_THROWS(ClosedBatchingQueue, batcher.next_batch(), "is closed");
}

TEST(a_batch_outlives_its_batcher) {
  std::shared_ptr<Told> waiting, out;
  Batch batch;
  {
    DynamicBatcher batcher(sizes(1, 1));
    out = ask(batcher, rows(0, 1));
    waiting = ask(batcher, rows(1, 1));
    batch = batcher.next_batch();
  }
  CHECK_EQ(out->error, "closed");
  CHECK_EQ(waiting->error, "closed");
  CHECK_EQ(ints(batch->inputs()), (Ints{0}));
  batch->set_outputs(plus_hundred(*batch));
}

// --- Ticks ---

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

TEST(what_a_tick_throws_ends_compute_and_its_answer_goes_nowhere) {
  DynamicBatcher batcher(sizes(1, 4));
  CHECK_THROWS(Interrupted, batcher.compute(rows(0, 1), [] { throw Interrupted(); }),
               "interrupted");
  auto told = ask(batcher, rows(1, 1));
  Batch batch = batcher.next_batch();
  CHECK_EQ(batch->num_rows(), 2);
  batch->set_outputs(plus_hundred(*batch));
  CHECK_EQ(told->rows, (Ints{101}));
}

TEST(what_a_tick_throws_ends_next_batch_and_no_item_is_lost) {
  DynamicBatcher batcher(sizes(2, 2));
  auto one = ask(batcher, rows(0, 1));
  CHECK_THROWS(Interrupted, batcher.next_batch([] { throw Interrupted(); }),
               "interrupted");
  auto other = ask(batcher, rows(1, 1));
  CHECK_EQ(ints(batcher.next_batch()->inputs()), (Ints{0, 1}));
}

// --- Stress ---

constexpr int64_t kAskers = 100;
constexpr int64_t kQuestions = 10'000;

// Askers compute one to three rows at a time; some batches fail, some are dropped.
// Whatever happens, every question gets its own answer or an error, and close() ends
// all. Returns how many answers there were.
int64_t ask_and_close(DynamicBatcher::Options options, int num_consumers,
                      milliseconds close_after) {
  DynamicBatcher batcher(std::move(options));
  std::vector<std::future<int64_t>> askers, consumers;
  for (int i = 0; i < num_consumers; ++i) {
    consumers.push_back(in_thread([&] {
      int64_t num_batches = 0;
      try {
        while (true) {
          Batch batch = batcher.next_batch();
          if (++num_batches % 50 == 10) {
            batch->fail("failed on purpose");
          } else if (num_batches % 50 != 20) {
            batch->set_outputs(plus_hundred(*batch));
          }
        }
      } catch (const ClosedBatchingQueue&) {
      }
      return num_batches;
    }));
  }
  for (int64_t asker = 0; asker < kAskers; ++asker) {
    askers.push_back(in_thread([&batcher, asker] {
      const Array numbers = counting<int64_t>({kQuestions + 3}, asker * kQuestions);
      int64_t num_answers = 0;
      try {
        for (int64_t i = 0; i < kQuestions; ++i) {
          const Array question = numbers.narrow(0, i, i + 1 + (asker + i) % 3);
          try {
            const Ints answer = ints(batcher.compute(Nest::leaf(question)));
            CHECK_EQ(answer, values<int64_t>(counting<int64_t>(
                                 question.shape, asker * kQuestions + i + 100)));
            ++num_answers;
          } catch (const ClosedBatchingQueue&) {
            throw;
          } catch (const Failure&) {
            throw;
          } catch (const std::runtime_error& error) {
            const std::string reason = error.what();
            CHECK(reason == "failed on purpose" ||
                  reason == "the batch was dropped without outputs");
          }
        }
      } catch (const ClosedBatchingQueue&) {
      }
      return num_answers;
    }));
  }
  std::this_thread::sleep_for(close_after);
  const auto closed = Clock::now();
  CHECK(batcher.close());
  int64_t num_answers = 0;
  for (auto& asker : askers) num_answers += asker.get();
  for (auto& consumer : consumers) consumer.get();
  CHECK(Clock::now() - closed < kSoon);
  return num_answers;
}

TEST(stress_every_question_gets_its_own_answer_and_close_ends_all) {
  int64_t num_answers = 0;
  for (int round : Rounds{}) {
    // A minimum that the askers cannot reach needs the timeout.
    const int64_t minimum = round % 2 == 0 ? 1 : 2 * kAskers;
    num_answers += ask_and_close(sizes(minimum, 4 * kAskers, 2ms), 1 + round % 3,
                                 milliseconds(std::random_device()() % 500));
  }
  CHECK(num_answers > 0);
}

}  // namespace
}  // namespace beast::test
