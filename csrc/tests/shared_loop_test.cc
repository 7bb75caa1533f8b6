// SPDX-License-Identifier: Apache-2.0
#include "atari/shared_loop.h"

#include "check.h"

namespace beast::test {
namespace {

using atari::SharedLoop;

TEST(every_index_is_called_once_by_any_number_of_threads) {
  for (const int num_threads : {1, 2, 4, 9}) {
    SharedLoop loop(num_threads, 7);
    CHECK(loop.num_threads() == std::min(num_threads, 7));
    std::vector<int> calls(7);  // Not atomic: each belongs to one thread at a time.
    for (int round = 1; round <= 200; ++round) {
      if (round % 3 == 0) {
        loop.start([&](int, int i) { ++calls[i]; });
        loop.wait();
      } else {
        loop.run([&](int, int i) { ++calls[i]; });
      }
      CHECK(calls == std::vector<int>(7, round));
    }
  }
}

TEST(a_thread_that_is_done_helps_the_others) {
  SharedLoop loop(2, 4);
  std::vector<int> thread_of(4, -1);
  std::atomic<int> num_done{0};
  // The first of the caller's share waits for all the others to be done.
  loop.run([&](int thread, int i) {
    thread_of[i] = thread;
    while (i == 0 && num_done < 3) std::this_thread::yield();
    ++num_done;
  });
  CHECK(thread_of[0] != thread_of[1]);
}

TEST(threads_of_a_loop_that_was_never_used_end) {
  const SharedLoop loop(4, 100);
  CHECK(loop.num_threads() == 4);
}

TEST(an_end_during_a_round_waits_for_it) {
  std::atomic<int> num_done{0};
  {
    SharedLoop loop(2, 8);
    loop.start([&](int, int) {
      std::this_thread::sleep_for(1ms);
      ++num_done;
    });
    loop.wait();
  }
  CHECK(num_done == 8);
}

}  // namespace
}  // namespace beast::test
