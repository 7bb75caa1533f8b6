// SPDX-License-Identifier: Apache-2.0
#include "env_server.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "envs.h"
#include "probe.h"

namespace beast::test {
namespace {

using Status = grpc::StatusCode;
using Ints = std::vector<int64_t>;

constexpr char kHealth[] = "/grpc.health.v1.Health/Check";

// An Action with this value for each environment.
std::string action(const Ints& values) {
  std::string bytes;
  for (int64_t value : values) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  chimera::ClientMessage message;
  message.mutable_action()->add_action(bytes);
  return message.SerializeAsString();
}

// What environment k says in a step.
struct Row {
  int64_t frame, heard, stream;
  bool odd, even;
  float reward;
  bool terminated, truncated, first;
  float episode_return;
  int32_t episode_step;
  bool operator==(const Row&) const = default;
  std::string str() const {
    std::ostringstream out;
    out << "frame=" << frame << " heard=" << heard << " stream=" << stream
        << " odd=" << odd << " even=" << even << " reward=" << reward
        << " terminated=" << terminated << " truncated=" << truncated
        << " first=" << first << " return=" << episode_return
        << " step=" << episode_step;
    return out.str();
  }
};

template <class T>
T at(const std::vector<std::byte>& bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

std::vector<Row> rows_of(const EnvSpec& spec, const std::string& message) {
  Fields fields(spec);
  Pieces pieces(message);
  decode_step(pieces, fields.view());
  std::vector<Row> rows;
  for (int64_t k = 0; k < spec.num_envs; ++k) {
    CHECK_EQ(at<int64_t>(fields.observation[0], k), k);
    rows.push_back(
        {at<int64_t>(fields.observation[2], k), at<int64_t>(fields.observation[3], k),
         at<int64_t>(fields.observation[4], k), at<bool>(fields.observation[1], 2 * k),
         at<bool>(fields.observation[1], 2 * k + 1), at<float>(fields.others[0], k),
         at<bool>(fields.others[1], k), at<bool>(fields.others[2], k),
         at<bool>(fields.others[3], k), at<float>(fields.others[4], k),
         at<int32_t>(fields.others[5], k)});
  }
  return rows;
}

// A stream that knows how to behave.
class Client : public RawStream {
 public:
  using RawStream::RawStream;

  // Through the handshake; what the first step says.
  std::vector<Row> begin() {
    CHECK(write(encode_hello("test")));
    auto message = read();
    if (!message) fail(__FILE__, __LINE__, "no Welcome: " + finish().error_message());
    Pieces pieces(*message);
    spec_ = decode_welcome(pieces, 1 << 20);
    return next();
  }
  std::vector<Row> step(const Ints& values) {
    CHECK(write(action(values)));
    return next();
  }
  std::vector<Row> step(int64_t value = 0) { return step(Ints(spec_.num_envs, value)); }
  const EnvSpec& spec() const { return spec_; }

 private:
  std::vector<Row> next() {
    auto message = read();
    if (!message) fail(__FILE__, __LINE__, "no Step: " + finish().error_message());
    return rows_of(spec_, *message);
  }

  EnvSpec spec_;
};

// What the server says to this first message, or to this one after the handshake.
grpc::Status status_after(RawStream& stream, const std::string& message) {
  stream.write(message);
  while (stream.read()) {
  }
  return stream.finish();
}

grpc::Status status_of_hello(const std::string& address, const std::string& message) {
  RawStream stream(address);
  return status_after(stream, message);
}

grpc::Status status_of_action(const std::string& address, const std::string& message) {
  Client client(address);
  client.begin();
  return status_after(client, message);
}

void check_status(const char* file, int line, const grpc::Status& status, Status code,
                  const std::string& text) {
  if (status.error_code() != code) {
    fail(file, line,
         "status " + std::to_string(status.error_code()) + ": " +
             status.error_message());
  }
  check_message(file, line, status.error_message(), text);
}
#define CHECK_STATUS(status, code, text) \
  check_status(__FILE__, __LINE__, status, code, text)

struct Server {
  explicit Server(CountingEnv::Options options = {}) : Server(serving("", options)) {}
  explicit Server(EnvServer::Options options) {
    if (options.address.empty()) options.address = dir.address();
    server.emplace(std::move(options));
    server->start();
  }
  std::string address() const { return server->address(); }

  LogCapture log;
  TempDir dir;
  std::optional<EnvServer> server;
};

// --- Steps ---

TEST(rows_are_in_lockstep_and_count_their_episodes) {
  for (int64_t num_envs : {1, 3}) {
    Server server({.num_envs = num_envs, .length = 4});
    Client client(server.address());
    std::vector<Row> rows = client.begin();
    CHECK_EQ(client.spec().num_envs, num_envs);
    CHECK_EQ(client.spec().description, "Counting");
    std::vector<Row> expected(num_envs,
                              Row{0, -1, 0, false, true, 0, false, false, true, 0, 0});
    Ints num_episodes(num_envs);
    for (int64_t frame = 0; frame < 40; ++frame) {
      CHECK_EQ(rows.size(), expected.size());
      for (int64_t k = 0; k < num_envs; ++k) CHECK_EQ(rows[k], expected[k]);
      Ints actions;
      for (int64_t k = 0; k < num_envs; ++k) actions.push_back((frame + k) % 4);
      for (int64_t k = 0; k < num_envs; ++k) {
        Row& row = expected[k];
        const bool is_new = row.terminated || row.truncated;
        row.frame = frame + 1;
        row.heard = actions[k];
        std::swap(row.odd, row.even);
        row.first = is_new;
        row.reward = is_new ? 0 : static_cast<float>(actions[k]);
        row.episode_return = is_new ? 0 : row.episode_return + row.reward;
        row.episode_step = is_new ? 0 : row.episode_step + 1;
        const bool ends = row.episode_step == 4 + k;
        row.terminated = ends && num_episodes[k] % 2 == 0;
        row.truncated = ends && num_episodes[k] % 2 == 1;
        num_episodes[k] += ends;
      }
      rows = client.step(actions);
    }
  }
}

TEST(every_stream_has_environments_of_its_own_while_it_lives) {
  Server server;
  const auto channel = plain_channel(server.address());
  {
    std::vector<std::unique_ptr<Client>> clients;
    for (int64_t i = 0; i < 20; ++i) {
      clients.push_back(std::make_unique<Client>(channel));
      CHECK_EQ(clients[i]->begin()[0].stream, i);
      CHECK_EQ(CountingEnv::num_live.load(), i + 1);
    }
    CHECK_EQ(server.server->num_streams(), 20);
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t frame = 1; frame <= i; ++frame) {
        CHECK_EQ(clients[i]->step()[0].frame, frame);
      }
    }
  }
  CHECK(soon([&] { return server.server->num_streams() == 0; }));
  CHECK(soon([] { return CountingEnv::num_live == 0; }));
  CHECK_EQ(Client(channel).begin()[0].stream, 20);
}

TEST(a_client_that_is_done_gets_ok_and_its_environment_is_gone) {
  Server server;
  Client client(server.address());
  client.begin();
  client.writes_done();
  CHECK(!client.read());
  CHECK_STATUS(client.finish(), Status::OK, "");
  CHECK(soon([] { return CountingEnv::num_live == 0; }));

  RawStream silent(server.address());  // Not even a Hello.
  silent.writes_done();
  CHECK(!silent.read());
  CHECK_STATUS(silent.finish(), Status::OK, "");
}

TEST(slow_environments_do_not_hold_up_more_than_their_thread) {
  auto gate = std::make_shared<Gate>();
  EnvServer::Options options = serving("", {});
  options.num_threads = 2;
  options.make_environment = [gate](uint64_t stream) {
    return std::make_unique<CountingEnv>(
        CountingEnv::Options{.wait_at = stream == 0 ? 1 : -1, .gate = gate}, stream);
  };
  Server server(options);
  const auto channel = plain_channel(server.address());
  Client slow(channel);
  slow.begin();
  CHECK(slow.write(action({0})));
  gate->await_waiting(1);
  Client quick(channel);
  quick.begin();
  for (int64_t frame = 1; frame <= 100; ++frame) CHECK_EQ(quick.step()[0].frame, frame);
  gate->open();
  CHECK_EQ(rows_of(slow.spec(), slow.read().value())[0].frame, 1);
}

TEST(many_streams_share_a_few_threads) {
  for (int num_threads : {1, 4}) {
    EnvServer::Options options = serving("", {.num_envs = 2});
    options.num_threads = num_threads;
    Server server(options);
    std::vector<std::future<void>> clients;
    for (int i = 0; i < 8; ++i) {
      clients.push_back(in_thread([&server, i] {
        Client client(plain_channel(server.address(), i % 3));
        client.begin();
        for (int64_t frame = 1; frame <= 200; ++frame) {
          const std::vector<Row> rows = client.step(frame % 4);
          for (const Row& row : rows) {
            CHECK_EQ(row.frame, frame);
            CHECK_EQ(row.heard, frame % 4);
          }
        }
      }));
    }
    for (auto& client : clients) client.get();
  }
}

TEST(who_takes_it_gets_only_the_newest_of_stacked_frames) {
  for (int64_t num_envs : {1, 3}) {
    const EnvSpec spec = CountingEnv::make_spec({.num_envs = num_envs});
    const size_t num_bytes = step_message(spec).num_bytes();
    const size_t num_newest = step_message(spec, /*newest=*/true).num_bytes();
    CHECK(num_newest < num_bytes);
    Server server({.num_envs = num_envs, .length = 4});
    RawStream plain(server.address()), newest(server.address());
    CHECK(plain.write(encode_hello("test")));
    CHECK(newest.write(encode_hello("test", false, /*takes_newest=*/true)));
    CHECK_EQ(plain.read().value(), newest.read().value());  // Welcome.
    Fields before(spec);
    int64_t num_small = 0;
    for (int64_t frame = 0; frame < 100; ++frame) {
      const std::string whole = plain.read().value(), message = newest.read().value();
      CHECK_EQ(whole.size(), num_bytes);
      bool is_first = false;  // Of any of the environments.
      for (const Row& row : rows_of(spec, whole)) is_first |= row.first;
      CHECK_EQ(message.size(), is_first ? num_bytes : num_newest);
      num_small += !is_first;

      Fields expected(spec), fields(spec);
      Pieces whole_pieces(whole), pieces(message);
      decode_step(whole_pieces, expected.view());
      StepView view = fields.view();
      view.observation[5].images = {static_cast<size_t>(num_envs), CountingEnv::kWindow,
                                    1, false, before.observation[5].data()};
      decode_step(pieces, view);
      before = fields;
      for (Fields* each : {&expected, &fields}) {  // What is each stream's own.
        std::ranges::fill(each->observation[4], std::byte{0});
        std::ranges::fill(each->others[6], std::byte{0});
      }
      CHECK(fields == expected);
      for (RawStream* stream : {&plain, &newest}) {
        CHECK(stream->write(action(Ints(num_envs, frame % 4))));
      }
    }
    CHECK(num_small > 40);
  }
}

// --- Failures ---

TEST(what_an_environment_raises_reaches_the_client) {
  for (int64_t raise_at : {0, 1, 3}) {
    Server server({.raise_at = raise_at});
    Client client(server.address());
    if (raise_at == 0) {
      client.write(encode_hello("test"));
      client.read();
    } else {
      client.begin();
      for (int64_t frame = 1; frame < raise_at; ++frame) client.step();
      client.write(action({0}));
    }
    Pieces message(client.read().value());
    Fields fields(CountingEnv::make_spec({}));
    CHECK_THROWS(ServerFailure, decode_step(message, fields.view()),
                 "the dice\nfell off the table");
    CHECK(!client.read());
    CHECK_STATUS(client.finish(), Status::INTERNAL, "the dice");
    CHECK(soon([] { return CountingEnv::num_live == 0; }));
    check_message(__FILE__, __LINE__, server.log.text(), "fell off the table");
  }
}

TEST(an_environment_that_cannot_be_made_reaches_the_client) {
  EnvServer::Options options = serving("");
  options.make_environment = [](uint64_t stream) -> std::unique_ptr<Environment> {
    if (stream == 0) throw std::invalid_argument("no such game\ndetails");
    return std::make_unique<CountingEnv>(CountingEnv::Options{}, stream);
  };
  Server server(options);
  RawStream stream(server.address());
  CHECK(stream.write(encode_hello("test")));
  Pieces message(stream.read().value());
  CHECK_THROWS(ServerFailure, decode_welcome(message, 1 << 20),
               "no such game\ndetails");
  CHECK_STATUS(stream.finish(), Status::INTERNAL, "no such game");
  CHECK_EQ(Client(server.address()).begin()[0].frame, 0);  // The server goes on.
}

TEST(anything_may_be_thrown) {
  EnvServer::Options options = serving("");
  options.make_environment = [](uint64_t stream) -> std::unique_ptr<Environment> {
    if (stream == 0) throw 42;
    if (stream == 1) return nullptr;
    if (stream == 2) throw std::runtime_error("");
    if (stream == 3) throw std::runtime_error("\xff\xfe");
    if (stream == 4) throw std::runtime_error(std::string(3 << 20, 'x'));
    return std::make_unique<CountingEnv>(CountingEnv::Options{}, stream);
  };
  options.max_message_bytes = 1 << 20;
  Server server(options);
  for (int i = 0; i < 4; ++i) {
    RawStream stream(server.address());
    CHECK(stream.write(encode_hello("test")));
    Pieces message(stream.read().value());
    CHECK_THROWS(ServerFailure, decode_welcome(message, 1 << 20), "");
    CHECK_STATUS(stream.finish(), Status::INTERNAL, "");
  }
  // A text that no message holds may come shorter; it ends the stream in any case.
  const grpc::Status status = status_of_hello(server.address(), encode_hello("test"));
  CHECK(!status.ok());
  CHECK_EQ(Client(server.address()).begin()[0].frame, 0);
}

TEST(an_environment_that_is_too_large_for_a_message_is_refused) {
  EnvServer::Options options = serving("", {.num_envs = 1000});
  options.max_message_bytes = 10'000;
  Server server(options);
  RawStream stream(server.address());
  CHECK(stream.write(encode_hello("test")));
  Pieces message(stream.read().value());
  CHECK_THROWS(ServerFailure, decode_welcome(message, 1 << 20),
               "more than max_message_bytes=10000; pass a smaller --envs_per_server");
}

// --- What clients may not do ---

TEST(who_only_asks_for_the_spec_leaves_its_environment_to_the_next) {
  EnvServer::Options options = serving("127.0.0.1:0");
  std::atomic<int> num_made{0};
  options.make_environment = [&, make = options.make_environment](uint64_t stream) {
    ++num_made;
    return make(stream);
  };
  {
    EnvServer server(options);
    server.start();
    for (int i = 0; i < 2; ++i) {
      RawStream asker(server.address());
      CHECK(asker.write(encode_hello("asks", /*only_spec=*/true)));
      Pieces welcome(asker.read().value());
      CHECK_EQ(decode_welcome(welcome, 1 << 20).num_envs, 1);
      CHECK(!asker.read());
      CHECK_STATUS(asker.finish(), Status::OK, "");
    }
    CHECK(soon([&] { return server.num_streams() == 0; }));
    CHECK_EQ(num_made, 1);
    Client first(server.address()), second(server.address());
    CHECK_EQ(first.begin()[0].stream, 0);
    CHECK_EQ(second.begin()[0].stream, 1);
    CHECK_EQ(num_made, 2);
    RawStream asker(server.address());
    CHECK(asker.write(encode_hello("asks", /*only_spec=*/true)));
    CHECK(asker.read());
    CHECK_EQ(num_made, 3);
  }
  CHECK_EQ(CountingEnv::num_live, 0);  // Also the one that nobody took.
}

TEST(only_hello_of_this_version_begins_a_stream) {
  Server server;
  const std::string address = server.address();
  chimera::ClientMessage other;
  other.mutable_hello()->set_protocol_version(2);
  CHECK_STATUS(status_of_hello(address, other.SerializeAsString()),
               Status::FAILED_PRECONDITION, "version 2, this side 1");
  for (const std::string& message : {std::string(), action({0}), std::string("garbage"),
                                     encode_failure("a"), std::string(1000, '\xff')}) {
    CHECK(!status_of_hello(address, message).ok());
  }
  CHECK_STATUS(status_of_hello(address, "garbage"), Status::INVALID_ARGUMENT, "Hello");
  CHECK_EQ(CountingEnv::num_live.load(), 0);
}

TEST(only_actions_of_the_space_are_taken) {
  Server server({.num_envs = 2, .num_actions = 4});
  const std::string address = server.address();
  for (const Ints& wrong : std::vector<Ints>{
           {-1, 0}, {0, 4}, {0, INT64_MAX}, {INT64_MIN, 0}, {0, INT64_MIN + 2}}) {
    CHECK_STATUS(status_of_action(address, action(wrong)), Status::INVALID_ARGUMENT,
                 "is not one of 0 to 3");
  }
  for (const std::string& message :
       {std::string(), action({}), action({0}), action({0, 0, 0}), encode_hello("test"),
        action({0, 0}) + action({0, 0}), action({0, 0}).substr(0, 10),
        std::string("garbage")}) {
    CHECK_STATUS(status_of_action(address, message), Status::INVALID_ARGUMENT, "");
  }
  CHECK(soon([] { return CountingEnv::num_live == 0; }));
}

TEST(messages_past_the_maximum_are_not_taken) {
  EnvServer::Options options = serving("");
  options.max_message_bytes = 5000;
  Server server(options);
  const std::string address = server.address();
  CHECK_STATUS(status_of_hello(address, encode_hello(std::string(5000, 'x'))),
               Status::RESOURCE_EXHAUSTED, "");
  CHECK_STATUS(status_of_action(address, std::string(1 << 20, 'x')),
               Status::RESOURCE_EXHAUSTED, "");
  CHECK_EQ(Client(address).begin()[0].frame, 0);
}

TEST(other_methods_are_refused) {
  Server server;
  for (const char* method : {"/chimera.RpcEnv/stream", "/chimera.RpcEnv/", "/x", "/"}) {
    RawStream stream(plain_channel(server.address()), {.method = method});
    CHECK_STATUS(status_after(stream, encode_hello("test")), Status::UNIMPLEMENTED, "");
  }
  CHECK_EQ(CountingEnv::num_live.load(), 0);
}

TEST(a_server_says_that_it_is_healthy) {
  Server server;
  RawStream stream(plain_channel(server.address()), {.method = kHealth});
  stream.write("");  // Fails where the answer was quicker: it does not wait for this.
  CHECK_EQ(stream.read().value(), "\x08\x01");  // SERVING
  CHECK_STATUS(stream.finish(), Status::OK, "");
}

TEST(without_the_token_nothing_is_served) {
  EnvServer::Options options = serving("");
  options.security.token = "secret";
  Server server(options);
  const auto channel = plain_channel(server.address());
  for (const char* wrong : {"", "secret", "Bearer", "Bearer ", "Bearer secre",
                            "Bearer secrets", "bearer secret", "Basic secret"}) {
    RawStream stream(channel, {.authorization = wrong});
    const grpc::Status status = status_after(stream, encode_hello("test"));
    CHECK_STATUS(status, Status::UNAUTHENTICATED, "wants a token");
    CHECK(status.error_message().find("secret") == std::string::npos);
  }
  CHECK_EQ(CountingEnv::num_live.load(), 0);
  Client client(channel, {.authorization = "Bearer secret"});
  CHECK_EQ(client.begin()[0].frame, 0);
}

TEST(more_streams_than_the_maximum_are_refused_until_there_is_room) {
  EnvServer::Options options = serving("");
  options.max_streams = 3;
  Server server(options);
  const auto channel = plain_channel(server.address());
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<Client>(channel));
    clients.back()->begin();
  }
  for (int i = 0; i < 20; ++i) {
    RawStream refused(channel);
    CHECK_STATUS(status_after(refused, encode_hello("test")),
                 Status::RESOURCE_EXHAUSTED, "max_streams=3");
  }
  for (auto& client : clients) client->step();
  clients.pop_back();
  CHECK(soon([&] { return server.server->num_streams() == 2; }));
  Client client(channel);
  CHECK_EQ(client.begin()[0].frame, 0);
}

