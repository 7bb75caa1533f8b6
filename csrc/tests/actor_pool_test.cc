// SPDX-License-Identifier: Apache-2.0
#include "actor_pool.h"

#include "acting.h"
#include "check.h"
#include "envs.h"

namespace beast::test {
namespace {

using std::chrono::milliseconds;
using Addresses = std::vector<std::string>;

std::unique_ptr<EnvServer> serve(EnvServer::Options options) {
  auto server = std::make_unique<EnvServer>(std::move(options));
  server->start();
  return server;
}

std::unique_ptr<EnvServer> serve(const std::string& address,
                                 CountingEnv::Options options = {}) {
  return serve(serving(address, options));
}

// What run() ended with, within a while.
template <class Error>
std::string error_of(Run& run) {
  CHECK_SOON(run.running);
  try {
    run.running.get();
  } catch (const Error& error) {
    return error.what();
  }
  fail(__FILE__, __LINE__, "run() ended without an error");
}

void check_has(const std::string& text, const std::string& part) {
  check_message(__FILE__, __LINE__, text, part);
}

// --- Rollouts ---

TEST(every_step_is_in_rollouts_exactly_once) {
  struct Case {
    int num_streams;
    int64_t num_envs, unroll_length, learner_batch;
    int num_threads;
  };
  for (const Case& c : {Case{1, 1, 1, 1, 1}, Case{1, 1, 20, 2, 1}, Case{4, 1, 5, 4, 2},
                        Case{3, 3, 4, 7, 2}, Case{20, 2, 3, 8, 3}}) {
    LogCapture log;
    TempDir dir;
    auto server = serve(dir.address(), {.num_envs = c.num_envs, .length = 3});
    Run::Options options;
    options.pool =
        Run::acting(Addresses(c.num_streams, dir.address()), c.unroll_length);
    options.pool.num_threads = c.num_threads;
    options.pool.channels_last = c.num_threads == 3;
    options.length = 3;
    options.learner_batch = c.learner_batch;
    Run run(options);
    CHECK(soon([&] {
      return run.num_beyond(30 * c.unroll_length) == c.num_streams * c.num_envs;
    }));
    run.finish();  // Throws what the learner found.
    const ActorPool::Stats stats = run.pool->stats();
    CHECK_EQ(stats.num_restarts, 0);
    CHECK_EQ(stats.num_steps, run.pool->count());
    CHECK(stats.num_rollouts * c.num_envs >= run.num_rollouts());
    CHECK(stats.num_steps >= stats.num_rollouts * c.unroll_length * c.num_envs);
    CHECK(stats.last_errors.empty());
  }
}

TEST(streams_of_several_servers_make_one_pool) {
  LogCapture log;
  TempDir dir;
  std::vector<std::unique_ptr<EnvServer>> servers;
  Addresses addresses;
  for (int i = 0; i < 3; ++i) {
    EnvServer::Options options =
        serving(i == 0 ? "127.0.0.1:0" : dir.address(std::to_string(i)));
    // Another hundred of streams for each, and another number of environments.
    options.make_environment = [i](uint64_t stream) {
      return std::make_unique<CountingEnv>(CountingEnv::Options{.num_envs = i + 1},
                                           100 * i + stream);
    };
    servers.push_back(serve(options));
    for (int j = 0; j < 2; ++j) addresses.push_back(servers[i]->address());
  }
  Run run(Run::acting(addresses));
  CHECK(soon([&] { return run.num_beyond(50) == 2 * (1 + 2 + 3); }));
  run.finish();
}

TEST(streams_begin_anew_when_their_server_comes_back) {
  LogCapture log;
  TempDir dir;
  for (const std::string& first : {dir.address(), std::string("127.0.0.1:0")}) {
    std::atomic<int64_t> num_streams{0};  // Over all lives of the server.
    EnvServer::Options options = serving(first);
    options.make_environment = [&](uint64_t) {
      return std::make_unique<CountingEnv>(CountingEnv::Options{.num_envs = 2},
                                           num_streams++);
    };
    auto server = serve(options);
    options.address = server->address();
    Run run(Run::acting(Addresses(3, options.address)));
    for (int life = 0; life < 3; ++life) {
      const int64_t from = 3 * life;
      CHECK(soon([&] { return run.num_beyond(20, from) == 3 * 2; }));
      server.reset();
      CHECK(soon([&] { return run.pool->stats().connecting == 3; }));
      check_has(run.pool->stats().last_errors.at(options.address), "");
      server = serve(options);
    }
    CHECK(soon([&] { return run.num_beyond(20, 9) == 3 * 2; }));
    CHECK_EQ(run.pool->stats().num_restarts, 9);
    run.finish();
  }
}

TEST(the_server_may_come_after_the_pool) {
  LogCapture log;
  TempDir dir;
  Run run(Run::acting({dir.address()}));
  std::this_thread::sleep_for(200ms);
  CHECK_EQ(run.pool->stats().connecting, 1);
  auto server = serve(dir.address());
  CHECK(soon([&] { return run.num_rollouts() >= 4; }));
  run.finish();
}

TEST(addresses_may_be_added_before_and_while_it_runs) {
  LogCapture log;
  TempDir dir;
  auto one = serve(dir.address("one"));
  EnvServer::Options options = serving(dir.address("two"));
  options.make_environment = [](uint64_t stream) {
    return std::make_unique<CountingEnv>(CountingEnv::Options{}, 100 + stream);
  };
  auto two = serve(options);
  Run run(Run::acting({one->address()}));
  CHECK(soon([&] { return run.num_beyond(20) == 1; }));
  run.pool->add_address(one->address());
  run.pool->add_address(two->address());
  CHECK(soon([&] { return run.num_beyond(20) == 3; }));
  CHECK_THROWS(std::invalid_argument, run.pool->add_address("nonsense"), "nonsense");
  run.finish();
  run.pool->add_address(one->address());  // Comes to nothing.
  CHECK_EQ(run.pool->stats().connecting, 0);
}

TEST(a_full_learner_queue_holds_the_streams) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  Run::Options options;
  options.pool = Run::acting(Addresses(5, dir.address()));
  options.maximum_queue_size = 4;
  options.has_learner = false;
  Run run(options);
  CHECK(soon([&] { return run.pool->stats().in_learner_queue == 5; }));
  CHECK_EQ(run.queue->size(), 4);
  const int64_t num_steps = run.pool->count();
  std::this_thread::sleep_for(100ms);
  CHECK_EQ(run.pool->count(), num_steps);
  run.start_learner();
  CHECK(soon([&] { return run.num_beyond(50) == 5; }));
  run.finish();
}

TEST(stages_are_counted) {
  LogCapture log;
  TempDir dir;
  auto gate = std::make_shared<Gate>();
  auto server = serve(dir.address(), {.wait_at = 1, .gate = gate});
  Run::Options options;
  options.pool = Run::acting({dir.address(), dir.address(), dir.address("none")});
  options.has_agent = false;
  Run run(options);
  CHECK(soon([&] { return run.pool->stats().in_inference == 2; }));
  CHECK_EQ(run.pool->stats().connecting, 1);
  run.start_agent();
  CHECK(soon([&] { return run.pool->stats().in_environment == 2; }));
  gate->open();
  CHECK(soon([&] { return run.num_beyond(20) == 2; }));
  run.finish();
  const ActorPool::Stats stats = run.pool->stats();
  CHECK_EQ(stats.connecting + stats.in_environment + stats.in_inference +
               stats.in_learner_queue,
           0);
}

// --- Errors ---

TEST(an_environment_that_keeps_raising_ends_the_run_with_its_text) {
  for (int64_t raise_at : {-2, 0, 1, 3}) {  // Not even made; at the reset; ...
    LogCapture log;
    TempDir dir;
    EnvServer::Options options = serving(dir.address(), {.raise_at = raise_at});
    if (raise_at == -2) {
      options.make_environment = [](uint64_t) -> std::unique_ptr<Environment> {
        throw std::runtime_error("the dice\nfell off the table");
      };
    }
    auto server = serve(options);
    Run run(Run::acting({dir.address()}));
    const std::string error = error_of<std::runtime_error>(run);
    check_has(error, dir.address() + " failed 3 times");
    check_has(error, "the dice\nfell off the table");
  }
}

TEST(an_environment_that_raises_now_and_then_is_made_again) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address(), {.num_envs = 2, .raise_at = 23});
  Run run(Run::acting({dir.address()}));
  CHECK(soon([&] { return run.num_beyond(20) >= 10 * 2; }));
  CHECK(run.pool->stats().num_restarts >= 9);
  check_has(run.pool->stats().last_errors.at(dir.address()), "fell off the table");
  run.finish();
}

