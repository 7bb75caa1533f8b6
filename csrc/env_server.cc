// SPDX-License-Identifier: Apache-2.0
#include "env_server.h"

#include <grpcpp/alarm.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <list>
#include <mutex>
#include <set>
#include <thread>

#include "channel_settings.h"
#include "episode_counter.h"
#include "log.h"
#include "named_thread.h"
#include "spin.h"
#include "wire.h"

namespace beast {
namespace {

// Two servers on one socket would take turns in stealing it: gRPC removes the file.
void check_socket_is_free(const std::string& address) {
  if (!address.starts_with("unix:")) return;
  std::string path = address.substr(5);
  if (path.starts_with("//")) path.erase(0, 2);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const bool taken = connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  if (taken) {
    throw ConnectionError("cannot listen on " + address +
                          ": another server does; stop it or pass another address");
  }
}

// gRPC's health service, answered here: its own implementation polls with threads of
// its own, which take each other's events and halve the throughput.
constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";

constexpr std::chrono::seconds kKeepAliveInterval{1};

std::string first_line(const std::string& text) {
  return text.substr(0, std::min(text.find('\n'), size_t{500}));
}

}  // namespace

struct EnvServer::State {
  struct Event {  // Of the completion queue.
    void* tag = nullptr;
    bool ok = false;
  };

  explicit State(Options o) : options(std::move(o)) {}
  void work(std::shared_ptr<State> self);
  bool next_event(Event& event);  // False after the end.
  void keep_alive(std::shared_ptr<State> self);
  void add_pending(const std::shared_ptr<Stream>& stream, bool has_token);
  void set_sweep();  // Needs mu held.
  void sweep();      // Ends pending calls whose time is over.

  const Options options;
  std::string address;  // With its port; written by start().
  std::unique_ptr<grpc::AsyncGenericService> service;
  std::unique_ptr<grpc::ServerCompletionQueue> cq;
  std::unique_ptr<grpc::Server> server;
  std::vector<std::thread> threads;
  std::atomic<bool> stopping{false};
  std::atomic<int64_t> num_handled{0};  // Events.
  std::mutex polling;                   // Held by who waits for events.
  Spin spin;                            // Guarded by polling.
  std::deque<Event> postponed;          // Likewise: events that keep_alive() got.
  std::mutex mu;
  std::condition_variable changed;
  bool started = false;                       // Guarded by mu, as all below.
  uint64_t next_number = 0;                   // Of a stream.
  bool stopped = false;                       // The threads are gone, or given up.
  int num_working = 0;                        // Threads.
  std::set<std::shared_ptr<Stream>> streams;  // All calls that were accepted.
  int num_streams = 0;                        // Those that have environments.
  // Calls that are no streams yet, without and with the token, the oldest first.
  std::list<std::shared_ptr<Stream>> pending[2];
  // An event of the queue every so often while calls are pending: it comes behind the
  // messages that arrived before, so a busy server does not take them for late.
  grpc::Alarm alarm;  // Its tag is this state.
  bool is_sweeping = false;
  std::chrono::steady_clock::time_point sweep_at;
  // Built for a client that only wanted to know its spec, as the stream of that number;
  // for the next one to take.
  uint64_t spare_number = 0;
  std::unique_ptr<Environment> spare;
};

// One call, of Stream or another method: a state machine that has one operation pending
// at any time, or two, a write and the read of what the client answers; it goes on when
// both have ended. It owns itself until the last.
class EnvServer::Stream {
 public:
  struct Tag {  // What a completion queue gives back.
    Stream* stream;
    bool is_read;
  };

  static void accept_next(State& server) {
    std::shared_ptr<Stream> stream(new Stream(server));
    stream->self_ = stream;
    stream->accept();
  }

  static void on_event(const Tag& tag, bool ok) {
    if (!tag.stream->on_event(tag.is_read, ok)) {
      std::exchange(tag.stream->self_, nullptr);
    }
  }