TEST(silent_calls_do_not_keep_out_who_has_the_token) {
  EnvServer::Options options = serving("");
  options.security.token = "secret";
  options.max_streams = 2;
  Server server(options);
  std::vector<std::unique_ptr<RawStream>> silent;
  for (int i = 0; i < 100; ++i) {
    const char* method = i % 3 == 0 ? kHealth : i % 3 == 1 ? kStreamMethod : "/x";
    silent.push_back(std::make_unique<RawStream>(plain_channel(server.address(), i % 5),
                                                 RawStream::Options{.method = method}));
  }
  const auto channel = plain_channel(server.address());
  Client one(channel, {.authorization = "Bearer secret"});
  one.begin();
  Client two(channel, {.authorization = "Bearer secret"});
  two.begin();
  CHECK_EQ(server.server->num_streams(), 2);
  Client three(channel, {.authorization = "Bearer secret"});
  CHECK_STATUS(status_after(three, encode_hello("test")), Status::RESOURCE_EXHAUSTED,
               "max_streams=2");
}

TEST(calls_without_a_hello_are_no_streams_and_end) {
  for (const char* token : {"", "secret"}) {
    EnvServer::Options options = serving("");
    options.security.token = token;
    options.max_streams = 2;
    options.handshake_timeout = 300ms;
    Server server(options);
    const std::string authorization = *token ? "Bearer secret" : "";
    const auto channel = plain_channel(server.address());
    std::vector<std::unique_ptr<RawStream>> silent;
    for (int i = 0; i < 5; ++i) {
      silent.push_back(std::make_unique<RawStream>(
          channel, RawStream::Options{.authorization = authorization}));
    }
    Client client(channel, {.authorization = authorization});
    client.begin();
    CHECK_EQ(server.server->num_streams(), 1);
    for (auto& stream : silent) {
      CHECK(!stream->read());
      CHECK_STATUS(stream->finish(), Status::DEADLINE_EXCEEDED,
                   "no Hello within 0.3 s");
    }
    client.step();  // What is a stream may take its time.
  }
}