TEST(no_server_ends_the_run_after_the_connect_timeout) {
  LogCapture log;
  TempDir dir;
  ActorPool::Options options = Run::acting({dir.address("a"), dir.address("b")});
  options.connect_timeout = 500ms;
  const auto begin = Clock::now();
  Run run(options);
  const std::string error = error_of<ConnectionError>(run);
  CHECK(Clock::now() - begin >= 500ms);
  check_has(error, "no env server");
  check_has(error, dir.address("a"));
  check_has(error, dir.address("b"));
}

TEST(a_server_that_is_gone_for_long_ends_the_run_too) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  ActorPool::Options options = Run::acting({dir.address(), dir.address("none")});
  options.connect_timeout = 500ms;
  Run run(options);
  CHECK(soon([&] { return run.num_beyond(20) == 1; }));
  std::this_thread::sleep_for(800ms);  // One of two is enough.
  CHECK(run.running.wait_for(0s) == std::future_status::timeout);
  server.reset();
  check_has(error_of<ConnectionError>(run), dir.address());
}

TEST(what_trying_again_does_not_mend_ends_a_run_of_one_stream_at_once) {
  LogCapture log;
  TempDir dir;
  EnvServer::Options options = serving(dir.address());
  options.security.token = "secret";
  auto server = serve(options);
  {
    Run run(Run::acting({dir.address()}));
    check_has(error_of<ConnectionError>(run), "wants a token");
  }
  {
    ActorPool::Options pool = Run::acting({dir.address()});
    pool.security.token = "wrong!";
    Run run(pool);
    check_has(error_of<ConnectionError>(run), "wants a token");
  }
  ActorPool::Options pool = Run::acting({dir.address()});
  pool.security.token = "secret";
  Run run(pool);
  CHECK(soon([&] { return run.num_beyond(20) == 1; }));
  run.finish();
}

