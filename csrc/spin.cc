// SPDX-License-Identifier: Apache-2.0
#include "spin.h"

#include <algorithm>

namespace beast {

grpc::CompletionQueue::NextStatus Spin::next(grpc::CompletionQueue& cq, void** tag,
                                             bool* ok, gpr_timespec deadline) {
  if (credit_ == 0 && num_slept_ < kProbe) {
    ++num_slept_;
    return cq.AsyncNext(tag, ok, deadline);
  }
  const gpr_timespec no_wait = gpr_inf_past(GPR_CLOCK_MONOTONIC);
  auto status = cq.AsyncNext(tag, ok, no_wait);
  if (status != grpc::CompletionQueue::TIMEOUT) return status;  // It was there already.
  num_slept_ = 0;
  const auto until = std::chrono::steady_clock::now() + kBudget;
  do {
    status = cq.AsyncNext(tag, ok, no_wait);
    if (status != grpc::CompletionQueue::TIMEOUT) {
      credit_ = std::min(credit_ + 2, kMaxCredit);
      return status;
    }
  } while (std::chrono::steady_clock::now() < until);
  credit_ /= 2;
  return cq.AsyncNext(tag, ok, deadline);
}

}  // namespace beast