TEST(a_hello_is_not_late_where_the_server_had_no_time_to_read_it) {
  auto gate = std::make_shared<Gate>();
  EnvServer::Options options = serving("", {.wait_at = 1, .gate = gate});
  options.handshake_timeout = 100ms;
  Server server(options);
  const auto channel = plain_channel(server.address());
  Client slow(channel);
  slow.begin();
  CHECK(slow.write(action({0})));
  gate->await_waiting(1);
  Client other(channel);
  CHECK(other.write(encode_hello("test")));
  std::this_thread::sleep_for(500ms);  // Several times its deadline.
  gate->open();
  CHECK(other.read().has_value());
}

TEST(of_too_many_silent_calls_the_oldest_is_cancelled) {
  EnvServer::Options options = serving("");
  options.max_streams = 3;
  Server server(options);
  const int limit = 3 + EnvServer::kMaxPending;
  std::vector<std::unique_ptr<RawStream>> silent;
  for (int i = 0; i < 2 * limit; ++i) {
    silent.push_back(
        std::make_unique<RawStream>(plain_channel(server.address(), i % 7)));
  }
  Client client(plain_channel(server.address(), 7));
  client.begin();
  CHECK(!silent[0]->read());
  CHECK_STATUS(silent[0]->finish(), Status::CANCELLED, "");
  // The newest may still begin.
  CHECK(silent.back()->write(encode_hello("test")));
  CHECK(silent.back()->read().has_value());
}