  // Of any thread: ends a stream whose client may never send another message. One that
  // is in its environment, which may never come back, is left to look at `stopping`.
  void finish_if_waiting() {
    std::unique_lock lock(mu_, std::defer_lock);
    while (!lock.try_lock()) {
      if (in_environment_) return;
      std::this_thread::yield();
    }
    if (waits_for_client()) finish_stopping();
  }

  // Of sweep(): its time as a pending call is over.
  void end_overdue() {
    std::unique_lock lock(mu_, std::try_to_lock);
    if (!lock)
      return;  // It goes on just now; if it stays pending, the next sweep sees.
    {
      std::lock_guard server_lock(server_.mu);
      if (!pending_in_) return;
      deadline_ = std::chrono::steady_clock::now() + kFinishTimeout;
    }
    if (waits_for_client()) {
      finish({grpc::StatusCode::DEADLINE_EXCEEDED,
              "no Hello within " + in_seconds(server_.options.handshake_timeout)});
    } else {
      context_.TryCancel();  // The client does not take what is written to it.
    }
  }

 private:
  friend struct State;
  enum class Next {
    kAccepted,
    kHello,
    kWelcomed,
    kAction,
    kFinished,
  };

  explicit Stream(State& server) : server_(server) {}

  void accept() {
    std::lock_guard lock(mu_);
    expect(Next::kAccepted);
    server_.service->RequestCall(&context_, &call_, server_.cq.get(), server_.cq.get(),
                                 &tag_);
  }

  // False when the stream has come to its end.
  bool on_event(bool is_read, bool ok) {
    std::lock_guard lock(mu_);
    if (is_read) is_reading_ = false;
    is_ok_ = is_ok_ && ok;
    if (--num_pending_ > 0) {
      if (server_.stopping && waits_for_client()) finish_stopping();
      return true;
    }
    ok = std::exchange(is_ok_, true);
    switch (next_) {
      case Next::kAccepted:
        if (!ok) return false;  // The server stops.
        accept_next(server_);
        on_accepted();
        return true;
      case Next::kHello:
        if (ok) {
          guard([this] { on_hello(); });
        } else {
          finish(grpc::Status::OK);
        }
        return true;
      case Next::kWelcomed:
        if (ok) {
          guard([this] { on_welcomed(); });
        } else {
          finish(grpc::Status::CANCELLED);
        }
        return true;
      case Next::kAction:
        if (ok) {
          guard([this] { on_action(); });
        } else {
          finish(grpc::Status::OK);  // The client is done, or gone.
        }
        return true;
      case Next::kFinished:
        run_environment([this] { environment_.reset(); });
        std::lock_guard server_lock(server_.mu);
        leave_pending();
        if (is_counted_) --server_.num_streams;
        server_.streams.erase(self_);
        server_.changed.notify_all();
        return false;
    }
    return false;
  }

  void on_accepted() {
    const std::string& token = server_.options.security.token;
    const bool is_stream = context_.method() == kStreamMethod;
    const bool has_token = !token.empty() && shows(token);
    server_.add_pending(self_, is_stream && has_token);
    if (context_.method() == kHealthMethod) {
      answer_health_check();
    } else if (!is_stream) {
      finish({grpc::StatusCode::UNIMPLEMENTED,
              "no method " + context_.method() + " here, only " + kStreamMethod});
    } else if (!token.empty() && !has_token) {
      finish({grpc::StatusCode::UNAUTHENTICATED,
              "this server wants a token; pass the one that it was started with"});
    } else {
      read(Next::kHello);
    }
  }

  bool shows(const std::string& token) const {
    const auto& metadata = context_.client_metadata();
    const auto found = metadata.find("authorization");
    return found != metadata.end() &&
           is_authorized({found->second.data(), found->second.size()}, token);
  }

