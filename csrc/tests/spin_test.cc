// SPDX-License-Identifier: Apache-2.0
#include "spin.h"

#include <grpcpp/alarm.h>

#include <thread>

#include "check.h"

namespace beast::test {
namespace {

using Status = grpc::CompletionQueue::NextStatus;

gpr_timespec in_ms(int64_t ms) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_millis(ms, GPR_TIMESPAN));
}

struct Queue {
  ~Queue() {
    cq.Shutdown();
    void* tag;
    bool ok;
    while (cq.Next(&tag, &ok)) {
    }
  }
  // The next event within 10 s, as a number.
  int64_t next() {
    void* tag = nullptr;
    bool ok = false;
    CHECK(spin.next(cq, &tag, &ok, in_ms(10'000)) == Status::GOT_EVENT);
    CHECK(ok);
    return reinterpret_cast<intptr_t>(tag);
  }

  grpc::CompletionQueue cq;
  Spin spin;
};

TEST(every_event_comes_once_whether_it_polls_or_sleeps) {
  // Some are there already, some come at once, some late: it learns to poll, and not
  // to.
  for (const auto delay : {0us, 20us, 2000us, 20us}) {
    Queue queue;
    std::vector<grpc::Alarm> alarms(300);
    std::thread other([&] {
      for (intptr_t i = 0; i < 300; ++i) {
        if (delay > 0us) std::this_thread::sleep_for(delay);
        alarms[i].Set(&queue.cq, gpr_inf_past(GPR_CLOCK_MONOTONIC),
                      reinterpret_cast<void*>(i));
      }
    });
    std::vector<bool> seen(300);
    for (int i = 0; i < 300; ++i) {
      const int64_t event = queue.next();
      CHECK(!seen.at(event));
      seen[event] = true;
    }
    other.join();
  }
}

TEST(a_wait_ends_at_its_deadline) {
  Queue queue;
  void* tag;
  bool ok;
  for (int i = 0; i < 200; ++i) {
    const auto began = Clock::now();
    CHECK(queue.spin.next(queue.cq, &tag, &ok, in_ms(1)) == Status::TIMEOUT);
    const auto taken = Clock::now() - began;
    CHECK(taken >= 1ms);
    CHECK(taken < 5s);
  }
}

TEST(a_shutdown_ends_it) {
  for (int num_waits_before : {0, 63, 64, 65}) {
    grpc::CompletionQueue cq;
    Spin spin;
    void* tag;
    bool ok;
    for (int i = 0; i < num_waits_before; ++i) {
      CHECK(spin.next(cq, &tag, &ok, in_ms(0)) == Status::TIMEOUT);
    }
    std::thread other([&] {
      std::this_thread::sleep_for(5ms);
      cq.Shutdown();
    });
    const gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    CHECK(spin.next(cq, &tag, &ok, never) == Status::SHUTDOWN);
    other.join();
  }
}

}  // namespace
}  // namespace beast::test