// A connection that speaks HTTP/2 as no gRPC client would.
class RawConnection {
 public:
  explicit RawConnection(const std::string& address)
      : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::strncpy(name.sun_path, address.c_str() + 5, sizeof(name.sun_path) - 1);
    CHECK_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
    const timeval limit{5, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~RawConnection() { close(fd_); }
  void send_bytes(const std::string& bytes) {
    CHECK_EQ(send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), bytes.size());
  }
  void send_frame(char type, char flags, char stream, const std::string& payload) {
    const auto size = static_cast<char>(payload.size());
    send_bytes(std::string({0, 0, size, type, flags, 0, 0, 0, stream}) + payload);
  }
  // The type of the next frame; nothing at the end or after 5 s.
  std::optional<int> next_frame() {
    const std::string head = receive(9);
    if (head.size() < 9) return std::nullopt;
    receive((static_cast<uint8_t>(head[0]) << 16) +
            (static_cast<uint8_t>(head[1]) << 8) + static_cast<uint8_t>(head[2]));
    return head[3];
  }

 private:
  std::string receive(size_t size) {
    std::string bytes(size, 0);
    size_t got = 0;
    while (got < size) {
      const ssize_t n = recv(fd_, bytes.data() + got, size - got, 0);
      if (n <= 0) break;
      got += n;
    }
    return bytes.substr(0, got);
  }
  const int fd_;
};