// --- Retired streams ---

// The pool's run goes on with so many streams; what was logged of those that are
// retired.
std::string check_goes_on(Run& run, const LogCapture& log, const std::string& retired,
                          int64_t num_retired, int64_t num_left) {
  CHECK(soon([&] {
    const auto found = run.pool->stats().retired;
    return found.contains(retired) && found.at(retired) == num_retired;
  }));
  const int64_t before = run.num_rollouts();
  CHECK(soon([&] { return run.num_rollouts() > before + 10 * num_left; }));
  CHECK(run.running.wait_for(0s) == std::future_status::timeout);
  CHECK_EQ(run.pool->stats().num_streams, num_left);
  CHECK(soon([&] { return log.text().find("retired a stream") != std::string::npos; }));
  const std::string text = log.text(), line = "retired a stream to " + retired + ": ";
  check_has(text, line);
  CHECK_EQ(text.find(line, text.find(line) + 1), std::string::npos);  // Once.
  return text.substr(text.find(line),
                     text.find('\n', text.find(line)) - text.find(line));
}

TEST(more_streams_than_the_server_takes_are_retired) {
  LogCapture log;
  TempDir dir;
  EnvServer::Options options = serving(dir.address());
  options.max_streams = 2;
  auto server = serve(options);
  Run run(Run::acting(Addresses(3, dir.address())));
  check_has(check_goes_on(run, log, dir.address(), 1, 2), "max_streams=2");
  run.finish();
}

TEST(a_server_with_another_environment_is_retired) {
  LogCapture log;
  TempDir dir;
  auto good = serve(dir.address("good"), {.num_actions = 4});
  auto odd = serve(dir.address("odd"), {.num_actions = 6});
  ActorPool::Options options = Run::acting({dir.address("odd"), dir.address("odd"),
                                            dir.address("odd"), dir.address("good")});
  // Whoever answers first: the agent is built for one of them.
  options.spec = CountingEnv::make_spec({.num_actions = 4});
  Run run(options);
  const std::string line = check_goes_on(run, log, dir.address("odd"), 3, 1);
  check_has(line, "is not like the one that the agent is built for");
  check_has(line, "values from 0 to 5");
  check_has(line, "The run goes on with ");
  check_has(line, "list its address again in --server_addresses_file");
  check_has(run.pool->stats().last_errors.at(dir.address("odd")), "values from 0 to 5");
  run.finish();
}

