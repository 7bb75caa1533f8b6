// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/completion_queue.h>

#include <chrono>

namespace beast {

// Waits for events of a completion queue, and begins by polling where that pays: where
// an answer is there sooner than a sleeping thread would be woken up, as with quick
// environments on this machine. Learns it from the waits before; where it
// does not pay, one wait in kProbe polls, to see whether that has changed. For one
// thread at a time.
class Spin {
 public:
  // As cq.AsyncNext.
  grpc::CompletionQueue::NextStatus next(grpc::CompletionQueue& cq, void** tag,
                                         bool* ok, gpr_timespec deadline);

 private:
  static constexpr std::chrono::microseconds kBudget{200};  // Of polling in one wait.
  static constexpr int kProbe = 64;
  static constexpr int kMaxCredit = 16;

  int credit_ = 0;  // Waits that may poll; each that pays earns two, others halve it.
  int num_slept_ = 0;  // Waits since one polled.
};

}  // namespace beast