TEST(who_does_not_take_the_answer_is_cancelled) {
  EnvServer::Options options = serving("");
  options.handshake_timeout = 200ms;
  Server server(options);
  RawConnection connection(server.address());
  connection.send_bytes("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  // A window of no bytes: the server may not send a message.
  connection.send_frame(4, 0, 0, std::string({0, 4, 0, 0, 0, 0}));
  std::string headers;
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {":method", "POST"},
           {":scheme", "http"},
           {":path", kHealth},
           {":authority", "localhost"},
           {"te", "trailers"},
           {"content-type", "application/grpc"}}) {
    headers += '\0' + std::string(1, static_cast<char>(name.size())) + name +
               std::string(1, static_cast<char>(value.size())) + value;
  }
  connection.send_frame(1, 4, 1, headers);  // HEADERS, all of them.
  std::optional<int> type;
  do {
    type = connection.next_frame();
    CHECK(type.has_value());
  } while (type != 3);  // RST_STREAM
}

TEST(clients_that_go_away_anywhere_leave_nothing_behind) {
  Server server({.delay = 100us});
  std::mt19937_64 random(1);
  const auto channel = plain_channel(server.address());
  for (int i = 0; i < 200; ++i) {
    RawStream stream(channel);
    switch (i % 4) {
      case 3:
        stream.write(encode_hello("test"));
        stream.read();
        stream.read();
        stream.write(action({0}));
        break;
      case 2:
        stream.write(encode_hello("test"));
        stream.read();
        break;
      case 1:
        stream.write(encode_hello("test"));
        break;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
  CHECK(soon([&] { return server.server->num_streams() == 0; }));
  CHECK(soon([] { return CountingEnv::num_live == 0; }));
}

// --- Start ---

TEST(port_0_takes_a_free_one) {
  LogCapture log;
  EnvServer one(serving("127.0.0.1:0")), other(serving("127.0.0.1:0"));
  one.start();
  other.start();
  CHECK(one.address() != other.address());
  CHECK(one.address() != "127.0.0.1:0");
  CHECK_EQ(Client(one.address()).begin()[0].frame, 0);
  CHECK_EQ(Client(other.address()).begin()[0].frame, 0);
}

TEST(an_address_that_is_taken_is_an_error_and_may_be_tried_again) {
  LogCapture log;
  TempDir dir;
  for (const std::string& address : {dir.address(), std::string("127.0.0.1:0")}) {
    std::optional<EnvServer> first(serving(address));
    first->start();
    EnvServer second(serving(first->address()));
    for (int i = 0; i < 2; ++i) {
      CHECK_THROWS(ConnectionError, second.start(),
                   "cannot listen on " + first->address());
    }
    CHECK_EQ(Client(first->address()).begin()[0].frame, 0);
    first.reset();
    second.start();
    CHECK_EQ(Client(second.address()).begin()[0].frame, 0);
  }
  EnvServer nowhere(serving("unix:/nowhere/at/all"));
  CHECK_THROWS(ConnectionError, nowhere.start(), "cannot listen");
}

TEST(a_socket_that_a_dead_server_left_is_no_obstacle) {
  LogCapture log;
  TempDir dir;
  const std::string path = dir.address().substr(5);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  CHECK_EQ(bind(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  close(fd);
  EnvServer server(serving(dir.address()));
  server.start();
  CHECK_EQ(Client(dir.address()).begin()[0].frame, 0);
}

TEST(wrong_options_are_refused) {
  auto with = [](auto change) {
    EnvServer::Options options = serving("127.0.0.1:0");
    change(options);
    EnvServer server(options);
  };
  using Options = EnvServer::Options;
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.num_threads = 0; }),
               "num_threads");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.max_streams = 0; }),
               "max_streams");
  CHECK_THROWS(std::invalid_argument,
               with([](Options& o) { o.max_message_bytes = 10; }), "max_message_bytes");
  CHECK_THROWS(std::invalid_argument,
               with([](Options& o) { o.max_message_bytes = size_t{1} << 31; }),
               "max_message_bytes");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.address = "nonsense"; }),
               "nonsense");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.address = "0.0.0.0:0"; }),
               "refusing to serve");
}