TEST(without_a_spec_the_first_server_to_answer_says_what_is_played) {
  LogCapture log;
  TempDir dir;
  auto one = serve(dir.address("one"), {.num_actions = 4});
  Run run(Run::acting({dir.address("one")}));
  CHECK(soon([&] { return run.num_rollouts() > 0; }));
  auto two = serve(dir.address("two"), {.num_actions = 6});
  run.pool->add_address(dir.address("two"));
  check_has(check_goes_on(run, log, dir.address("two"), 1, 1),
            "is not like the one at " + dir.address("one"));
  run.finish();
}

TEST(a_server_with_more_environments_than_fit_a_batch_is_retired) {
  LogCapture log;
  TempDir dir;
  auto good = serve(dir.address("good"));
  auto odd = serve(dir.address("odd"), {.num_envs = 4097});
  Run run(Run::acting({dir.address("odd"), dir.address("good")}));
  check_has(check_goes_on(run, log, dir.address("odd"), 1, 1),
            "serves 4097 environments in a stream, more than maximum_batch_size=4096");
  run.finish();
}

TEST(servers_that_refuse_us_or_keep_failing_are_retired) {
  LogCapture log;
  TempDir dir;
  auto good = serve(dir.address("good"));
  EnvServer::Options options = serving(dir.address("locked"));
  options.security.token = "secret";
  auto locked = serve(options);
  auto failing = serve(dir.address("failing"), {.raise_at = 3});
  RawServer other(dir.address("other"), [](RawServer::Call& call) {
    call.read();
    chimera::ServerMessage message;
    message.mutable_welcome()->set_protocol_version(2);
    call.write(message.SerializeAsString());
    call.read();
    return grpc::Status::OK;
  });
  ActorPool::Options pool = Run::acting({dir.address("locked"), dir.address("failing"),
                                         dir.address("other"), dir.address("good")});
  pool.spec = CountingEnv::make_spec({});
  Run::Options run_options;
  run_options.pool = pool;
  Run run(run_options);
  CHECK(soon([&] { return run.pool->stats().retired.size() == 3; }));
  check_has(check_goes_on(run, log, dir.address("locked"), 1, 1), "wants a token");
  check_has(check_goes_on(run, log, dir.address("other"), 1, 1), "version 2");
  check_has(
      check_goes_on(run, log, dir.address("failing"), 1, 1),
      "failed 3 times with no rollout in between; at last the environment raised: "
      "fell off the table. The run");
  run.finish();
  CHECK_EQ(run.pool->stats().retired.size(), 3);  // Still known.
}

TEST(a_run_ends_with_the_first_reason_when_no_stream_is_left) {
  LogCapture log;
  TempDir dir;
  EnvServer::Options options = serving(dir.address("locked"));
  options.security.token = "secret";
  auto locked = serve(options);
  auto gate = std::make_shared<Gate>();
  auto failing =
      serve(dir.address("failing"), {.raise_at = 1, .wait_at = 1, .gate = gate});
  Run run(Run::acting({dir.address("locked"), dir.address("failing")}));
  CHECK(soon([&] { return run.pool->stats().retired.size() == 1; }));
  gate->open();
  check_has(error_of<ConnectionError>(run), "wants a token");
  check_has(log.text(), dir.address("failing") + " failed 3 times");
}

TEST(retired_streams_do_not_count_as_connected) {
  LogCapture log;
  TempDir dir;
  EnvServer::Options options = serving(dir.address("locked"));
  options.security.token = "secret";
  auto locked = serve(options);
  ActorPool::Options pool = Run::acting({dir.address("locked"), dir.address("none")});
  pool.connect_timeout = 500ms;
  Run run(pool);
  const std::string error = error_of<ConnectionError>(run);
  check_has(error, "no env server for 0.5 s");
  check_has(error, "wants a token");
}

TEST(an_address_that_was_retired_may_be_added_again) {
  LogCapture log;
  TempDir dir;
  auto good = serve(dir.address("good"));
  auto mended = serve(dir.address("mended"), {.num_actions = 6});
  ActorPool::Options options =
      Run::acting({dir.address("good"), dir.address("mended")});
  options.spec = CountingEnv::make_spec({});
  Run::Options run_options;
  run_options.pool = options;
  run_options.stream_limit = 100;  // Both servers count their streams from 0.
  Run run(run_options);
  check_goes_on(run, log, dir.address("mended"), 1, 1);
  mended.reset();
  EnvServer::Options other = serving(dir.address("mended"));
  other.make_environment = [](uint64_t stream) {
    return std::make_unique<CountingEnv>(CountingEnv::Options{}, 50 + stream);
  };
  mended = serve(other);
  run.pool->add_address(dir.address("mended"));
  CHECK(soon([&] { return run.num_beyond(20, 50) == 1; }));
  CHECK_EQ(run.pool->stats().num_streams, 2);
  CHECK(run.pool->stats().retired.empty());
  run.finish();
}