  // The pending call becomes a stream, or is told why not.
  bool begin_stream() {
    grpc::Status refused(
        grpc::StatusCode::RESOURCE_EXHAUSTED,
        "this server has max_streams=" + std::to_string(server_.options.max_streams) +
            " streams already");
    {
      std::lock_guard lock(server_.mu);
      if (!pending_in_) {  // Cancelled, as others came; its client knows by now.
        refused = grpc::Status::CANCELLED;
      } else if (server_.num_streams < server_.options.max_streams) {
        leave_pending();
        ++server_.num_streams;
        is_counted_ = true;
        return true;
      }
    }
    finish(refused);
    return false;
  }

  void leave_pending() {  // Needs server_.mu held.
    if (pending_in_) std::exchange(pending_in_, nullptr)->erase(pending_at_);
  }

  bool waits_for_client() const {
    return is_reading_ && num_pending_ == 1 && next_ != Next::kFinished;
  }

  void finish_stopping() {
    finish({grpc::StatusCode::UNAVAILABLE, "the server stops"});
  }

  // SERVING, for whichever service it asks, so the request is not read: anybody may
  // send one, and a long one. A server that stops no longer accepts calls.
  void answer_health_check() {
    expect(Next::kFinished);
    const grpc::Slice slice(std::string("\x08\x01"));
    call_.WriteAndFinish(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(),
                         grpc::Status::OK, &tag_);
  }

  void on_hello() {
    ReceivedMessage message(received_);
    const Hello hello = decode_hello(message.reader());
    if (!begin_stream()) return;
    take_spare();
    log(LogLevel::kInfo, "stream " + std::to_string(number_) + " of run \"" +
                             hello.run_id + "\" begins, from " + context_.peer());
    building_since_ = std::chrono::steady_clock::now();
    if (!environment_) {
      run_environment(
          [this] { environment_ = server_.options.make_environment(number_); });
    }
    if (!environment_) throw std::invalid_argument("no environment was made");
    const EnvSpec& spec = environment_->spec();
    step_message_.emplace(step_message(spec));
    if (step_message_->num_bytes() > server_.options.max_message_bytes) {
      throw std::invalid_argument(
          "a step of " + std::to_string(spec.num_envs) + " environments takes " +
          std::to_string(step_message_->num_bytes()) +
          " bytes, more than max_message_bytes=" +
          std::to_string(server_.options.max_message_bytes) +
          "; pass a smaller --envs_per_server, or a larger --max_message_bytes on both "
          "sides");
    }
    if (hello.takes_newest) {
      newest_message_.emplace(step_message(spec, /*newest=*/true));
      if (newest_message_->num_bytes() == step_message_->num_bytes()) {
        newest_message_.reset();  // Nothing is stacked.
      }
    }
    const grpc::Slice slice(encode_welcome(spec));
    if (hello.only_spec) {
      leave_spare();
      expect(Next::kFinished);
      call_.WriteAndFinish(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(),
                           grpc::Status::OK, &tag_);
      return;
    }
    output_.emplace(spec.num_envs);
    counter_.emplace(spec.num_envs);
    size_t num_bytes = 0;
    for (const LeafSpace& leaf : spec.action.leaves) {
      num_bytes += spec.num_envs * leaf.num_bytes();
    }
    action_bytes_.resize(num_bytes);
    std::byte* data = action_bytes_.data();
    for (const LeafSpace& leaf : spec.action.leaves) {
      const size_t size = spec.num_envs * leaf.num_bytes();
      action_views_.push_back({data, size, leaf.dtype == DType::kBool});
      actions_.push_back(data);
      data += size;
    }
    expect(Next::kWelcomed);
    call_.Write(grpc::ByteBuffer(&slice, 1), &tag_);
  }

  void take_spare() {
    std::lock_guard lock(server_.mu);
    environment_ = std::move(server_.spare);
    number_ = environment_ ? server_.spare_number : server_.next_number++;
  }

