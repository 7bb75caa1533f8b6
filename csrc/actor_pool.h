// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "batching_queue.h"
#include "dynamic_batcher.h"
#include "env_spec.h"
#include "errors.h"
#include "security.h"

namespace beast {

// Acts in environments on many servers: takes their steps to the inference batcher, its
// actions back to them, and whole rollouts (see RolloutWriter) to the learner queue. An
// address that is given n times gets n streams. A stream is a state machine on gRPC's
// completion queues, not a thread; num_threads threads run all of them.
//
// A stream that breaks drops its rollout, waits (min_backoff, doubled up to max_backoff
// until a rollout succeeds again) and begins anew with newly started environments. A
// stream that trying again does not mend is retired, with one error in the log: its
// server refuses us, speaks another version of the protocol, serves another
// environment, or failed max_failures times with no rollout in between. The others go
// on. Thread-safe.
class ActorPool {
 public:
  struct Options {
    int64_t unroll_length = 80;
    std::shared_ptr<BatchingQueue> learner_queue;
    std::shared_ptr<DynamicBatcher> inference_batcher;
    std::vector<std::string> addresses;
    Nest initial_agent_state = Nest::tuple({});  // Arrays [layers, 1, ...], or none.
    std::string run_id;
    Security security;
    // What the agent was built for; by default, what the first server to answer serves.
    std::optional<EnvSpec> spec;
    size_t max_message_bytes = size_t{64} << 20;
    // run() ends when no stream has been connected for so long.
    std::chrono::milliseconds connect_timeout{60'000};
    // A stream whose server took so long for one step counts as broken.
    std::chrono::milliseconds step_timeout{300'000};
    // A stream is retired when it fails so often with no rollout in between because its
    // environment raised or hung, or its server broke the protocol. A lost server never
    // counts.
    int max_failures = 3;
    std::chrono::milliseconds min_backoff{100};
    std::chrono::milliseconds max_backoff{2'000};
    int num_threads = 0;         // 0: a few, by the number of cores.
    bool channels_last = false;  // See RolloutWriter.
  };
  struct Stats {
    int64_t num_steps = 0;  // Of single environments.
    int64_t num_rollouts = 0;
    int64_t num_restarts = 0;        // Streams that broke after their first step.
    double environment_seconds = 0;  // In environments, as the servers say.
    int64_t num_streams = 0;         // That are not retired.
    std::map<std::string, int64_t> retired;  // Streams by address.
    // Streams that just now ...
    int64_t connecting = 0, in_environment = 0, in_inference = 0, in_learner_queue = 0;
    std::map<std::string, std::string> last_errors;  // By address.
  };

  explicit ActorPool(Options options);  // Throws std::invalid_argument.
  ~ActorPool();

  // Acts until the queue or the batcher is closed, or stop() is called. Throws what the
  // inference or the queue raised, at once; and when all streams are retired, why the
  // first of them was: ConnectionError, std::invalid_argument, or std::runtime_error
  // with what the environment raised. Once only.
  void run(const Tick& tick = {});
  void stop();  // Makes run() return, soon.
  // One more stream, also while it runs; it replaces a retired one of the address.
  void add_address(const std::string& address);

  int64_t count() const;  // Stats::num_steps
  Stats stats() const;

 private:
  struct State;
  class Loop;
  class Stream;
  std::shared_ptr<State> state_;  // Shared with answers that are still to come.
};

}  // namespace beast