TEST(what_inference_raises_ends_the_run) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  for (const std::string how : {"fails", "is dropped", "does not fit"}) {
    Run::Options options;
    options.pool = Run::acting(Addresses(3, dir.address()));
    options.has_agent = false;
    Run run(options);
    auto batch = run.batcher->next_batch();
    if (how == "fails") {
      batch->fail("out of memory");
      check_has(error_of<std::runtime_error>(run), "out of memory");
    } else if (how == "is dropped") {
      batch.reset();
      check_has(error_of<std::runtime_error>(run), "dropped");
    } else {
      const Nest good = answer(batch->inputs());
      batch->set_outputs(
          Nest::tuple({Nest::dict({{"policy", good.at(0).at("action")}}), good.at(1)}));
      check_has(error_of<std::invalid_argument>(run), "expected a key \"action\"");
    }
  }
}

// --- A server that does not behave ---

std::string first_step(const EnvSpec& spec) {
  return step_proto(Fields(spec)).SerializeAsString();
}

TEST(servers_of_another_version_end_the_run) {
  LogCapture log;
  TempDir dir;
  RawServer server(dir.address(), [](RawServer::Call& call) {
    call.read();
    chimera::ServerMessage message;
    message.mutable_welcome()->set_protocol_version(2);
    call.write(message.SerializeAsString());
    call.read();
    return grpc::Status::OK;
  });
  Run run(Run::acting({dir.address()}));
  check_has(error_of<ConnectionError>(run), "version 2, this side 1");
}

TEST(servers_that_keep_breaking_the_protocol_end_the_run) {
  const EnvSpec spec = CountingEnv::make_spec({});
  const std::string welcome = encode_welcome(spec), step = first_step(spec);
  Fields newest(spec);  // Of frames that nobody sent.
  newest.observation.back().resize(2);
  for (const std::vector<std::string>& messages : std::vector<std::vector<std::string>>{
           {step},
           {"garbage"},
           {""},
           {welcome, welcome},
           {welcome, "garbage"},
           {welcome, step.substr(0, step.size() - 1)},
           {welcome, step + step},
           {welcome, step_proto(newest).SerializeAsString()},
           {encode_hello("test")}}) {
    LogCapture log;
    TempDir dir;
    RawServer server(dir.address(), [&](RawServer::Call& call) {
      call.read();
      for (const std::string& message : messages) call.write(message);
      call.read();
      return grpc::Status::OK;
    });
    Run run(Run::acting({dir.address()}));
    const std::string error = error_of<std::runtime_error>(run);
    check_has(error, "failed 3 times");
    check_has(error, "broke the protocol");
  }
}

TEST(a_server_that_ends_streams_in_order_is_tried_again_and_again) {
  LogCapture log;
  TempDir dir;
  std::atomic<int> num_calls{0};
  RawServer server(dir.address(), [&](RawServer::Call& call) {
    call.read();
    const int number = num_calls++;
    const EnvSpec spec = CountingEnv::make_spec({});
    if (number % 3 > 0) call.write(encode_welcome(spec));
    if (number % 3 > 1) call.write(first_step(spec));
    return number % 2 == 0 ? grpc::Status::OK
                           : grpc::Status(grpc::StatusCode::UNAVAILABLE, "restarts");
  });
  Run run(Run::acting({dir.address()}));
  CHECK(soon([&] { return num_calls >= 20; }));
  run.finish();
}

TEST(a_server_that_does_not_end_the_call_after_a_failure_is_left) {
  LogCapture log;
  TempDir dir;
  std::atomic<int> num_calls{0};
  RawServer server(dir.address(), [&](RawServer::Call& call) {
    call.read();
    ++num_calls;
    call.write(encode_failure("broke"));
    call.read();  // Until the client ends the call.
    return grpc::Status::OK;
  });
  ActorPool::Options options = Run::acting({dir.address()});
  options.step_timeout = 300ms;
  Run run(options);
  check_has(error_of<std::runtime_error>(run), "broke");
  CHECK_EQ(num_calls.load(), 3);
}

