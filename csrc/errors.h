// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

namespace beast {

// Mistakes of the caller are std::invalid_argument, which Python sees as ValueError.

// The queue or batcher was closed while or before the caller waited on it.
struct ClosedBatchingQueue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer is gone, refuses us or breaks the protocol: Python's ConnectionError.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Something was not there before its deadline: Python's TimeoutError.
struct TimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Called about ten times a second by whoever waits; what it throws ends the wait. That
// is how Ctrl-C reaches a Python thread that waits in here.
using Tick = std::function<void()>;
constexpr std::chrono::milliseconds kTickInterval{100};

inline std::string in_seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", time.count() / 1000.0);
  return text;
}

}  // namespace beast