// --- Stop ---

TEST(stop_ends_idle_streams_at_once) {
  Server server;
  Client client(server.address());
  RawStream silent(server.address());
  client.begin();
  CHECK_EQ(server.server->num_streams(), 1);
  const auto begin = Clock::now();
  server.server->stop(10s);
  CHECK(Clock::now() - begin < kSoon);
  CHECK(!client.read());
  CHECK(!client.finish().ok());
  CHECK(!silent.read());
  CHECK(!silent.finish().ok());
  CHECK_EQ(CountingEnv::num_live.load(), 0);
  CHECK(!RawStream(server.address()).write(encode_hello("test")));
}

TEST(stop_tells_clients_that_the_server_is_unavailable) {
  Server server;
  Client client(server.address());
  client.begin();
  auto stopped = in_thread([&] { server.server->stop(); });
  CHECK(!client.read());
  CHECK_STATUS(client.finish(), Status::UNAVAILABLE, "");
}

TEST(a_step_that_is_under_way_is_sent_before_the_stop) {
  auto gate = std::make_shared<Gate>();
  Server server({.wait_at = 1, .gate = gate});
  Client client(server.address());
  client.begin();
  CHECK(client.write(action({3})));
  gate->await_waiting(1);
  auto stopped = in_thread([&] { server.server->stop(10s); });
  CHECK(stopped.wait_for(100ms) == std::future_status::timeout);
  gate->open();
  CHECK_EQ(rows_of(client.spec(), client.read().value())[0].heard, 3);
  CHECK(!client.read());
  // The text may be lost: gRPC's client may write to the connection just when it
  // closes.
  CHECK_STATUS(client.finish(), Status::UNAVAILABLE, "");
  CHECK_SOON(stopped);
  stopped.get();
}