  void leave_spare() {
    std::lock_guard lock(server_.mu);
    if (server_.spare) return;  // Somebody else was faster.
    server_.spare = std::move(environment_);
    server_.spare_number = number_;
  }

  void on_welcomed() {
    send_step([this] { environment_->reset(*output_); });
    const std::chrono::duration<double> taken =
        std::chrono::steady_clock::now() - building_since_;
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.1f s", taken.count());
    log(LogLevel::kInfo, "stream " + std::to_string(number_) + " plays " +
                             environment_->spec().description + ", built in " +
                             seconds);
  }

  void on_action() {
    ReceivedMessage message(received_);
    decode_action(message.reader(), action_views_);
    check_actions();
    send_step([this] { environment_->step(actions_, *output_); });
  }

  void check_actions() const {
    const Space& space = environment_->spec().action;
    for (size_t i = 0; i < space.leaves.size(); ++i) {
      const LeafSpace& leaf = space.leaves[i];
      if (leaf.num_values == 0) continue;
      for (int64_t k = 0; k < environment_->spec().num_envs; ++k) {
        int64_t value;
        std::memcpy(&value, actions_[i] + k * sizeof(value), sizeof(value));
        // The difference may overflow for any value; as unsigned it wraps, and is
        // large.
        if (static_cast<uint64_t>(value) - static_cast<uint64_t>(leaf.start) >=
            static_cast<uint64_t>(leaf.num_values)) {
          throw ProtocolError("the action " + std::to_string(value) +
                              " of environment " + std::to_string(k) +
                              " is not one of " + std::to_string(leaf.start) + " to " +
                              std::to_string(leaf.start + leaf.num_values - 1));
        }
      }
    }
  }

  template <class Fn>
  void run_environment(Fn fn) {
    in_environment_ = true;
    try {
      fn();
    } catch (...) {
      in_environment_ = false;
      throw;
    }
    in_environment_ = false;
  }

  // Lets the environments write their observations into a message, and sends it.
  template <class Fn>
  void send_step(Fn step) {
    const EnvSpec& spec = environment_->spec();
    auto block = pool_.allocate(step_message_->num_bytes());
    const StepView view = step_view(spec, *step_message_, block.get());
    step_message_->write_frame(block.get());
    output_->observation.clear();
    for (const FieldView& field : view.observation) {
      output_->observation.push_back(field.data);
    }
    const auto began = std::chrono::steady_clock::now();
    run_environment(step);
    const std::chrono::duration<float> busy = std::chrono::steady_clock::now() - began;
    busy_seconds_.assign(output_->reward.size(), busy.count() / output_->reward.size());
    counter_->update(*output_);
    auto put = [](const FieldView& field, const auto& values) {
      std::memcpy(field.data, values.data(), field.num_bytes);
    };
    put(view.reward, output_->reward);
    put(view.terminated, output_->terminated);
    put(view.truncated, output_->truncated);
    put(view.first, counter_->first());
    put(view.episode_return, counter_->episode_return());
    put(view.episode_step, counter_->episode_step());
    put(view.busy_seconds, busy_seconds_);
    size_t num_bytes = step_message_->num_bytes();
    if (newest_message_) {
      auto previous = std::exchange(previous_, block);
      if (previous &&
          is_shifted(spec, step_view(spec, *step_message_, previous.get()), view)) {
        num_bytes = newest_message_->num_bytes();
        block = pool_.allocate(num_bytes);
        newest_message_->write_frame(block.get());
        copy_newest(spec, view,
                    step_view(spec, *newest_message_, block.get(), /*newest=*/true));
      }
    }
    auto* owner = new std::shared_ptr<std::byte>(block);
    const grpc::Slice slice(
        block.get(), num_bytes,
        [](void* data) { delete static_cast<std::shared_ptr<std::byte>*>(data); },
        owner);
    expect(Next::kAction);
    call_.Write(grpc::ByteBuffer(&slice, 1), &tag_);
    // At once, to be ready when the action comes; but second, as it begins by telling
    // the client that there is room.
    read(Next::kAction);
  }

