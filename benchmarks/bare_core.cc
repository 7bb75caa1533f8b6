// SPDX-License-Identifier: Apache-2.0
// The core without Python, for benchmarks/transport.py: EnvServer with an environment
// that returns one array again and again; ActorPool, DynamicBatcher and BatchingQueue
// with a model that always answers the same. What Python costs is the difference.
//
//     bare_core server unix:/tmp/env --envs 1 --row_bytes 28224
//     bare_core client unix:/tmp/env --streams 8 --seconds 2
//
// The client prints one line of JSON. The server prints its address once it listens,
// and ends when its standard input closes.

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include "actor_pool.h"
#include "env_server.h"

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kNumActions = 6;

struct Flags {
  std::string mode, address;
  std::map<std::string, double> numbers = {
      {"--envs", 1},    {"--row_bytes", 28224},  {"--streams", 1},
      {"--seconds", 2}, {"--unroll_length", 20}, {"--batch_size", 32}};

  int64_t count(const std::string& name) const {
    return static_cast<int64_t>(numbers.at(name));
  }
};

Flags parse_flags(int argc, char** argv) {
  Flags flags;
  if (argc < 3 || argc % 2 == 0) {
    throw std::invalid_argument(
        "usage: bare_core server|client ADDRESS [--NAME N] ...");
  }
  flags.mode = argv[1];
  flags.address = argv[2];
  for (int i = 3; i + 1 < argc; i += 2)
    flags.numbers.at(argv[i]) = std::stod(argv[i + 1]);
  return flags;
}

class StillEnv : public Environment {
 public:
  StillEnv(int64_t num_envs, int64_t row_bytes) : row_(num_envs * row_bytes) {
    spec_.num_envs = num_envs;
    spec_.observation.leaves = {{DType::kUInt8, {row_bytes}, 0, 0, {}, {}}};
    spec_.action.leaves = {{DType::kInt64, {}, kNumActions, 0, {}, {}}};
    spec_.description = "still";
  }
  const EnvSpec& spec() const override { return spec_; }
  void reset(EnvOutput& output) override { observe(output); }
  void step(const std::vector<const std::byte*>&, EnvOutput& output) override {
    observe(output);
  }

 private:
  void observe(EnvOutput& output) {
    std::memcpy(output.observation[0], row_.data(), row_.size());
  }

  const std::vector<std::byte> row_;
  EnvSpec spec_;
};

void run_server(const Flags& flags) {
  EnvServer::Options options;
  options.address = flags.address;
  options.make_environment = [&](uint64_t) {
    return std::make_unique<StillEnv>(flags.count("--envs"),
                                      flags.count("--row_bytes"));
  };
  EnvServer server(options);
  server.start();
  std::printf("%s\n", server.address().c_str());
  std::fflush(stdout);
  char unused_input[256];
  while (read(STDIN_FILENO, unused_input, sizeof(unused_input)) > 0) {
  }
  server.stop();
}

Nest zeros(DType dtype, const Shape& shape) {
  return {Structure::leaf(), BufferPool().allocate({{dtype, shape}})};
}

void infer(DynamicBatcher& batcher) {
  std::map<int64_t, Nest> outputs;  // By batch size.
  try {
    while (true) {
      const auto batch = batcher.next_batch();
      const int64_t B = batch->num_rows();
      auto [found, is_new] = outputs.try_emplace(B);
      if (is_new) {
        Nest action = zeros(DType::kInt64, {1, B});
        std::memset(action.leaves[0].data, 0, action.leaves[0].num_bytes());
        found->second = Nest::tuple(
            {Nest::dict({{"action", action},
                         {"policy_logits", zeros(DType::kFloat32, {1, B, kNumActions})},
                         {"baseline", zeros(DType::kFloat32, {1, B})},
                         {"policy_version", zeros(DType::kInt64, {1, B})}}),
             Nest::tuple({})});
      }
      batch->set_outputs(found->second);
    }
  } catch (const ClosedBatchingQueue&) {
  }
}

void run_client(const Flags& flags) {
  const int64_t batch_size = flags.count("--batch_size");
  BatchingQueue::Options queue_options;
  queue_options.sizes = {1, batch_size, batch_size, {}};
  queue_options.maximum_queue_size = 2 * batch_size;
  ActorPool::Options options;
  options.unroll_length = flags.count("--unroll_length");
  options.learner_queue = std::make_shared<BatchingQueue>(queue_options);
  DynamicBatcher::Options batcher_options;
  batcher_options.sizes = {1, 1, 4096, {}};
  options.inference_batcher = std::make_shared<DynamicBatcher>(batcher_options);
  options.addresses.assign(flags.count("--streams"), flags.address);
  ActorPool pool(options);
  std::thread running([&] { pool.run(); });
  std::thread answering([&] { infer(*options.inference_batcher); });
  std::thread learning([&] {
    try {
      while (true) options.learner_queue->dequeue();
    } catch (const ClosedBatchingQueue&) {
    }
  });
  // Warm up: until every rollout buffer and batch has been written to.
  const int64_t warm =
      3 * options.unroll_length * flags.count("--streams") * flags.count("--envs");
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  while (pool.count() < warm && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const int64_t before = pool.count();
  const auto start = Clock::now();
  std::this_thread::sleep_for(
      std::chrono::duration<double>(flags.numbers.at("--seconds")));
  const std::chrono::duration<double> seconds = Clock::now() - start;
  const double rows = static_cast<double>(pool.count() - before);
  options.learner_queue->close();
  options.inference_batcher->close();
  for (std::thread* thread : {&running, &answering, &learning}) thread->join();
  if (rows == 0) throw std::runtime_error("no step was made");
  std::printf("{\"rate\": %.1f}\n", rows / seconds.count());
}

}  // namespace
}  // namespace beast

int main(int argc, char** argv) {
  try {
    const beast::Flags flags = beast::parse_flags(argc, argv);
    flags.mode == "server" ? beast::run_server(flags) : beast::run_client(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bare_core: %s\n", error.what());
    return 1;
  }
  return 0;
}