TEST(a_server_that_ends_the_call_before_all_is_read_is_left) {
  LogCapture log;
  TempDir dir;
  std::atomic<int> num_calls{0};
  RawServer server(dir.address(), [&](RawServer::Call& call) {
    call.read();
    ++num_calls;
    const EnvSpec spec = CountingEnv::make_spec({});
    call.write(encode_welcome(spec));
    for (int i = 0; i < 5; ++i) call.write(first_step(spec));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "restarts");
  });
  Run run(Run::acting(Addresses(4, dir.address())));
  CHECK(soon([&] { return num_calls >= 100; }));
  check_has(run.pool->stats().last_errors.at(dir.address()), "restarts");
  run.finish();
}

TEST(a_server_that_never_answers_is_left_after_the_step_timeout) {
  for (int num_messages : {0, 1, 2}) {  // Nothing; Welcome; Welcome and a Step.
    LogCapture log;
    TempDir dir;
    std::atomic<int> num_calls{0};
    RawServer server(dir.address(), [&](RawServer::Call& call) {
      ++num_calls;
      const EnvSpec spec = CountingEnv::make_spec({});
      call.read();
      if (num_messages > 0) call.write(encode_welcome(spec));
      if (num_messages > 1) call.write(first_step(spec));
      while (call.read()) {
      }
      return grpc::Status::OK;
    });
    ActorPool::Options options = Run::acting({dir.address()});
    options.step_timeout = 200ms;
    Run run(options);
    CHECK(soon([&] { return num_calls >= 3; }));
    check_has(run.pool->stats().last_errors.at(dir.address()), "no answer to a step");
    run.finish();
  }
}

TEST(an_environment_that_hangs_costs_its_stream_only) {
  LogCapture log;
  TempDir dir;
  auto gate = std::make_shared<Gate>();
  EnvServer::Options options = serving(dir.address());
  options.num_threads = 4;
  options.make_environment = [gate](uint64_t stream) {
    return std::make_unique<CountingEnv>(
        CountingEnv::Options{.wait_at = stream == 1 ? 33 : -1, .gate = gate}, stream);
  };
  auto server = serve(options);
  ActorPool::Options pool = Run::acting(Addresses(3, dir.address()));
  pool.step_timeout = 300ms;
  Run run(pool);
  gate->await_waiting(1);
  // The one that hung has been replaced by stream 3.
  CHECK(soon([&] { return run.num_beyond(100, 2) == 2 && run.num_beyond(100) == 3; }));
  CHECK_EQ(run.pool->stats().num_restarts, 1);
  run.finish();
  gate->open();
}

// --- The end ---

enum class How { kQueue, kBatcher, kStop };

void end(Run& run, How how) {
  switch (how) {
    case How::kQueue:
      run.queue->close();
      return;
    case How::kBatcher:
      run.batcher->close();
      return;
    case How::kStop:
      run.pool->stop();
      return;
  }
}

// Ends the run so, which must take effect soon, and without an error.
void check_ends(Run& run, How how) {
  const auto begin = Clock::now();
  end(run, how);
  CHECK_SOON(run.running);
  run.running.get();
  CHECK(Clock::now() - begin < kSoon);
}

constexpr How kAllWays[] = {How::kQueue, How::kBatcher, How::kStop};

TEST(a_run_ends_soon_while_streams_act) {
  for (How how : kAllWays) {
    LogCapture log;
    TempDir dir;
    auto server = serve(dir.address());
    Run run(Run::acting(Addresses(10, dir.address())));
    CHECK(soon([&] { return run.num_rollouts() >= 10; }));
    check_ends(run, how);
    CHECK(soon([&] { return server->num_streams() == 0; }));
  }
}

TEST(a_run_ends_soon_while_environments_hang) {
  for (How how : kAllWays) {
    LogCapture log;
    TempDir dir;
    auto gate = std::make_shared<Gate>();
    auto server = serve(dir.address(), {.wait_at = 7, .gate = gate});
    Run run(Run::acting({dir.address()}));
    gate->await_waiting(1);
    check_ends(run, how);
    gate->open();
  }
}

TEST(a_run_ends_soon_while_inference_waits) {
  for (How how : kAllWays) {
    LogCapture log;
    TempDir dir;
    auto server = serve(dir.address());
    Run::Options options;
    options.pool = Run::acting(Addresses(3, dir.address()));
    options.has_agent = false;
    Run run(options);
    auto batch = run.batcher->next_batch();
    CHECK(soon([&] { return run.pool->stats().in_inference == 3; }));
    check_ends(run, how);
  }
}