  void expect(Next next) {
    next_ = next;
    ++num_pending_;
  }

  void read(Next next) {
    // Set before stop() looks at the streams. With a write under way, its end will see.
    if (server_.stopping && num_pending_ == 0) return finish_stopping();
    expect(next);
    is_reading_ = true;
    received_.Clear();
    call_.Read(&received_, &read_tag_);
  }

  void finish(const grpc::Status& status) {
    expect(Next::kFinished);
    call_.Finish(status, &tag_);
  }

  template <class Fn>
  void guard(Fn fn) {
    try {
      fn();
    } catch (const VersionError& error) {
      finish({grpc::StatusCode::FAILED_PRECONDITION, error.what()});
    } catch (const ProtocolError& error) {
      finish({grpc::StatusCode::INVALID_ARGUMENT, error.what()});
    } catch (const std::exception& error) {
      fail(error.what());
    } catch (...) {
      fail("an exception of unknown type");
    }
  }

  void fail(const std::string& reason) {
    log(LogLevel::kWarning, "stream " + std::to_string(number_) + " failed: " + reason);
    expect(Next::kFinished);
    const grpc::Slice slice(encode_failure(reason));
    call_.WriteAndFinish(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(),
                         {grpc::StatusCode::INTERNAL, first_line(reason)}, &tag_);
  }

  static constexpr std::chrono::seconds kFinishTimeout{1};

  State& server_;
  std::shared_ptr<Stream> self_;  // Until the last event.
  bool is_counted_ = false;  // In num_streams. Guarded by server_.mu, as those below.
  std::list<std::shared_ptr<Stream>>* pending_in_ =
      nullptr;  // None: it is not pending.
  std::list<std::shared_ptr<Stream>>::iterator pending_at_;
  std::chrono::steady_clock::time_point deadline_;  // While it is pending.
  std::atomic<bool> in_environment_{false};
  // Held through every event: which thread has them changes from one to the next.
  std::mutex mu_;
  int num_pending_ = 0;      // Operations.
  bool is_reading_ = false;  // One of them is the read.
  bool is_ok_ = true;        // All that ended since it went on.
  Next next_ = Next::kAccepted;
  Tag tag_{this, false}, read_tag_{this, true};
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter call_{&context_};
  grpc::ByteBuffer received_;
  uint64_t number_ = 0;
  std::chrono::steady_clock::time_point building_since_;
  std::unique_ptr<Environment> environment_;
  std::optional<FixedMessage> step_message_;
  std::optional<FixedMessage> newest_message_;  // Where the client takes it.
  std::shared_ptr<std::byte> previous_;         // The Step before, whole.
  std::optional<EnvOutput> output_;
  std::optional<EpisodeCounter> counter_;
  std::vector<float> busy_seconds_;
  std::vector<std::byte> action_bytes_;
  std::vector<FieldView> action_views_;
  std::vector<const std::byte*> actions_;
  BufferPool pool_;
};

// One thread at a time waits, others for it: several would take each other's events.
bool EnvServer::State::next_event(Event& event) {
  std::lock_guard lock(polling);
  if (!postponed.empty()) {
    event = postponed.front();
    postponed.pop_front();
    return true;
  }
  const gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const auto status = spin.next(*cq, &event.tag, &event.ok, never);
  return status == grpc::CompletionQueue::GOT_EVENT;
}

void EnvServer::State::add_pending(const std::shared_ptr<Stream>& stream,
                                   bool has_token) {
  std::shared_ptr<Stream> oldest;
  std::lock_guard lock(mu);
  streams.insert(stream);
  stream->deadline_ = std::chrono::steady_clock::now() + options.handshake_timeout;
  auto& calls = pending[has_token];
  if (!has_token && std::cmp_greater_equal(
                        calls.size(), int64_t{options.max_streams} + kMaxPending)) {
    oldest = calls.front();
    oldest->leave_pending();
    oldest->context_.TryCancel();
  }
  stream->pending_in_ = &calls;
  stream->pending_at_ = calls.insert(calls.end(), stream);
  if (!is_sweeping && !stopping) set_sweep();
}

void EnvServer::State::set_sweep() {
  const auto interval = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::min<std::chrono::nanoseconds>(
          options.handshake_timeout / 4 + std::chrono::milliseconds(1),
          std::chrono::seconds(1)));
  is_sweeping = true;
  sweep_at = std::chrono::steady_clock::now() + interval;
  alarm.Set(cq.get(),
            gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                         gpr_time_from_millis(interval.count(), GPR_TIMESPAN)),
            this);
}

