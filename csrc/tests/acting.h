// SPDX-License-Identifier: Apache-2.0
// An actor pool with all that belongs to it, whose every rollout is checked. For tests.
#pragma once

#include <map>
#include <set>

#include "actor_pool.h"
#include "check.h"
#include "envs.h"

namespace beast::test {

// What the agent does in environment `env` of the stream when it sees the frame.
inline int64_t policy(int64_t frame, int64_t env, int64_t stream) {
  return (7 * frame + 3 * env + stream) % 4;
}

inline Nest new_array(DType dtype, Shape shape) {
  const size_t size = shape.num_elements() * itemsize(dtype);
  std::shared_ptr<std::byte[]> data(new std::byte[size]());
  return Nest::leaf(Array::contiguous(dtype, shape, data.get(), data));
}

template <class T>
T* data_of(const Nest& nest) {
  return reinterpret_cast<T*>(nest.leaves.at(0).data);
}

// What an agent answers to the inputs: the policy's actions; its state counts rows.
inline Nest answer(const Nest& inputs) {
  const Nest observation = inputs.at(0).at("observation"), state = inputs.at(1);
  const int64_t batch = observation.leaves[0].shape[1];
  Nest action = new_array(DType::kInt64, {1, batch});
  Nest next_state = new_array(DType::kInt64, {1, batch, 1});
  const auto* env = data_of<int64_t>(observation.at("env"));
  const auto* frame = data_of<int64_t>(observation.at("frame"));
  const auto* stream = data_of<int64_t>(observation.at("stream"));
  for (int64_t i = 0; i < batch; ++i) {
    // Some test's servers send numbers that no environment has.
    data_of<int64_t>(action)[i] =
        policy(frame[i] & 0xffffff, env[i] & 0xffffff, stream[i] & 0xffffff);
    data_of<int64_t>(next_state)[i] = data_of<int64_t>(state)[i] + 1;
  }
  return Nest::tuple({Nest::dict({{"action", action}}), Nest::tuple({next_state})});
}

// Checks rollouts of CountingEnv, each column of a batch for itself: whether it begins
// where the one before it of this stream and environment ended, and every value.
class RolloutChecker {
 public:
  explicit RolloutChecker(int64_t length) : length_(length) {}  // Of CountingEnv.

  // Streams whose number is not below the limit are not ours.
  void check(const Nest& batch, int64_t stream_limit = INT64_MAX) {
    const Nest rows = batch.at(0), observation = rows.at("observation");
    const Shape shape = rows.at("reward").leaves.at(0).shape;
    const int64_t num_rows = shape[0], num_columns = shape[1];
    const auto* stream = data_of<int64_t>(observation.at("stream"));
    const auto* env = data_of<int64_t>(observation.at("env"));
    const auto* frames = data_of<int64_t>(observation.at("frame"));
    for (int64_t column = 0; column < num_columns; ++column) {
      if (stream[column] < 0 || stream[column] >= stream_limit) continue;
      int64_t& next = next_frame_[{stream[column], env[column]}];
      CHECK_EQ(frames[column], next);
      CHECK_EQ(data_of<int64_t>(batch.at(1))[column], next);  // The core state.
      for (int64_t t = 0; t < num_rows; ++t) {
        check_row(rows, t * num_columns + column, env[column], stream[column],
                  next + t);
      }
      next += num_rows - 1;
      ++num_rollouts_;
    }
  }

  int64_t num_rollouts() const { return num_rollouts_; }
  // By stream and environment: the steps that were seen.
  const std::map<std::pair<int64_t, int64_t>, int64_t>& next_frame() const {
    return next_frame_;
  }

 private:
  // Row and column are at `at` of each array.
  void check_row(const Nest& rows, int64_t at, int64_t env, int64_t stream,
                 int64_t frame) const {
    const Nest observation = rows.at("observation");
    CHECK_EQ(data_of<int64_t>(observation.at("stream"))[at], stream);
    CHECK_EQ(data_of<int64_t>(observation.at("env"))[at], env);
    CHECK_EQ(data_of<int64_t>(observation.at("frame"))[at], frame);
    CHECK_EQ(data_of<bool>(observation.at("flags"))[2 * at], frame % 2 == 1);
    CHECK_EQ(data_of<bool>(observation.at("flags"))[2 * at + 1], frame % 2 == 0);
    const int64_t action = policy(frame, env, stream);
    const int64_t last_action = frame == 0 ? 0 : policy(frame - 1, env, stream);
    CHECK_EQ(data_of<int64_t>(rows.at("action"))[at], action);
    CHECK_EQ(data_of<int64_t>(rows.at("last_action"))[at], last_action);
    CHECK_EQ(data_of<int64_t>(observation.at("heard"))[at],
             frame == 0 ? -1 : last_action);
    // Episodes of length + env steps, with one row more, and the next.
    const int64_t period = length_ + env + 1, step = frame % period;
    float episode_return = 0;
    for (int64_t f = frame - step; f < frame; ++f) {
      episode_return += static_cast<float>(policy(f, env, stream));
    }
    const Array windows = observation.at("window").leaves.at(0);
    const int64_t size = windows.strides[1];
    for (int64_t i = 0; i < CountingEnv::kWindow; ++i) {
      const auto* one = windows.data + at * size + i * windows.strides[2];
      const int64_t age = std::min(CountingEnv::kWindow - 1 - i, step);
      CHECK_EQ(static_cast<int>(one[0]), (frame - age) % 256);
      CHECK_EQ(static_cast<int>(one[windows.strides[4]]), env);
    }
    const bool ends = step == period - 1, is_even = frame / period % 2 == 0;
    CHECK_EQ(data_of<bool>(rows.at("first"))[at], step == 0);
    CHECK_EQ(data_of<bool>(rows.at("terminated"))[at], ends && is_even);
    CHECK_EQ(data_of<bool>(rows.at("truncated"))[at], ends && !is_even);
    CHECK_EQ(data_of<float>(rows.at("reward"))[at],
             step == 0 ? 0 : static_cast<float>(last_action));
    CHECK_EQ(data_of<float>(rows.at("episode_return"))[at], episode_return);
    CHECK_EQ(data_of<int32_t>(rows.at("episode_step"))[at], step);
  }

