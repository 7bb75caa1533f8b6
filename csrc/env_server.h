// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "environment.h"
#include "errors.h"
#include "security.h"

namespace beast {

// Serves environments to learners over gRPC (rpcenv.proto). Every stream gets
// environments of its own, made by `make_environment` when its client has said Hello
// and gone with it. num_threads threads run all streams: an environment that waits
// outside of Python holds one of them. One more sees to it that clients know the server
// alive while all are in environments. Thread-safe.
//
// A stream begins, and counts against max_streams, when a client that has the token (if
// the server has one) has said Hello. Until then it is a pending call, as are health
// checks and calls that are refused: each ends within handshake_timeout. At most
// max_streams + kMaxPending of those that showed no token are kept; beyond, the oldest
// is cancelled. So who has no token cannot keep out those who have it.
class EnvServer {
 public:
  struct Options {
    std::string address;  // unix:/path or host:port; port 0 takes a free one.
    // Gets the number of the stream, from 0. What it throws reaches the client.
    std::function<std::unique_ptr<Environment>(uint64_t stream)> make_environment;
    int num_threads = 1;
    int max_streams = 1024;                               // At once; more are refused.
    std::chrono::milliseconds handshake_timeout{10'000};  // From the call to its Hello.
    size_t max_message_bytes = size_t{64} << 20;
    Security security;
  };

  static constexpr int kMaxPending = 64;

  explicit EnvServer(Options options);  // Throws std::invalid_argument; builds nothing.
  ~EnvServer();                         // Stops it.

  void start();                      // Throws ConnectionError if it cannot listen.
  void wait(const Tick& tick = {});  // Until it is stopped.
  // Streams that are in a step send its result; then all end with UNAVAILABLE. Throws
  // TimeoutError where an environment has not come back within the grace period; its
  // thread is left behind then. Stopping again does nothing.
  void stop(std::chrono::milliseconds grace = std::chrono::seconds(5));

  std::string address() const;  // With the port that was taken.
  int num_streams() const;      // With environments, at the moment.

 private:
  struct State;
  class Stream;
  std::shared_ptr<State> state_;  // Shared with threads that a stop left behind.
};

}  // namespace beast