TEST(an_environment_that_hangs_does_not_hang_the_stop) {
  const int num_threads_before = num_threads_now();
  for (int64_t wait_at : {0, 1}) {
    auto gate = std::make_shared<Gate>();
    std::optional<Server> server;
    server.emplace(CountingEnv::Options{.wait_at = wait_at, .gate = gate});
    Client client(server->address());
    if (wait_at == 0) {
      client.write(encode_hello("test"));
    } else {
      client.begin();
      CHECK(client.write(action({3})));
    }
    gate->await_waiting(1);
    const auto begin = Clock::now();
    CHECK_THROWS(TimeoutError, server->server->stop(300ms), "did not come back");
    CHECK(Clock::now() - begin >= 300ms);
    CHECK(Clock::now() - begin < 300ms + 1s + kSoon);
    server->server->stop();  // Does nothing.
    server.reset();          // Nor does this wait.
    gate->open();            // The thread that was left behind uses no freed memory.
    CHECK(soon([] { return CountingEnv::num_live == 0; }));
  }
  // gRPC keeps a few threads; ours are gone.
  CHECK(soon([&] { return num_threads_now() <= num_threads_before + 8; }));
}

TEST(the_destructor_waits_five_seconds_for_one_that_hangs) {
  auto gate = std::make_shared<Gate>();
  std::optional<Server> server;
  server.emplace(CountingEnv::Options{.wait_at = 1, .gate = gate});
  Client client(server->address());
  client.begin();
  CHECK(client.write(action({3})));
  gate->await_waiting(1);
  const auto begin = Clock::now();
  server->server.reset();
  CHECK(Clock::now() - begin < 6s + kSoon);
  check_message(__FILE__, __LINE__, server->log.text(), "did not come back");
  gate->open();
  CHECK(soon([] { return CountingEnv::num_live == 0; }));
}

TEST(wait_ends_with_the_stop) {
  Server server;
  auto waiting = in_thread([&] { server.server->wait(); });
  CHECK(waiting.wait_for(50ms) == std::future_status::timeout);
  server.server->stop();
  CHECK_SOON(waiting);
  waiting.get();
  server.server->wait();  // Does not wait any more.
}

TEST(wait_ends_with_what_its_tick_throws) {
  Server server;
  int num_ticks = 0;
  auto wait = [&] {
    server.server->wait([&] {
      if (++num_ticks == 3) throw std::runtime_error("Ctrl-C");
    });
  };
  CHECK_THROWS(std::runtime_error, wait(), "Ctrl-C");
  CHECK_EQ(Client(server.address()).begin()[0].frame, 0);
}