  const int64_t length_;
  std::map<std::pair<int64_t, int64_t>, int64_t> next_frame_;
  int64_t num_rollouts_ = 0;
};

// A pool that acts, with threads that answer and learn, until it is closed.
class Run {
 public:
  struct Options {
    ActorPool::Options pool;  // All but the queues and the state is kept.
    int64_t length = 5;       // Of CountingEnv.
    int64_t learner_batch = 4;
    std::optional<int64_t> maximum_queue_size = 64;
    bool has_agent = true;
    bool has_learner = true;
    int64_t stream_limit = INT64_MAX;  // See RolloutChecker.
  };
  static ActorPool::Options acting(const std::vector<std::string>& addresses,
                                   int64_t unroll_length = 5) {
    ActorPool::Options options;
    options.addresses = addresses;
    options.unroll_length = unroll_length;
    options.min_backoff = std::chrono::milliseconds(1);
    options.max_backoff = std::chrono::milliseconds(50);
    options.run_id = "test";
    return options;
  }

  explicit Run(ActorPool::Options pool) : Run(Options{.pool = std::move(pool)}) {}
  explicit Run(Options options)
      : options_(std::move(options)), checker_(options_.length) {
    BatchingQueue::Options queue_options;
    queue_options.sizes = {1, options_.learner_batch, options_.learner_batch, {}};
    queue_options.maximum_queue_size = options_.maximum_queue_size;
    queue = std::make_shared<BatchingQueue>(queue_options);
    DynamicBatcher::Options batcher_options;
    batcher_options.sizes = {1, 1, 4096, {}};
    batcher = std::make_shared<DynamicBatcher>(batcher_options);
    options_.pool.learner_queue = queue;
    options_.pool.inference_batcher = batcher;
    options_.pool.initial_agent_state =
        Nest::tuple({new_array(DType::kInt64, {1, 1, 1})});
    pool.emplace(options_.pool);
    running = in_thread([this] { pool->run(); });
    if (options_.has_agent) start_agent();
    if (options_.has_learner) start_learner();
  }
  ~Run() {
    queue->close();
    batcher->close();
    if (running.valid()) running.wait();
  }

  void start_agent() {
    agent_ = in_thread([this] {
      try {
        while (true) {
          auto batch = batcher->next_batch();
          batch->set_outputs(answer(batch->inputs()));
        }
      } catch (const ClosedBatchingQueue&) {
      }
    });
  }
  void start_learner() {
    learner_ = in_thread([this] {
      try {
        while (true) {
          const Nest batch = queue->dequeue();
          std::lock_guard lock(mu_);
          checker_.check(batch, options_.stream_limit);
        }
      } catch (const ClosedBatchingQueue&) {
      } catch (...) {
        queue->close();  // A check failed: finish() throws it.
        throw;
      }
    });
  }

  // Closes all and throws what went wrong anywhere.
  void finish() {
    queue->close();
    batcher->close();
    CHECK_SOON(running);
    if (learner_.valid()) learner_.get();
    if (agent_.valid()) agent_.get();
    running.get();
  }

  int64_t num_rollouts() const {
    std::lock_guard lock(mu_);
    return checker_.num_rollouts();
  }
  // How many streams and environments have at least so many steps in rollouts.
  int64_t num_beyond(int64_t num_steps, int64_t from_stream = 0) const {
    std::lock_guard lock(mu_);
    int64_t count = 0;
    for (const auto& [key, next] : checker_.next_frame()) {
      count += key.first >= from_stream && next >= num_steps;
    }
    return count;
  }

  std::shared_ptr<BatchingQueue> queue;
  std::shared_ptr<DynamicBatcher> batcher;
  std::optional<ActorPool> pool;
  std::future<void> running;

 private:
  Options options_;
  mutable std::mutex mu_;
  RolloutChecker checker_;  // Guarded by mu_.
  std::future<void> agent_, learner_;
};

}  // namespace beast::test