void EnvServer::State::sweep() {
  std::vector<std::shared_ptr<Stream>> overdue;
  {
    std::lock_guard lock(mu);
    for (const auto& calls : pending) {
      for (const auto& stream : calls) {
        if (stream->deadline_ <= sweep_at) overdue.push_back(stream);
      }
    }
    is_sweeping = false;
    if (!stopping && !(pending[0].empty() && pending[1].empty())) set_sweep();
  }
  for (const auto& stream : overdue) stream->end_overdue();
}

void EnvServer::State::work(std::shared_ptr<State> self) {
  Event event;
  while (next_event(event)) {
    if (event.tag == this) {
      sweep();
    } else {
      Stream::on_event(*static_cast<Stream::Tag*>(event.tag), event.ok);
    }
    ++num_handled;
  }
  std::lock_guard lock(mu);
  --num_working;
  changed.notify_all();
  static_cast<void>(self);  // Kept until here: stop() may have given this thread up.
}

// gRPC answers pings only while somebody waits for events, and a client gives up a
// server that does not answer. So where all threads are in environments for long, this
// one waits in their place, and leaves them the events that come.
void EnvServer::State::keep_alive(std::shared_ptr<State> self) {
  int64_t num_seen = -1;
  std::unique_lock lock(mu);
  while (num_working > 0) {
    changed.wait_for(lock, kKeepAliveInterval);
    lock.unlock();
    const int64_t num_now = num_handled;
    if (std::unique_lock poll(polling, std::defer_lock);
        num_now == num_seen && poll.try_lock()) {
      auto status = grpc::CompletionQueue::TIMEOUT;
      while (num_handled == num_seen && status != grpc::CompletionQueue::SHUTDOWN) {
        Event event;
        status = cq->AsyncNext(&event.tag, &event.ok,
                               gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                            gpr_time_from_millis(20, GPR_TIMESPAN)));
        if (status == grpc::CompletionQueue::GOT_EVENT) postponed.push_back(event);
      }
    }
    num_seen = num_now;
    lock.lock();
  }
  static_cast<void>(self);  // As in work().
}

EnvServer::EnvServer(Options options) {
  check_server(options.address, options.security);
  if (options.num_threads < 1) {
    throw std::invalid_argument("num_threads: expected at least 1, got " +
                                std::to_string(options.num_threads));
  }
  if (options.handshake_timeout.count() < 1) {
    throw std::invalid_argument("handshake_timeout: expected at least 1 ms");
  }
  if (options.max_streams < 1) {
    throw std::invalid_argument("max_streams: expected at least 1, got " +
                                std::to_string(options.max_streams));
  }
  check_max_message_bytes(options.max_message_bytes);
  state_ = std::make_shared<State>(std::move(options));
  state_->address = state_->options.address;
}

EnvServer::~EnvServer() {
  try {
    stop();
  } catch (const TimeoutError& error) {
    log(LogLevel::kWarning, error.what());
  }
}

