// SPDX-License-Identifier: Apache-2.0
// Tests of our own kind: TEST(states_behaviour) { CHECK(...); }. One file is one
// program; include this once in it. `queue_test close` runs the tests whose name
// contains "close". Environment: BEAST_ROUNDS is how often stress tests repeat (3),
// BEAST_LIMIT_S how long a test or a round may take before the program aborts (60).
#pragma once

#include <time.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace beast::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How soon a waiter must be free.
#ifdef BEAST_SANITIZED  // Looking up one suppression takes the thread sanitizer 5 s.
constexpr std::chrono::milliseconds kSoon{20'000};
#else
constexpr std::chrono::milliseconds kSoon{1'000};
#endif

// What the calling thread has worked, in distinction to waited.
inline std::chrono::nanoseconds cpu_time_of_this_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

inline int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

// A check that failed; thrown, so that the test ends there. Printed before, as a thread
// that is stuck may keep the test from ending.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  throw Failure(what);
}

template <class T>
std::string show(const T& value) {
  if constexpr (requires { value.str(); }) {
    return value.str();
  } else if constexpr (requires(std::ostream & out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<int64_t>(value));
  } else if constexpr (requires { value.begin(); }) {
    std::string text = "[";
    for (const auto& element : value) {
      text += (text.size() == 1 ? "" : ", ") + show(element);
    }
    return text + "]";
  } else {
    return "?";
  }
}

template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> &&
                !std::is_same_v<A, B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_equal(a, b);  // 3 and 3u, without a warning.
  } else {
    return a == b;
  }
}

template <class A, class B>
void check_equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!equal(a, b))
    fail(file, line, std::string(text) + ": " + show(a) + ", " + show(b));
}

inline void check_message(const char* file, int line, const std::string& got,
                          const std::string& part) {
  if (got.find(part) == std::string::npos) {
    fail(file, line, "expected \"" + part + "\" in the message \"" + got + "\"");
  }
}

// Aborts the program, naming the test, unless it is fed within the limit. An abort
// leaves a core, and sanitizers print the stacks.
class Watchdog {
 public:
  static Watchdog& the() {
    static Watchdog watchdog;
    return watchdog;
  }
  void feed() {
    std::lock_guard lock(mu_);
    fed_ = Clock::now();
  }
  void watch(const char* test) {  // Null: nothing runs.
    std::lock_guard lock(mu_);
    test_ = test;
    fed_ = Clock::now();
  }
  ~Watchdog() {
    {
      std::lock_guard lock(mu_);
      stop_ = true;
      changed_.notify_one();
    }
    thread_.join();
  }

 private:
  Watchdog() : thread_([this] { run(); }) {}
  void run() {
    std::unique_lock lock(mu_);
    while (!changed_.wait_for(lock, 100ms, [this] { return stop_; })) {
      if (test_ == nullptr || Clock::now() - fed_ < limit_) continue;
      std::fprintf(stderr, "FAIL %s: stuck for %lld s\n", test_,
                   static_cast<long long>(limit_.count()));
      std::abort();
    }
  }

  const std::chrono::seconds limit_{from_environment("BEAST_LIMIT_S", 60)};
  std::mutex mu_;
  std::condition_variable changed_;
  const char* test_ = nullptr;  // Guarded by mu_, as all below.
  Clock::time_point fed_;
  bool stop_ = false;
  std::thread thread_;  // Last: it uses all the others.
};

// for (int round : Rounds{}): a stress test's rounds, each with the whole time limit.
struct Rounds {
  struct Iterator {
    int round;
    int operator*() const {
      Watchdog::the().feed();
      return round;
    }
    void operator++() { ++round; }
    bool operator!=(const Iterator& other) const { return round != other.round; }
  };
  Iterator begin() const { return {0}; }
  Iterator end() const { return {from_environment("BEAST_ROUNDS", 3)}; }
};

// Runs fn in a thread; the future carries what it returns or throws and joins it.
template <class Fn>
auto in_thread(Fn fn) {
  return std::async(std::launch::async, std::move(fn));
}

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline bool run_one(const Test& test) {
  const auto begin = Clock::now();
  bool is_ok = false;
  Watchdog::the().watch(test.name);
  try {
    test.run();
    is_ok = true;
  } catch (const Failure&) {
  } catch (const std::exception& error) {
    std::fprintf(stderr, "unexpected exception: %s\n", error.what());
  }
  Watchdog::the().watch(nullptr);
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  std::printf("%s %s %.3f s\n", is_ok ? "ok  " : "FAIL", test.name, seconds.count());
  std::fflush(stdout);
  return is_ok;
}

}  // namespace beast::test

#define TEST(name)                                                                \
  static void test_##name();                                                      \
  static const beast::test::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) beast::test::fail(__FILE__, __LINE__, "not " #condition); \
  } while (false)

#define CHECK_EQ(a, b) beast::test::check_equal(__FILE__, __LINE__, #a " == " #b, a, b)

// The expression throws this type, with this text in its message.
#define CHECK_THROWS(type, expression, text)                                      \
  do {                                                                            \
    bool has_thrown = false;                                                      \
    try {                                                                         \
      static_cast<void>(expression);                                              \
    } catch (const type& error) {                                                 \
      has_thrown = true;                                                          \
      beast::test::check_message(__FILE__, __LINE__, error.what(), text);         \
    }                                                                             \
    if (!has_thrown) {                                                            \
      beast::test::fail(__FILE__, __LINE__, #expression " did not throw " #type); \
    }                                                                             \
  } while (false)

// The future is ready within kSoon.
#define CHECK_SOON(future) \
  CHECK((future).wait_for(beast::test::kSoon) == std::future_status::ready)

int main(int argc, char** argv) {
  int num_run = 0, num_failed = 0;
  for (const auto& test : beast::test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++num_run;
    if (!beast::test::run_one(test)) ++num_failed;
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_run == 0 || num_failed > 0 ? 1 : 0;
}
