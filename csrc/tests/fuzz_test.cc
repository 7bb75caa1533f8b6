// SPDX-License-Identifier: Apache-2.0
// Messages that are damaged, random, too large, too deep or out of order, each way over
// real gRPC, while honest streams of the same server or pool act on. Environment:
// BEAST_FUZZ is how many such messages are sent each way (2000), BEAST_SEED where they
// begin (1): message n of a seed is always the same.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "acting.h"
#include "check.h"
#include "envs.h"

namespace beast::test {
namespace {

using Random = std::mt19937_64;

constexpr size_t kMaxMessageBytes = 1 << 16;
constexpr int64_t kHostileStream =
    0x5a5a5a5a5a5a5a5a;  // No flipped bit makes it honest.

int num_messages() { return from_environment("BEAST_FUZZ", 2000); }
uint64_t first_seed() { return from_environment("BEAST_SEED", 1); }

// Of the numbered stream: the same in every run.
Random random_of(int64_t number) { return Random(1'000'003 * first_seed() + number); }

bool one_in(Random& random, int n) { return random() % n == 0; }

// --- Messages ---

std::string action_of(const EnvSpec& spec, Random& random) {
  chimera::ClientMessage message;
  std::string bytes;
  for (int64_t k = 0; k < spec.num_envs; ++k) {
    bytes += static_cast<char>(random() % 4);
    bytes += std::string(7, '\0');
  }
  message.mutable_action()->add_action(bytes);
  return message.SerializeAsString();
}

std::string any_noise(Random& random) {
  switch (random() % 8) {
    case 0:
      return "";
    case 1:  // Past the maximum.
      return noise(kMaxMessageBytes + 1 + random() % 100, random);
    case 2: {  // Lengths that say more than there is, inside of each other.
      std::string message = noise(random() % 10, random);
      for (int i = 0; i < 50; ++i) {
        message =
            tag(1 + random() % 5, 2) + varint(random() >> random() % 64) + message;
      }
      return message;
    }
    case 3: {  // Deep.
      std::string message;
      for (size_t i = random() % 3000; i > 0; --i) {
        message = bytes_field(1 + random() % 3, message);
      }
      return message;
    }
    case 4:
      return unknown_fields(1 + random() % 100);
    default:
      return noise(random() % 300, random);
  }
}

// What a client sends in place of a Hello, or of an Action.
std::string wrong_of_client(const EnvSpec& spec, bool is_hello, Random& random) {
  if (one_in(random, 5)) return any_noise(random);
  if (one_in(random, 10)) is_hello = !is_hello;
  if (!is_hello && one_in(random, 5)) {  // Whole, but of another size or value.
    chimera::ClientMessage message;
    for (size_t i = random() % 4; i > 0; --i) {
      message.mutable_action()->add_action(noise(random() % 4 * 8, random));
    }
    return message.SerializeAsString();
  }
  if (!is_hello) return mutate(action_of(spec, random), random);
  return mutate(encode_hello("run", one_in(random, 8), one_in(random, 2)), random);
}

// A space of any kind, within and beyond all limits.
void fill_randomly(chimera::Space& space, int depth, Random& random) {
  const int kind = static_cast<int>(random() % 16);
  if (kind == 0) return;
  if (depth > 0 && kind < 6) {
    for (size_t i = random() % 4; i > 0; --i) {
      if (kind < 3) {
        fill_randomly(*space.mutable_tuple()->add_items(), depth - 1, random);
      } else {
        auto& entry = *space.mutable_dict()->add_entries();
        entry.set_key(std::string(1 + random() % 2, static_cast<char>('a' + i)));
        fill_randomly(*entry.mutable_value(), depth - 1, random);
      }
    }
    return;
  }
  chimera::Space::Leaf& leaf = *space.mutable_leaf();
  static constexpr int64_t kDims[] = {0,       1,       2,         -1,        INT64_MAX,
                                      1 << 20, 1 << 30, INT64_MIN, 1LL << 40, 3};
  leaf.set_dtype(static_cast<chimera::DType>(static_cast<int>(random() % 302) - 1));
  if (one_in(random, 2)) leaf.set_dtype(chimera::UINT8);
  for (size_t i = random() % 8; i > 0; --i) leaf.add_shape(kDims[random() % 10]);
  if (one_in(random, 4)) leaf.set_num_values(static_cast<int64_t>(random()));
  if (one_in(random, 4)) leaf.set_start(static_cast<int64_t>(random()));
  if (one_in(random, 4)) leaf.set_low(noise(random() % 20, random));
  if (one_in(random, 4)) leaf.set_high(noise(random() % 20, random));
}

std::string wrong_welcome(const EnvSpec& spec, Random& random) {
  chimera::ServerMessage message;
  message.ParseFromString(encode_welcome(spec));
  chimera::Welcome& welcome = *message.mutable_welcome();
  chimera::Space& space =
      one_in(random, 2) ? *welcome.mutable_observation() : *welcome.mutable_action();
  static constexpr uint32_t kNumEnvs[] = {0,     2,     100,      1000,
                                          65536, 65537, 1U << 31, UINT32_MAX};
  switch (random() % 8) {
    case 0:
      return any_noise(random);
    case 1:  // Out of order.
      return one_in(random, 2) ? encode_failure(noise(random() % 20, random))
                               : step_proto(Fields(spec)).SerializeAsString();
    case 2:
    case 3:
      space.Clear();
      fill_randomly(space, 4, random);
      break;
    case 4:
      welcome.set_num_envs(kNumEnvs[random() % 8]);
      break;
    case 5: {  // Deep, and wide.
      chimera::Space* inner = &space;
      for (size_t i = random() % 40; i > 0; --i) {
        inner->Clear();
        inner = one_in(random, 2)
                    ? inner->mutable_tuple()->add_items()
                    : inner->mutable_dict()->add_entries()->mutable_value();
      }
      for (size_t i = random() % 400; i > 0; --i) {
        inner->mutable_tuple()->add_items()->mutable_leaf()->set_dtype(chimera::UINT8);
      }
      break;
    }
    default:
      return mutate(encode_welcome(spec), random);
  }
  return message.SerializeAsString();
}

Fields hostile_step(const EnvSpec& spec) {
  Fields fields(spec);
  std::memcpy(fields.observation.at(4).data(), &kHostileStream, 8);
  return fields;
}

std::string wrong_step(const EnvSpec& spec, Random& random) {
  Fields fields = hostile_step(spec);
  switch (random() % 8) {
    case 0:
      return any_noise(random);
    case 1:  // Out of order.
      return one_in(random, 2) ? encode_failure(noise(random() % 20, random))
                               : encode_welcome(spec);
    case 2:
    case 3: {  // Arrays of another length.
      auto& bytes = one_in(random, 2)
                        ? fields.observation[random() % fields.observation.size()]
                        : fields.others[random() % fields.others.size()];
      bytes.resize(random() % (3 * bytes.size() + 2));
      return step_proto(fields).SerializeAsString();
    }
    case 4: {  // Arrays too few or too many.
      chimera::ServerMessage message = step_proto(fields);
      message.mutable_step()->mutable_observation()->RemoveLast();
      for (size_t i = random() % 3; i > 0; --i) {
        message.mutable_step()->add_observation(noise(8, random));
      }
      return message.SerializeAsString();
    }
    case 5:  // Of stacked frames only the newest, which may be right.
      fields.observation.at(5).resize(spec.num_envs * 2);
      [[fallthrough]];
    default:
      return mutate(step_proto(fields).SerializeAsString(), random);
  }
}

// Whether a pool retires the stream for this Welcome, as actor_pool.h says: its version
// is another, or its environments are not like those of the other servers.
bool is_retired_for(const EnvSpec& spec, const std::string& welcome) {
  try {
    Pieces pieces(welcome);
    const EnvSpec got = decode_welcome(pieces, kMaxMessageBytes);
    spec.observation.check_same(got.observation, "");
    spec.action.check_same(got.action, "");
    return false;
  } catch (const VersionError&) {
    return true;
  } catch (const std::invalid_argument&) {
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// --- Progress ---

Run::Options honest(const std::vector<std::string>& addresses) {
  Run::Options options;
  options.pool = Run::acting(addresses);
  options.pool.max_message_bytes = kMaxMessageBytes;
  options.pool.min_backoff = std::chrono::milliseconds(0);
  options.pool.max_backoff = std::chrono::milliseconds(1);
  options.pool.max_failures = INT_MAX;
  options.pool.step_timeout = std::chrono::seconds(20);
  options.stream_limit = 1000;  // The hostile ones are far beyond.
  return options;
}

// Waits until so many messages were sent. In each second until then, more messages were
// sent and more honest rollouts were made.
void watch(const Run& run, const std::atomic<int64_t>& num_sent, int64_t limit) {
  const auto begin = Clock::now();
  int64_t sent = num_sent, rollouts = run.num_rollouts();
  auto window = begin;
  while (num_sent < limit) {
    std::this_thread::sleep_for(10ms);
    CHECK(run.running.wait_for(0s) == std::future_status::timeout);
    if (Clock::now() - window < kSoon) continue;
    CHECK(num_sent > sent);
    CHECK(run.num_rollouts() > rollouts);
    sent = num_sent;
    rollouts = run.num_rollouts();
    window = Clock::now();
    Watchdog::the().feed();
  }
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  std::printf("seed %llu: %lld messages sent in %.1f s, %lld honest rollouts\n",
              static_cast<unsigned long long>(first_seed()),
              static_cast<long long>(num_sent), seconds.count(),
              static_cast<long long>(run.num_rollouts()));
}

// --- Clients ---

// Attacks a server with one stream after the other.
class Attacker {
 public:
  Attacker(std::shared_ptr<grpc::Channel> channel, EnvSpec spec,
           std::atomic<int64_t>* next_number, std::atomic<int64_t>* num_sent)
      : channel_(std::move(channel)),
        spec_(std::move(spec)),
        next_number_(next_number),
        num_sent_(num_sent) {}

  void run() {
    const int limit = num_messages();
    while (*num_sent_ < limit) attack();
  }
  const std::map<int, int64_t>& num_by_status() const { return num_by_status_; }

 private:
  void attack() {
    Random random = random_of((*next_number_)++);
    RawStream::Options options;
    if (one_in(random, 50)) options.method = "/chimera.RpcEnv/" + std::string(3, 'x');
    if (one_in(random, 50)) options.authorization = "Bearer nonsense";
    RawStream stream(channel_, options);
    const bool is_deaf = one_in(random, 10);  // Sends on without reading.
    if (one_in(random, 2)) {
      if (!send(stream, wrong_of_client(spec_, true, random))) return end(stream);
    } else {
      const std::string hello = encode_hello("run", false, one_in(random, 2));
      if (!stream.write(hello)) return end(stream);
    }
    // Where it was taken for a Hello after all, Welcome and Step are the answer.
    if (!is_deaf && (!stream.read() || !stream.read())) return end(stream);
    for (size_t i = 1 + random() % 10; i > 0; --i) {
      const bool is_right = one_in(random, 4);
      const std::string message =
          is_right ? action_of(spec_, random) : wrong_of_client(spec_, false, random);
      if (!(is_right ? stream.write(message) : send(stream, message))) break;
      if (!is_deaf && !stream.read()) return end(stream);
    }
    if (one_in(random, 2)) return;  // Hangs up.
    stream.writes_done();
    while (stream.read()) {
    }
    end(stream);
  }

  bool send(RawStream& stream, const std::string& message) {
    if (!stream.write(message)) return false;
    ++*num_sent_;
    return true;
  }

  void end(RawStream& stream) {
    while (stream.read()) {
    }
    ++num_by_status_[stream.finish().error_code()];
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const EnvSpec spec_;
  std::atomic<int64_t>* const next_number_;
  std::atomic<int64_t>* const num_sent_;
  std::map<int, int64_t> num_by_status_;
};

// Sends bytes that are not even gRPC's.
void send_to_socket(const std::string& address, const std::string& bytes) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, address.c_str() + 5, sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  CHECK_EQ(connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  ssize_t unused_count = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  static_cast<void>(unused_count);
  close(fd);
}

TEST(a_server_serves_on_while_clients_send_garbage) {
  LogCapture log;
  TempDir dir;
  EnvServer::Options options = serving(dir.address(), {.num_envs = 2});
  options.num_threads = 2;
  options.max_message_bytes = kMaxMessageBytes;
  EnvServer server(options);
  server.start();
  Run run(honest({dir.address(), dir.address()}));
  CHECK(soon([&] { return run.num_beyond(5) == 4; }));

  std::atomic<int64_t> next_number{0}, num_sent{0};
  std::vector<std::unique_ptr<Attacker>> attackers;
  std::vector<std::future<void>> threads;
  for (int i = 0; i < 24; ++i) {
    attackers.push_back(std::make_unique<Attacker>(
        plain_channel(dir.address(), i % 6), CountingEnv::make_spec({.num_envs = 2}),
        &next_number, &num_sent));
    threads.push_back(
        in_thread([attacker = attackers.back().get()] { attacker->run(); }));
  }
  threads.push_back(in_thread([&] {
    for (int i = 0; i < 100; ++i) {
      Random random = random_of(-1 - i);
      const std::string preface =
          one_in(random, 2) ? "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" : "";
      send_to_socket(dir.address(), preface + noise(random() % 3000, random));
    }
  }));
  watch(run, num_sent, num_messages());
  for (auto& thread : threads) thread.get();
  CHECK(num_sent >= num_messages());

  std::map<int, int64_t> num_by_status;
  for (const auto& attacker : attackers) {
    for (const auto& [code, count] : attacker->num_by_status()) {
      num_by_status[code] += count;
    }
  }
  std::string text;
  for (const auto& [code, count] : num_by_status) {
    text += " " + std::to_string(code) + ":" + std::to_string(count);
  }
  std::printf("statuses%s\n", text.c_str());
  for (const auto& [code, count] : num_by_status) {
    // Whatever a client sends, it is its fault, and it is told so.
    CHECK(code == grpc::StatusCode::OK || code == grpc::StatusCode::INVALID_ARGUMENT ||
          code == grpc::StatusCode::FAILED_PRECONDITION ||
          code == grpc::StatusCode::RESOURCE_EXHAUSTED ||
          code == grpc::StatusCode::UNIMPLEMENTED);
  }
  CHECK(num_by_status[grpc::StatusCode::INVALID_ARGUMENT] > 0);
  CHECK(soon([&] { return server.num_streams() == 2; }));  // The honest ones.
  CHECK_EQ(run.pool->stats().num_restarts, 0);
  run.finish();
  server.stop();
  CHECK_EQ(CountingEnv::num_live.load(), 0);
}

// --- Servers ---

// A server whose streams begin well, or not, and end in garbage.
class HostileServer {
 public:
  explicit HostileServer(const std::string& address)
      : server_(address, [this](RawServer::Call& call) { return play(call); }) {}

  const std::atomic<int64_t>& num_sent() const { return num_sent_; }
  std::vector<std::string> welcomes_to_be_retired_for() {
    std::lock_guard lock(mu_);
    return set_aside_;
  }

 private:
  grpc::Status play(RawServer::Call& call) {
    Random random = random_of(next_number_++);
    static constexpr grpc::StatusCode kEnds[] = {
        grpc::StatusCode::OK,          grpc::StatusCode::INTERNAL,
        grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::INVALID_ARGUMENT,
        grpc::StatusCode::UNKNOWN,     grpc::StatusCode::RESOURCE_EXHAUSTED,
        grpc::StatusCode::CANCELLED,   grpc::StatusCode::DATA_LOSS};
    const grpc::Status end(kEnds[random() % 8], noise(random() % 20, random));
    if (!call.read()) return end;
    const bool is_deaf = one_in(random, 10);  // Sends on without reading.
    if (one_in(random, 2)) {
      std::string welcome = wrong_welcome(spec_, random);
      while (is_retired_for(spec_, welcome)) {
        set_aside(welcome);
        welcome = wrong_welcome(spec_, random);
      }
      if (!send(call, welcome)) return end;
    } else {
      if (!call.write(encode_welcome(spec_))) return end;
    }
    for (size_t i = 1 + random() % 10; i > 0; --i) {
      const bool is_right = one_in(random, 4);
      const std::string message =
          is_right ? step_proto(hostile_step(spec_)).SerializeAsString()
                   : wrong_step(spec_, random);
      if (!(is_right ? call.write(message) : send(call, message))) return end;
      if (!is_deaf && !call.read()) return end;  // An action, or the client is gone.
    }
    return end;
  }

  bool send(RawServer::Call& call, const std::string& message) {
    if (!call.write(message)) return false;
    ++num_sent_;
    return true;
  }

  void set_aside(const std::string& welcome) {
    std::lock_guard lock(mu_);
    if (set_aside_.size() < 100) set_aside_.push_back(welcome);
  }

  const EnvSpec spec_ = CountingEnv::make_spec({});
  std::atomic<int64_t> next_number_{0}, num_sent_{0};
  std::mutex mu_;
  std::vector<std::string> set_aside_;  // Guarded by mu_.
  RawServer server_;
};

// Whether a pool that acts with an honest server retires another one that says this,
// with an error that its users can understand, and acts on.
void check_is_retired(const EnvServer& server, const std::string& welcome) {
  TempDir dir;
  RawServer hostile(dir.address(), [&](RawServer::Call& call) {
    call.read();
    call.write(welcome);
    call.read();
    return grpc::Status::OK;
  });
  Run run(honest({server.address()}));
  CHECK(soon([&] { return run.pool->count() > 0; }));
  run.pool->add_address(dir.address());
  CHECK(soon([&] { return run.pool->stats().retired.contains(dir.address()); }));
  const std::string error = run.pool->stats().last_errors.at(dir.address());
  if (error.find("protocol version") == std::string::npos) {
    check_message(__FILE__, __LINE__, error, "the environment at " + dir.address());
  }
  const int64_t num_rollouts = run.num_rollouts();
  CHECK(soon([&] { return run.num_rollouts() > num_rollouts; }));
  run.finish();
}

TEST(a_pool_acts_on_while_servers_send_garbage) {
  LogCapture log;
  TempDir dir;
  EnvServer server(serving(dir.address("honest")));
  server.start();
  HostileServer hostile(dir.address("hostile"));
  {
    Run run(honest({server.address(), server.address()}));
    CHECK(soon([&] { return run.num_beyond(5) == 2; }));
    for (int i = 0; i < 32; ++i) run.pool->add_address(dir.address("hostile"));
    watch(run, hostile.num_sent(), num_messages());
    CHECK(hostile.num_sent() >= num_messages());
    CHECK_EQ(server.num_streams(), 2);
    CHECK_EQ(run.num_beyond(5), 2);  // The same two streams all the time.
    const ActorPool::Stats stats = run.pool->stats();
    std::printf("%lld restarts\n", static_cast<long long>(stats.num_restarts));
    run.finish();
  }
  const std::vector<std::string> others = hostile.welcomes_to_be_retired_for();
  CHECK(!others.empty());
  for (const std::string& welcome : others) {
    Watchdog::the().feed();
    check_is_retired(server, welcome);
  }
}

}  // namespace
}  // namespace beast::test
