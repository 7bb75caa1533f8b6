// SPDX-License-Identifier: Apache-2.0
// A thousand streams from this process to another, all of which make progress all the
// time. Environment: BEAST_STREAMS is how many (1000), BEAST_SECONDS how long (3; each
// stream advances in every window of 5 s, or of the whole time if that is shorter).

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "acting.h"
#include "check.h"
#include "envs.h"

namespace beast::test {
namespace {

// Of the client, with the five of this test. gRPC starts threads of its own where work
// piles up, which it does under the sanitizers: what is promised is for users' builds.
#ifdef BEAST_SANITIZED
constexpr int64_t kMaxThreads = 30;
#else
constexpr int64_t kMaxThreads = 20;
#endif

// A number of /proc/PID/status, such as Threads, or VmRSS in KiB.
int64_t status_of(pid_t pid, const std::string& key) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::atoll(line.c_str() + key.size() + 1);
  }
  fail(__FILE__, __LINE__, "no " + key + " of process " + std::to_string(pid));
}

// This program again, as the server: TEST(the_server). Ends with its standard input.
class ServerProcess {
 public:
  explicit ServerProcess(const std::string& address) {
    int ends[2];
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
    const std::string setting = "BEAST_SERVE=" + address;
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      environment.push_back(*entry);
    }
    environment.push_back(const_cast<char*>(setting.c_str()));
    environment.push_back(nullptr);
    char* arguments[] = {const_cast<char*>("many_streams_test"),
                         const_cast<char*>("the_server"), nullptr};
    CHECK_EQ(posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments,
                         environment.data()),
             0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
    stdin_ = ends[1];
  }
  ~ServerProcess() {
    if (stdin_ >= 0) end();
  }
  int end() {  // Its exit status.
    close(std::exchange(stdin_, -1));
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  int stdin_ = -1;
};

void allow_many_files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(the_server) {
  const char* address = std::getenv("BEAST_SERVE");
  if (address == nullptr) return;  // Nobody asked for it.
  allow_many_files();
  LogCapture log;
  EnvServer::Options options = serving(address);
  options.num_threads = 2;
  EnvServer server(options);
  server.start();
  pollfd input{STDIN_FILENO, POLLIN, 0};
  while (poll(&input, 1, 1000) == 0) Watchdog::the().feed();
  server.stop(30s);
}

// Answers, and counts what each stream does.
class CountingAgent {
 public:
  CountingAgent(std::shared_ptr<DynamicBatcher> batcher, int64_t num_streams)
      : batcher_(std::move(batcher)), frames_(num_streams, -1) {}

  void run() {
    try {
      while (true) {
        auto batch = batcher_->next_batch();
        count(batch->inputs().at(0).at("observation"));
        batch->set_outputs(answer(batch->inputs()));
      }
    } catch (const ClosedBatchingQueue&) {
    }
  }
  std::vector<int64_t> frames() const {  // That each stream is at; -1: none yet.
    std::lock_guard lock(mu_);
    return frames_;
  }

 private:
  void count(const Nest& observation) {
    std::lock_guard lock(mu_);
    const int64_t num_rows = observation.leaves[0].shape[1];
    const auto* frame = data_of<int64_t>(observation.at("frame"));
    const auto* stream = data_of<int64_t>(observation.at("stream"));
    for (int64_t i = 0; i < num_rows; ++i) {
      int64_t& last = frames_.at(stream[i]);
      CHECK_EQ(frame[i], last + 1);  // Each once, in order, and no stream breaks.
      last = frame[i];
    }
  }

  const std::shared_ptr<DynamicBatcher> batcher_;
  mutable std::mutex mu_;
  std::vector<int64_t> frames_;  // Guarded by mu_.
};

void report(const char* when, pid_t server) {
  std::printf("%s: client %lld threads, %lld MiB; server %lld threads, %lld MiB\n",
              when, static_cast<long long>(status_of(getpid(), "Threads")),
              static_cast<long long>(status_of(getpid(), "VmRSS") / 1024),
              static_cast<long long>(status_of(server, "Threads")),
              static_cast<long long>(status_of(server, "VmRSS") / 1024));
  std::fflush(stdout);
}

TEST(all_of_a_thousand_streams_make_progress_all_the_time) {
  const int num_streams = from_environment("BEAST_STREAMS", 1000);
  const int num_seconds = from_environment("BEAST_SECONDS", 3);
  const int window = std::min(num_seconds, 5);
  allow_many_files();
  TempDir dir;
  ServerProcess server(dir.address());  // Before gRPC has threads here.

  BatchingQueue::Options queue_options;
  queue_options.sizes = {1, 32, 32, {}};
  queue_options.maximum_queue_size = 64;
  auto queue = std::make_shared<BatchingQueue>(queue_options);
  DynamicBatcher::Options batcher_options;
  batcher_options.sizes = {1, 1, 4096, {}};
  auto batcher = std::make_shared<DynamicBatcher>(batcher_options);
  ActorPool::Options options =
      Run::acting(std::vector<std::string>(num_streams, dir.address()), 20);
  options.learner_queue = queue;
  options.inference_batcher = batcher;
  options.initial_agent_state = Nest::tuple({new_array(DType::kInt64, {1, 1, 1})});
  LogCapture log;
  ActorPool pool(options);
  CountingAgent agent(batcher, num_streams);
  auto running = in_thread([&] { pool.run(); });
  auto answering = in_thread([&] { agent.run(); });
  auto learning = in_thread([&] {
    try {
      while (true) queue->dequeue();
    } catch (const ClosedBatchingQueue&) {
    }
  });
  struct Closer {
    BatchingQueue& queue;
    DynamicBatcher& batcher;
    ~Closer() {
      queue.close();
      batcher.close();
    }
  } closer{*queue, *batcher};

  CHECK(soon([&] { return std::ranges::min(agent.frames()) >= 0; }, 50s));
  report("start", server.pid());
  const auto begin = Clock::now();
  const int64_t steps_before = pool.count();
  int64_t fewest = INT64_MAX;
  for (int second = 0; second < num_seconds; second += window) {
    const std::vector<int64_t> before = agent.frames();
    std::this_thread::sleep_for(std::chrono::seconds(window));
    const std::vector<int64_t> after = agent.frames();
    for (int i = 0; i < num_streams; ++i) {
      CHECK(after[i] > before[i]);
      fewest = std::min(fewest, after[i] - before[i]);
    }
    CHECK(status_of(getpid(), "Threads") < kMaxThreads);
    CHECK(running.wait_for(0s) == std::future_status::timeout);
    Watchdog::the().feed();
  }
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  report("end", server.pid());
  const std::vector<int64_t> frames = agent.frames();
  std::printf(
      "%d streams, %.0f s, %.0f steps/s; fewest steps of a stream in %d s: %lld; "
      "steps of each stream: %lld to %lld\n",
      num_streams, seconds.count(), (pool.count() - steps_before) / seconds.count(),
      window, static_cast<long long>(fewest),
      static_cast<long long>(std::ranges::min(frames)),
      static_cast<long long>(std::ranges::max(frames)));
  CHECK_EQ(pool.stats().num_restarts, 0);
  pool.stop();
  CHECK_SOON(running);
  running.get();
  queue->close();
  batcher->close();
  answering.get();
  learning.get();
  CHECK_EQ(server.end(), 0);
}

}  // namespace
}  // namespace beast::test