TEST(a_run_ends_soon_while_the_learner_queue_is_full) {
  for (How how : kAllWays) {
    LogCapture log;
    TempDir dir;
    auto server = serve(dir.address());
    Run::Options options;
    options.pool = Run::acting(Addresses(6, dir.address()));
    options.maximum_queue_size = 4;
    options.has_learner = false;
    Run run(options);
    CHECK(soon([&] { return run.pool->stats().in_learner_queue == 6; }));
    check_ends(run, how);
  }
}

TEST(a_run_ends_soon_while_there_is_no_server) {
  for (How how : kAllWays) {
    LogCapture log;
    TempDir dir;
    ActorPool::Options options = Run::acting({dir.address(), "127.0.0.1:9"});
    options.max_backoff = 10s;
    options.min_backoff = 10s;
    Run run(options);
    CHECK(soon([&] { return run.pool->stats().last_errors.size() == 2; }));
    check_ends(run, how);
  }
}

TEST(a_run_ends_with_what_its_tick_throws) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  Run other(Run::acting({dir.address()}));  // For its queues.
  ActorPool::Options options = Run::acting({dir.address()});
  options.learner_queue = other.queue;
  options.inference_batcher = other.batcher;
  options.initial_agent_state = Nest::tuple({new_array(DType::kInt64, {1, 1, 1})});
  ActorPool pool(options);
  int num_ticks = 0;
  const Tick tick = [&] {
    if (++num_ticks == 3) throw std::invalid_argument("Ctrl-C");
  };
  CHECK_THROWS(std::invalid_argument, pool.run(tick), "Ctrl-C");
  CHECK_THROWS(std::invalid_argument, pool.run(), "called already");
  CHECK(pool.count() > 0);
  other.finish();  // Two pools may share their queues.
}

TEST(a_pool_that_never_ran_is_destroyed) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  auto run = std::make_unique<Run>(Run::acting({dir.address()}));
  for (int i = 0; i < 20; ++i) {
    ActorPool::Options options = Run::acting(Addresses(i + 1, dir.address()));
    options.learner_queue = run->queue;
    options.inference_batcher = run->batcher;
    ActorPool pool(options);
    if (i % 2 == 0) pool.add_address(dir.address());
    if (i % 3 == 0) pool.stop();
    CHECK_EQ(pool.count(), 0);
    CHECK_EQ(pool.stats().connecting, i + 1 + (i % 2 == 0));
  }
  CHECK(soon([&] { return run->num_rollouts() > 0; }));
  run->finish();
}

TEST(a_stop_before_the_run_ends_it) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  Run run(Run::acting({dir.address()}));
  ActorPool::Options options = Run::acting(Addresses(5, dir.address()));
  options.learner_queue = run.queue;
  options.inference_batcher = run.batcher;
  options.initial_agent_state = Nest::tuple({new_array(DType::kInt64, {1, 1, 1})});
  ActorPool pool(options);
  pool.stop();
  auto running = in_thread([&] { pool.run(); });
  CHECK_SOON(running);
  running.get();
  run.finish();
}

TEST(answers_that_come_after_the_end_reach_nobody) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  for (bool is_destroyed : {false, true}) {
    for (bool is_answered : {false, true}) {
      Run::Options options;
      options.pool = Run::acting(Addresses(3, dir.address()), 1);
      options.has_agent = false;
      Run run(options);
      auto batch = run.batcher->next_batch();
      run.pool->stop();
      CHECK_SOON(run.running);
      run.running.get();
      if (is_destroyed) run.pool.reset();
      if (is_answered) batch->set_outputs(answer(batch->inputs()));
      batch.reset();
    }
  }
}

TEST(pools_come_and_go) {
  LogCapture log;
  TempDir dir;
  EnvServer::Options options = serving(dir.address(), {.num_envs = 2});
  options.num_threads = 2;
  auto server = serve(options);
  std::mt19937_64 random(1);
  for (int round : Rounds{}) {
    for (int i = 0; i < 10; ++i) {
      ActorPool::Options pool =
          Run::acting(Addresses(1 + random() % 16, dir.address()));
      pool.num_threads = 1 + static_cast<int>(random() % 3);
      Run::Options all;
      all.pool = pool;
      all.maximum_queue_size = 4 + random() % 8;
      std::optional<Run> run(std::in_place, all);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      if (random() % 2 == 0) run->pool->add_address(dir.address());
      check_ends(*run, kAllWays[(round + i) % 3]);
    }
  }
  CHECK(soon([&] { return server->num_streams() == 0; }));
  CHECK(soon([] { return CountingEnv::num_live == 0; }));
}