void EnvServer::start() {
  State& state = *state_;
  std::unique_lock lock(state.mu);
  if (state.started) throw std::invalid_argument("the server was started already");
  const Options& options = state.options;
  check_socket_is_free(options.address);
  prepare_process();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.address, server_credentials(options.security),
                           &port);
  state.service = std::make_unique<grpc::AsyncGenericService>();
  builder.RegisterAsyncGenericService(state.service.get());
  configure_server(
      builder, options.max_message_bytes,
      std::min(options.max_streams, std::numeric_limits<int>::max() - kMaxPending) +
          kMaxPending);
  state.cq = builder.AddCompletionQueue();
  state.server = builder.BuildAndStart();
  if (!state.server || (port == 0 && !options.address.starts_with("unix"))) {
    if (state.server) state.server->Shutdown();
    state.server.reset();
    state.cq->Shutdown();
    throw ConnectionError("cannot listen on " + options.address +
                          ": is the address in use, or the directory not writable?");
  }
  if (!options.address.starts_with("unix")) {
    state.address = options.address.substr(0, options.address.rfind(':') + 1) +
                    std::to_string(port);
  }
  state.started = true;
  state.num_working = options.num_threads;
  for (int i = 0; i < options.num_threads; ++i) {
    state.threads.emplace_back([self = state_, i] {
      name_this_thread("env-server-" + std::to_string(i));
      self->work(self);
    });
  }
  state.threads.emplace_back([self = state_] {
    name_this_thread("env-keepalive");
    self->keep_alive(self);
  });
  lock.unlock();  // A stream takes its own lock first, then this one.
  Stream::accept_next(state);
}

void EnvServer::wait(const Tick& tick) {
  std::unique_lock lock(state_->mu);
  if (!state_->started) throw std::invalid_argument("the server was not started");
  while (!state_->stopped) {
    state_->changed.wait_for(lock, kTickInterval);
    if (!tick || state_->stopped) continue;
    lock.unlock();
    tick();
    lock.lock();
  }
}

void EnvServer::stop(std::chrono::milliseconds grace) {
  State& state = *state_;
  const auto deadline = std::chrono::system_clock::now() + grace;
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(state.mu);
    if (!state.started || state.stopping.exchange(true)) return;
    if (state.is_sweeping) state.alarm.Cancel();
    streams.assign(state.streams.begin(), state.streams.end());
  }
  for (auto& stream : streams) stream->finish_if_waiting();
  streams.clear();
  // Shutdown waits for every call, also for one whose environment never comes back.
  std::thread shutdown([self = state_, deadline] {
    name_this_thread("env-server-stop");
    self->server->Shutdown(deadline);
    // gRPC aborts if a stream has yet to begin an operation on a queue that is shut
    // down.
    std::unique_lock lock(self->mu);
    self->changed.wait(lock, [&] { return self->streams.empty(); });
    std::unique_ptr<Environment> spare = std::move(self->spare);
    lock.unlock();
    spare.reset();
    self->cq->Shutdown();
  });
  bool all_ended;
  {
    std::unique_lock lock(state.mu);
    const auto none_works = [&] { return state.num_working == 0; };
    all_ended =
        state.changed.wait_for(lock, grace + std::chrono::seconds(1), none_works);
  }
  if (all_ended) {
    shutdown.join();
    for (std::thread& thread : state.threads) thread.join();
  } else {
    shutdown.detach();
    for (std::thread& thread : state.threads) thread.detach();
  }
  {
    std::lock_guard lock(state.mu);
    state.stopped = true;
    state.changed.notify_all();
  }
  if (!all_ended) {
    throw TimeoutError("an environment did not come back within " + in_seconds(grace) +
                       " of the server's stop; its thread is left behind");
  }
}

std::string EnvServer::address() const {
  std::lock_guard lock(state_->mu);
  return state_->address;
}

int EnvServer::num_streams() const {
  std::lock_guard lock(state_->mu);
  return state_->num_streams;
}

}  // namespace beast