TEST(a_server_that_was_not_started_stops_too) {
  LogCapture log;
  EnvServer server(serving("127.0.0.1:0"));
  CHECK_THROWS(std::invalid_argument, server.wait(), "not started");
  server.stop();
  EnvServer other(serving("127.0.0.1:0"));
  other.start();
  CHECK_THROWS(std::invalid_argument, other.start(), "started already");
}

TEST(several_threads_may_stop_it) {
  for ([[maybe_unused]] int round : Rounds{}) {
    Server server;
    Client client(server.address());
    client.begin();
    std::vector<std::future<void>> threads;
    for (int i = 0; i < 4; ++i) {
      threads.push_back(in_thread([&] { server.server->stop(); }));
    }
    for (auto& thread : threads) {
      CHECK_SOON(thread);
      thread.get();
    }
  }
}

TEST(servers_come_and_go_on_one_address_while_clients_act) {
  LogCapture log;
  TempDir dir;
  std::atomic<bool> is_done{false};
  std::atomic<int> num_steps{0};
  std::vector<std::future<void>> clients;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(in_thread([&] {
      while (!is_done) {
        RawStream stream(plain_channel(dir.address()));
        if (!stream.write(encode_hello("test")) || !stream.read() || !stream.read()) {
          continue;
        }
        while (stream.write(action({0})) && stream.read()) ++num_steps;
      }
    }));
  }
  for ([[maybe_unused]] int round : Rounds{}) {
    for (int i = 0; i < 4; ++i) {
      EnvServer::Options options = serving(dir.address(), {.num_envs = 1});
      options.num_threads = 1 + i % 3;
      EnvServer server(options);
      server.start();
      const int before = num_steps;
      soon([&] { return num_steps >= before + 20 * i; });
    }
  }
  is_done = true;
  for (auto& client : clients) client.get();
  CHECK_EQ(CountingEnv::num_live.load(), 0);
  CHECK(num_steps > 0);
}

// --- Probe ---

EnvSpec probe_it(const std::string& address, std::chrono::milliseconds timeout = 5s,
                 const Security& security = {}, const Tick& tick = {}) {
  return probe(address, security, timeout, 1 << 20, tick);
}

TEST(probe_tells_what_is_served) {
  Server server({.num_envs = 3, .num_actions = 7});
  const EnvSpec spec = probe_it(server.address());
  CHECK_EQ(spec.num_envs, 3);
  CHECK_EQ(spec.action.leaves[0].num_values, 7);
  CHECK_EQ(spec.description, "Counting");
  CHECK_EQ(CountingEnv::num_live, 1);  // For the first stream.
}

TEST(probe_waits_for_a_server_that_comes_later) {
  LogCapture log;
  TempDir dir;
  auto probing = in_thread([&] { return probe_it(dir.address(), 10s); });
  CHECK(probing.wait_for(300ms) == std::future_status::timeout);
  EnvServer server(serving(dir.address()));
  server.start();
  CHECK_EQ(probing.get().num_envs, 1);
}

TEST(probe_gives_up_when_its_time_is_over) {
  TempDir dir;
  const auto begin = Clock::now();
  CHECK_THROWS(TimeoutError, probe_it(dir.address(), 300ms), dir.address());
  CHECK(Clock::now() - begin < 300ms + kSoon);
  auto gate = std::make_shared<Gate>();
  EnvServer::Options options = serving("");
  options.make_environment = [gate](uint64_t stream) {
    gate->pass();
    return std::make_unique<CountingEnv>(CountingEnv::Options{}, stream);
  };
  Server server(options);
  CHECK_THROWS(TimeoutError, probe_it(server.address(), 300ms), server.address());
  gate->open();
}

TEST(probe_does_not_try_again_what_would_fail_again) {
  EnvServer::Options options = serving("");
  options.security.token = "secret";
  Server server(options);
  const auto begin = Clock::now();
  CHECK_THROWS(ConnectionError, probe_it(server.address(), 60s), "wants a token");
  Security security;
  security.token = "secret";
  CHECK_EQ(probe_it(server.address(), 60s, security).num_envs, 1);
  options.make_environment = [](uint64_t) -> std::unique_ptr<Environment> {
    throw std::runtime_error("no such game");
  };
  Server other(options);
  CHECK_THROWS(std::runtime_error, probe_it(other.address(), 60s, security),
               "no such game");
  CHECK(Clock::now() - begin < 3 * kSoon);
}

TEST(probe_ends_with_what_its_tick_throws) {
  TempDir dir;
  int num_ticks = 0;
  const Tick tick = [&] {
    if (++num_ticks == 2) throw std::invalid_argument("Ctrl-C");
  };
  CHECK_THROWS(std::invalid_argument, probe_it(dir.address(), 60s, {}, tick), "Ctrl-C");
}

}  // namespace
}  // namespace beast::test