TEST(pools_and_servers_come_and_go) {
  LogCapture log;
  TempDir dir;
  std::mt19937_64 random(2);
  for ([[maybe_unused]] int round : Rounds{}) {
    std::atomic<bool> is_done{false};
    std::atomic<int64_t> num_streams{0};
    auto servers = in_thread([&, seed = random()] {
      std::mt19937_64 random(seed);
      while (!is_done) {
        EnvServer::Options options = serving(dir.address());
        options.make_environment = [&](uint64_t) {
          return std::make_unique<CountingEnv>(CountingEnv::Options{.num_envs = 2},
                                               num_streams++);
        };
        auto server = serve(options);
        std::this_thread::sleep_for(milliseconds(random() % 50));
      }
    });
    for (int i = 0; i < 5; ++i) {
      Run run(Run::acting(Addresses(8, dir.address())));
      std::this_thread::sleep_for(milliseconds(random() % 100));
      check_ends(run, kAllWays[i % 3]);
    }
    is_done = true;
    servers.get();
  }
  CHECK_EQ(CountingEnv::num_live.load(), 0);
}

// --- Options ---

TEST(wrong_options_are_refused) {
  TempDir dir;
  auto queue = [](int64_t dim) {
    BatchingQueue::Options options;
    options.sizes.batch_dim = dim;
    return std::make_shared<BatchingQueue>(options);
  };
  auto batcher = [](int64_t dim) {
    DynamicBatcher::Options options;
    options.sizes.batch_dim = dim;
    return std::make_shared<DynamicBatcher>(options);
  };
  auto with = [&](auto change) {
    ActorPool::Options options = Run::acting({dir.address()});
    options.learner_queue = queue(1);
    options.inference_batcher = batcher(1);
    change(options);
    ActorPool pool(options);
  };
  using Options = ActorPool::Options;
  with([](Options&) {});
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.addresses.clear(); }),
               "at least one");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.addresses = {"a"}; }),
               "neither unix:/path nor host:port");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.unroll_length = 0; }),
               "unroll_length");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.max_failures = 0; }),
               "max_failures");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.learner_queue.reset(); }),
               "learner_queue");
  CHECK_THROWS(std::invalid_argument,
               with([](Options& o) { o.inference_batcher.reset(); }),
               "inference_batcher");
  CHECK_THROWS(std::invalid_argument,
               with([&](Options& o) { o.learner_queue = queue(0); }), "batch_dim");
  CHECK_THROWS(std::invalid_argument,
               with([&](Options& o) { o.inference_batcher = batcher(0); }),
               "batch_dim");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) { o.max_message_bytes = 1; }),
               "max_message_bytes");
  CHECK_THROWS(std::invalid_argument,
               with([](Options& o) { o.security.authority_file = "/nowhere"; }),
               "/nowhere");
  CHECK_THROWS(std::invalid_argument, with([](Options& o) {
                 o.initial_agent_state = new_array(DType::kFloat32, {1, 2, 3});
               }),
               "one row in dimension 1");
}

TEST(without_an_initial_state_there_is_none) {
  LogCapture log;
  TempDir dir;
  auto server = serve(dir.address());
  Run run(Run::acting({dir.address("none")}));  // For queues that nobody else uses.
  ActorPool::Options options = Run::acting({dir.address()});
  options.learner_queue = std::make_shared<BatchingQueue>(BatchingQueue::Options());
  options.inference_batcher =
      std::make_shared<DynamicBatcher>(DynamicBatcher::Options());
  ActorPool pool(options);
  auto running = in_thread([&] { pool.run(); });
  {
    auto batch = options.inference_batcher->next_batch();
    CHECK_EQ(batch->inputs().structure->num_leaves(), batch->inputs().leaves.size());
    CHECK_EQ(batch->inputs().at(1).structure->str(), "()");
  }
  options.inference_batcher->close();
  try {
    running.get();  // That the batch was dropped.
  } catch (const std::runtime_error&) {
  }
  run.finish();
}

}  // namespace
}  // namespace beast::test
