// SPDX-License-Identifier: Apache-2.0
#include "actor_pool.h"

#include <grpcpp/alarm.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "channel_settings.h"
#include "log.h"
#include "named_thread.h"
#include "rollout_writer.h"
#include "spin.h"
#include "wire.h"

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLogInterval{5};  // For each address.

// The first line of the text, and the last: of a traceback, that names the exception.
std::string in_one_line(const std::string& text) {
  const size_t end = text.find_last_not_of(" \n");
  const size_t first = text.find('\n');
  if (first == std::string::npos || end == std::string::npos || first > end) {
    return text.substr(0, end == std::string::npos ? 0 : end + 1);
  }
  const size_t last = text.rfind('\n', end) + 1;
  return text.substr(0, first) + " " + text.substr(last, end + 1 - last);
}

int default_num_threads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 4);
}

}  // namespace

// A completion queue and those who work on its streams, one thread at a time: gRPC is
// fastest where one thread makes all the calls. That is the loop's own thread; but
// where inference is quick, its thread does this work too while it waits for rows
// (help), and a step takes no wake-up from thread to thread. The own thread sleeps
// then, and comes back when the other has not been seen for kAway.
class ActorPool::Loop {
 public:
  void run();  // The own thread's, until shutdown().
  bool help(Clock::time_point until, std::optional<Clock::duration> away);
  void wake();                                // Of any thread: ends a wait for events.
  void post(std::shared_ptr<Stream> stream);  // Of any thread: send its action.
  // Of who works: the stream has a row, to be submitted with those of others whose
  // messages have come already. Bigger batches are cheaper ones.
  void submit_soon(Stream* stream) { to_submit_.push_back(stream); }
  void shutdown();
  grpc::CompletionQueue* cq() { return &cq_; }

 private:
  // Inference that takes less for 8 rows, or for fewer, is quick: no more work than
  // sending them. Above, the own thread works at the same time.
  static constexpr std::chrono::microseconds kQuick{200};
  static constexpr std::chrono::milliseconds kAway{10};

  // Sends what was posted, or waits for an event; handles all that have come, submits
  // what they brought. False after shutdown(), when nothing is left. Needs working_.
  bool work(Clock::time_point until);
  void send_posted(std::unique_lock<std::mutex>& lock);  // Needs mu_; gives it back.

  grpc::CompletionQueue cq_;
  std::mutex working_;              // Held by who works.
  std::vector<Stream*> to_submit_;  // Guarded by working_.
  Spin spin_;                       // Likewise.
  grpc::Alarm kick_;                // Its tag is this loop.
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Stream>> posted_;  // Guarded by mu_, as all below.
  bool is_waiting_ = false;                      // For events: a post must end that.
  bool is_kicked_ = false;
  bool is_shut_down_ = false;
  bool is_helped_ = false;    // Somebody is in help().
  bool was_refused_ = false;  // The own thread was at work then, and must go on.
  Clock::time_point last_help_;
  Clock::duration mean_away_ = 4 * kQuick;  // Of inference, with a batch.
};

struct ActorPool::State {
  explicit State(Options o) : options(std::move(o)) {}

  // The first error ends the run; queues that are closed end it without one.
  void fail(std::exception_ptr error) {
    std::lock_guard lock(mu);
    if (!first_error) first_error = error;
    changed.notify_all();
  }
  void end() {
    std::lock_guard lock(mu);
    ended = true;
    changed.notify_all();
  }
  std::shared_ptr<grpc::Channel> channel(const std::string& address);
  void check_spec(const EnvSpec& spec, const std::string& address);
  void lost(const std::string& address, const std::string& reason);
  void retire(Stream& stream, std::exception_ptr error, const std::string& reason);
  static void add_stream(const std::shared_ptr<State>& self,
                         const std::string& address);
  std::string last_errors_text();  // Needs mu held.

  const Options options;
  BufferPool pool;
  std::vector<std::unique_ptr<Loop>> loops;
  std::atomic<bool> stopping{false};
  std::atomic<int64_t> num_steps{0}, num_rollouts{0}, num_restarts{0};
  std::atomic<int64_t> environment_ns{0};
  mutable std::mutex mu;
  std::condition_variable changed;
  bool started = false;  // Guarded by mu, as all below.
  bool ended = false;
  std::exception_ptr first_error;
  std::exception_ptr first_retired;  // Why the first stream was.
  // That of the options, or of the first server that answered, at spec_address.
  std::optional<EnvSpec> spec = options.spec;
  std::string spec_address;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels;
  std::map<std::string, std::string> last_errors;
  std::map<std::string, Clock::time_point> last_logged;
  std::map<std::string, std::string> retired_reasons;  // By address; in the log.
  std::vector<std::shared_ptr<Stream>> streams;
  // Retired ones in whose place another is: a loop may still be about to leave them.
  std::vector<std::shared_ptr<Stream>> replaced;
};

// One stream of one server. At any time either an operation is pending on its
// completion queue (or two: a write, and the read of the answer), or inference, the
// learner queue or its loop's list has it.
class ActorPool::Stream : public std::enable_shared_from_this<Stream> {
 public:
  enum class Stage {
    kConnecting,
    kEnvironment,
    kInference,
    kQueue,
    kRetired,
    kStopped,
  };
  struct Tag {  // What a completion queue gives back.
    Stream* stream;
    bool is_write;
  };

  Stream(std::shared_ptr<State> pool, std::string address, Loop* loop,
         std::shared_ptr<grpc::Channel> channel)
      : owner_(std::move(pool)),
        address_(std::move(address)),
        loop_(loop),
        stub_(std::move(channel)) {}

  void connect() {
    std::lock_guard lock(mu_);
    begin_call();
  }

  void on_event(bool is_write, bool ok) {
    std::lock_guard lock(mu_);
    (is_write ? has_written_ : is_ok_) = ok;
    if (--num_pending_ > 0) return;
    if (pool_.stopping) {
      release();
      return;
    }
    if (next_ == Next::kBackedOff) return begin_call();
    if (next_ == Next::kFinished) return on_finished();
    if (!is_ok_) return finish();
    if (!std::exchange(has_written_, true)) {
      num_to_drain_ = kMaxDrained;
      return read(Next::kDrained);
    }
    try {
      switch (next_) {
        case Next::kStarted:  // There is a server; it may take long to begin.
          stage_ = Stage::kEnvironment;
          step_began_ = Clock::now();
          exchange(grpc::Slice(encode_hello(pool_.options.run_id, /*only_spec=*/false,
                                            /*takes_newest=*/true)),
                   Next::kWelcome);
          break;
        case Next::kWelcome:
          on_welcome();
          break;
        case Next::kStep:
          on_step();
          break;
        case Next::kDrained:
          if (--num_to_drain_ == 0) context_->TryCancel();
          read(Next::kDrained);
          break;
        case Next::kBackedOff:
        case Next::kFinished:
          break;
      }
    } catch (const ServerFailure& error) {
      context_->TryCancel();  // It should end the call now, but who knows.
      fail_stream("the environment raised:\n" + std::string(error.what()));
    } catch (const RolloutWriter::BadRow& error) {
      context_->TryCancel();
      fail_stream(error.what());
    } catch (const VersionError& error) {
      retire(ConnectionError(address_ + ": " + error.what()));
    } catch (const ProtocolError& error) {
      context_->TryCancel();
      fail_stream(std::string("the server broke the protocol: ") + error.what());
    } catch (const ClosedBatchingQueue&) {
      pool_.end();
      release();
    } catch (...) {
      fail_run(std::current_exception());
    }
  }

  // Of the loop, some time after submit_soon.
  void submit(bool more_follow) {
    std::lock_guard lock(mu_);
    if (stage_ != Stage::kInference) return;  // Stopped meanwhile.
    try {
      pool_.options.inference_batcher->compute_async(
          writer_->inputs(),
          [self = shared_from_this()](const Nest* outputs, int64_t begin, int64_t end,
                                      std::exception_ptr error) {
            self->on_answer(outputs, begin, end, error);
          },
          more_follow);
    } catch (const ClosedBatchingQueue&) {
      pool_.end();
      release();
    } catch (...) {
      fail_run(std::current_exception());
    }
  }

  // Of the loop, some time after it was posted.
  void send_action() {
    std::lock_guard lock(mu_);
    if (stage_ != Stage::kEnvironment) return;  // Stopped meanwhile.
    if (pool_.stopping) return release();
    write_action();
  }

  // Begins to end; what is pending comes back soon.
  void stop() {
    std::lock_guard lock(mu_);
    if (num_pending_ == 0) {
      release();
    } else if (next_ == Next::kBackedOff) {
      alarm_.Cancel();
    } else {
      context_->TryCancel();
    }
  }

  void check_step_timeout(Clock::time_point now) {
    std::lock_guard lock(mu_);
    if (stage_ != Stage::kEnvironment || num_pending_ == 0 || !reason_.empty()) return;
    if (now - step_began_ < pool_.options.step_timeout) return;
    reason_ = "no answer to a step within " + in_seconds(pool_.options.step_timeout);
    is_failure_ = true;
    context_->TryCancel();
  }

  Stage stage() const { return stage_; }
  bool is_connected() const {
    const Stage stage = stage_;
    return stage == Stage::kEnvironment || stage == Stage::kInference ||
           stage == Stage::kQueue;
  }
  const std::string& address() const { return address_; }
  void set_retired() { stage_ = Stage::kRetired; }  // Of State::retire().

 private:
  enum class Next {
    kBackedOff,
    kStarted,
    kWelcome,
    kStep,
    kDrained,  // Read after a write failed: gRPC tells why only after the last message.
    kFinished,
  };
  static constexpr int kMaxDrained = 100;

  void begin_call() {
    if (pool_.stopping) return release();
    stage_ = Stage::kConnecting;
    reason_.clear();
    is_failure_ = false;
    had_step_ = false;
    has_written_ = true;
    context_ = std::make_unique<grpc::ClientContext>();
    if (const std::string& token = pool_.options.security.token; !token.empty()) {
      try {
        if (!is_socket_safe(address_)) return back_off(kNoSocket);
      } catch (const ConnectionError& error) {
        return retire(error);
      }
      context_->AddMetadata("authorization", "Bearer " + token);
    }
    call_ = stub_.PrepareCall(context_.get(), kStreamMethod, loop_->cq());
    expect(Next::kStarted);
    call_->StartCall(&tag_);
  }

  void expect(Next next, int num_pending = 1) {
    next_ = next;
    num_pending_ = num_pending;
  }

  void read(Next next) {
    received_.Clear();
    expect(next);
    call_->Read(&received_, &tag_);
  }

  // Writes, and reads the answer. The read begins at once, to be ready when it comes,
  // but second: it begins by telling the server that there is room.
  void exchange(const grpc::Slice& slice, Next next) {
    received_.Clear();
    expect(next, 2);
    call_->Write(grpc::ByteBuffer(&slice, 1), &write_tag_);
    call_->Read(&received_, &tag_);
  }

  void finish() {
    expect(Next::kFinished);
    call_->Finish(&status_, &tag_);
  }

  void on_welcome() {
    ReceivedMessage message(received_);
    EnvSpec spec = decode_welcome(message.reader(), pool_.options.max_message_bytes);
    try {
      pool_.check_spec(spec, address_);
    } catch (const std::invalid_argument& error) {
      return retire(error);
    }
    action_message_.emplace(action_message(spec));
    action_bytes_.resize(action_message_->num_bytes());
    action_message_->write_frame(action_bytes_.data());
    writer_.emplace(std::move(spec), pool_.options.unroll_length,
                    pool_.options.initial_agent_state, pool_.pool,
                    pool_.options.channels_last);
    read(Next::kStep);
  }

  void on_step() {
    ReceivedMessage message(received_);
    decode_step(message.reader(), writer_->next_row());
    writer_->check_next_row();
    pool_.environment_ns += static_cast<int64_t>(1e9 * writer_->busy_seconds());
    if (had_step_) pool_.num_steps += writer_->spec().num_envs;
    had_step_ = true;
    stage_ = Stage::kInference;
    loop_->submit_soon(this);
  }

  // Of the thread that answers. With no pending operation, nobody else comes here.
  void on_answer(const Nest* outputs, int64_t begin, int64_t end,
                 std::exception_ptr error) {
    std::optional<Nest> rollout;
    {
      std::lock_guard lock(mu_);
      if (stage_ != Stage::kInference) return;  // The pool was stopped meanwhile.
      try {
        if (error) std::rethrow_exception(error);
        writer_->answer(*outputs, begin, end);
        rollout = writer_->rollout();
      } catch (const ClosedBatchingQueue&) {
        pool_.end();
        return release();
      } catch (...) {
        return fail_run(std::current_exception());
      }
      if (!rollout) return post_action();
      stage_ = Stage::kQueue;
    }
    // Without the lock: where there is room, the answer comes before this returns.
    try {
      pool_.options.learner_queue->enqueue_async(
          std::move(*rollout), [self = shared_from_this()](std::exception_ptr error) {
            self->on_enqueued(error);
          });
    } catch (...) {
      on_enqueued(std::current_exception());
    }
  }

  void on_enqueued(std::exception_ptr error) {
    if (!error) ++pool_.num_rollouts;  // Also where the pool was stopped meanwhile.
    std::lock_guard lock(mu_);
    if (stage_ != Stage::kQueue) return;
    try {
      if (error) std::rethrow_exception(error);
      num_failures_ = 0;
      backoff_ = pool_.options.min_backoff;
      post_action();
    } catch (const ClosedBatchingQueue&) {
      pool_.end();
      release();
    } catch (...) {
      fail_run(std::current_exception());
    }
  }

  void post_action() {
    stage_ = Stage::kEnvironment;
    step_began_ = Clock::now();
    loop_->post(shared_from_this());
  }

  void write_action() {
    const auto& leaves = writer_->spec().action.leaves;
    for (size_t i = 0; i < leaves.size(); ++i) {
      std::memcpy(action_bytes_.data() + action_message_->offset(i), writer_->action(i),
                  writer_->spec().num_envs * leaves[i].num_bytes());
    }
    exchange(grpc::Slice(action_bytes_.data(), action_bytes_.size()), Next::kStep);
  }

  // This stream is to end for that reason, which counts as its failure.
  void fail_stream(std::string reason) {
    reason_ = std::move(reason);
    is_failure_ = true;
    finish();
  }

  void fail_run(std::exception_ptr error) {
    pool_.fail(error);
    release();
  }

  // This stream ends for good, for a reason that is its server's.
  template <class Error>
  void retire(const Error& error) {
    drop_call();
    pool_.retire(*this, std::make_exception_ptr(error), error.what());
  }

  void on_finished() {
    if (reason_.empty()) reason_ = status_.error_message();
    if (reason_.empty()) reason_ = "the server ended the stream";
    if (had_step_) ++pool_.num_restarts;
    if (is_final(status_)) return retire(ConnectionError(address_ + ": " + reason_));
    is_failure_ = is_failure_ ||
                  status_.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                  status_.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
    if (is_failure_ && ++num_failures_ >= pool_.options.max_failures) {
      return retire(
          std::runtime_error(address_ + " failed " + std::to_string(num_failures_) +
                             " times with no rollout in between; at last " + reason_));
    }
    back_off(reason_);
  }

  void back_off(const std::string& reason) {
    pool_.lost(address_, reason);
    drop_call();
    stage_ = Stage::kConnecting;
    expect(Next::kBackedOff);
    alarm_.Set(loop_->cq(), std::chrono::system_clock::now() + backoff_, &tag_);
    backoff_ = std::min(2 * backoff_, pool_.options.max_backoff);
  }

  void drop_call() {
    writer_.reset();  // With the rollout that it was at.
    received_.Clear();
    call_.reset();
    context_.reset();
  }

  void release() {
    if (stage_ != Stage::kRetired) stage_ = Stage::kStopped;
    drop_call();
  }

  const std::shared_ptr<State> owner_;
  State& pool_ = *owner_;
  const std::string address_;
  Loop* const loop_;
  grpc::GenericStub stub_;
  std::atomic<Stage> stage_{Stage::kConnecting};  // Written with mu_ held.
  std::mutex mu_;
  Next next_ = Next::kStarted;  // Guarded by mu_, as all below.
  int num_pending_ = 0;         // Operations on the queue, which end in on_event().
  bool is_ok_ = false;          // The last one that was no write.
  bool has_written_ = true;     // The write that went with it, if there was one.
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  Tag tag_{this, false}, write_tag_{this, true};
  grpc::Alarm alarm_;
  grpc::ByteBuffer received_;
  grpc::Status status_;
  std::optional<FixedMessage> action_message_;
  std::vector<std::byte> action_bytes_;
  std::optional<RolloutWriter> writer_;
  int num_to_drain_ = 0;
  bool had_step_ = false;
  bool is_failure_ = false;
  std::string reason_;  // Why it ends, where that is known here.
  int num_failures_ = 0;
  std::chrono::milliseconds backoff_ = pool_.options.min_backoff;
  Clock::time_point step_began_;
};

void ActorPool::Loop::run() {
  while (true) {
    {
      std::lock_guard working(working_);
      if (!work(Clock::now() + kTickInterval)) return;
    }
    std::unique_lock lock(mu_);
    while (!is_shut_down_ && !was_refused_ && mean_away_ <= kQuick &&
           (is_helped_ || Clock::now() - last_help_ < kAway)) {
      changed_.wait_for(lock, kAway);
    }
    was_refused_ = false;
  }
}

bool ActorPool::Loop::help(Clock::time_point until,
                           std::optional<Clock::duration> away) {
  {
    std::lock_guard lock(mu_);
    if (away) mean_away_ += (*away - mean_away_) / 8;
    if (mean_away_ > kQuick || is_shut_down_) {
      changed_.notify_one();
      return false;
    }
    is_helped_ = true;
  }
  bool has_worked = false;
  std::unique_lock working(working_, std::try_to_lock);
  const bool is_refused = !working;
  if (working) {
    has_worked = work(until);
    working.unlock();
  }
  std::lock_guard lock(mu_);
  is_helped_ = false;
  last_help_ = Clock::now();
  if (is_refused) {
    was_refused_ = true;
    changed_.notify_one();
  }
  return has_worked;
}

bool ActorPool::Loop::work(Clock::time_point until) {
  const gpr_timespec no_wait = gpr_inf_past(GPR_CLOCK_MONOTONIC);
  gpr_timespec deadline = no_wait;
  std::unique_lock lock(mu_);
  if (posted_.empty()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now());
    deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                            gpr_time_from_micros(left.count(), GPR_TIMESPAN));
    is_waiting_ = true;
  }
  send_posted(lock);
  while (true) {
    void* tag;
    bool ok;
    const bool waits = deadline.tv_sec != no_wait.tv_sec;
    const auto status = waits ? spin_.next(cq_, &tag, &ok, deadline)
                              : cq_.AsyncNext(&tag, &ok, no_wait);
    if (waits) {
      std::lock_guard is_waiting_lock(mu_);
      is_waiting_ = false;
    }
    deadline = no_wait;
    if (status == grpc::CompletionQueue::SHUTDOWN) return false;
    if (status == grpc::CompletionQueue::TIMEOUT) break;
    if (tag != this) {
      const auto [stream, is_write] = *static_cast<Stream::Tag*>(tag);
      stream->on_event(is_write, ok);
      continue;
    }
    lock.lock();
    is_kicked_ = false;
    send_posted(lock);
  }
  for (size_t i = 0; i < to_submit_.size(); ++i) {
    to_submit_[i]->submit(/*more_follow=*/i + 1 < to_submit_.size());
  }
  to_submit_.clear();
  return true;
}

void ActorPool::Loop::send_posted(std::unique_lock<std::mutex>& lock) {
  std::vector<std::shared_ptr<Stream>> posted;
  posted.swap(posted_);
  lock.unlock();
  for (auto& stream : posted) stream->send_action();
}

void ActorPool::Loop::post(std::shared_ptr<Stream> stream) {
  {
    std::lock_guard lock(mu_);
    posted_.push_back(std::move(stream));
    if (!is_waiting_) return;  // Whoever works next sends it first.
  }
  wake();
}

void ActorPool::Loop::wake() {
  std::lock_guard lock(mu_);
  if (!is_waiting_ || is_kicked_ || is_shut_down_) return;
  is_kicked_ = true;
  // Long over: anything later, also "now", would go by way of gRPC's timer thread.
  kick_.Set(&cq_, gpr_inf_past(GPR_CLOCK_MONOTONIC), this);
}

void ActorPool::Loop::shutdown() {
  std::lock_guard lock(mu_);
  posted_.clear();  // They hold the pool's state, which holds this loop.
  if (is_shut_down_) return;
  is_shut_down_ = true;
  changed_.notify_all();
  cq_.Shutdown();
}

std::shared_ptr<grpc::Channel> ActorPool::State::channel(const std::string& address) {
  auto& channel = channels[address];
  if (channel) return channel;
  channel = make_channel(address, options.security, options.max_message_bytes);
  return channel;
}

void ActorPool::State::check_spec(const EnvSpec& got, const std::string& address) {
  std::lock_guard lock(mu);
  if (const int64_t most = options.inference_batcher->maximum_batch_size();
      got.num_envs > most) {
    throw std::invalid_argument(
        address + " serves " + std::to_string(got.num_envs) +
        " environments in a stream, more than maximum_batch_size=" +
        std::to_string(most) + " of inference_batcher; serve fewer of them");
  }
  if (!spec) {
    spec = got;
    spec_address = address;
    return;
  }
  const std::string where =
      "the environment at " + address + " is not like the one " +
      (spec_address.empty() ? "that the agent is built for" : "at " + spec_address) +
      "; ";
  spec->observation.check_same(got.observation, where + "observation");
  spec->action.check_same(got.action, where + "action");
}

void ActorPool::State::retire(Stream& retired, std::exception_ptr error,
                              const std::string& reason) {
  const std::string& address = retired.address();
  int64_t num_left = 0;
  {
    std::lock_guard lock(mu);
    retired.set_retired();  // With the lock, so that stats() has the reason, too.
    last_errors[address] = reason;
    if (!first_retired) first_retired = error;
    for (const auto& stream : streams) {
      num_left += stream->stage() != Stream::Stage::kRetired;
    }
    if (num_left == 0 && !first_error) {
      first_error = first_retired;
      changed.notify_all();
      if (first_error == error) return;  // run() tells it.
    }
    if (std::exchange(retired_reasons[address], reason) == reason) return;
  }
  const std::string left =
      num_left == 0 ? ". No stream is left; "
      : num_left == 1
          ? ". The run goes on with 1 stream; "
          : ". The run goes on with " + std::to_string(num_left) + " streams; ";
  log(LogLevel::kError, "retired a stream to " + address + ": " + in_one_line(reason) +
                            left +
                            "mend that server, then list its address again in "
                            "--server_addresses_file, or "
                            "start the run again");
}

void ActorPool::State::lost(const std::string& address, const std::string& reason) {
  {
    std::lock_guard lock(mu);
    last_errors[address] = reason;
    const auto now = Clock::now();
    auto [logged, is_new] = last_logged.try_emplace(address, now);
    if (!is_new && now - logged->second < kLogInterval) return;
    logged->second = now;
  }
  log(LogLevel::kWarning, "no stream to " + address + " for now: " + reason);
}

std::string ActorPool::State::last_errors_text() {
  std::string text;
  for (const auto& [address, stub] : channels) {
    const auto found = last_errors.find(address);
    text += "\n  " + address + ": " +
            (found == last_errors.end() ? "no answer" : found->second);
  }
  return text;
}

void ActorPool::State::add_stream(const std::shared_ptr<State>& self,
                                  const std::string& address) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(self->mu);
    const auto retired = std::find_if(
        self->streams.begin(), self->streams.end(), [&](const auto& other) {
          return other->address() == address &&
                 other->stage() == Stream::Stage::kRetired;
        });
    if (retired != self->streams.end()) {
      self->replaced.push_back(std::move(*retired));
      self->streams.erase(retired);
      self->retired_reasons.erase(address);
    }
    Loop* loop = self->loops[self->streams.size() % self->loops.size()].get();
    stream = std::make_shared<Stream>(self, address, loop, self->channel(address));
    self->streams.push_back(stream);
    if (!self->started) return;
  }
  stream->connect();
}

ActorPool::ActorPool(Options options) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (!options.learner_queue || !options.inference_batcher) {
    refuse("learner_queue and inference_batcher: expected both, got None");
  }
  if (options.unroll_length < 1) {
    refuse("unroll_length: expected at least 1, got " +
           std::to_string(options.unroll_length));
  }
  if (options.addresses.empty()) {
    refuse("env_server_addresses: expected at least one, got none");
  }
  if (options.max_failures < 1) {
    refuse("max_failures: expected at least 1, got " +
           std::to_string(options.max_failures));
  }
  for (int64_t dim :
       {options.learner_queue->batch_dim(), options.inference_batcher->batch_dim()}) {
    if (dim != 1) {
      refuse("batch_dim of the queue and the batcher: expected 1, got " +
             std::to_string(dim));
    }
  }
  if (!options.initial_agent_state.leaves.empty() &&
      num_rows(options.initial_agent_state, 1) != 1) {
    refuse("initial_agent_state: expected one row in dimension 1, got shape " +
           options.initial_agent_state.leaves[0].shape.str());
  }
  check_max_message_bytes(options.max_message_bytes);
  for (const std::string& address : options.addresses) check_address(address);
  channel_credentials(options.security);  // Throws what is wrong with the files.
  const int num_threads =
      options.num_threads > 0 ? options.num_threads : default_num_threads();
  const std::vector<std::string> addresses = options.addresses;
  state_ = std::make_shared<State>(std::move(options));
  for (int i = 0; i < num_threads; ++i) {
    state_->loops.push_back(std::make_unique<Loop>());
  }
  for (const std::string& address : addresses) State::add_stream(state_, address);
}

ActorPool::~ActorPool() {
  std::vector<std::shared_ptr<Stream>> streams, replaced;  // They hold the state.
  std::lock_guard lock(state_->mu);
  streams.swap(state_->streams);
  replaced.swap(state_->replaced);
  for (auto& loop : state_->loops) loop->shutdown();
}

void ActorPool::run(const Tick& tick) {
  State& state = *state_;
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(state.mu);
    if (state.started) throw std::invalid_argument("run() was called already");
    state.started = true;
    streams = state.streams;
  }
  std::vector<NamedThread> threads;
  for (size_t i = 0; i < state.loops.size(); ++i) {
    threads.emplace_back("actors-" + std::to_string(i),
                         [loop = state.loops[i].get()] { loop->run(); });
  }
  if (state.loops.size() == 1) {
    state.options.inference_batcher->set_helper(
        std::make_shared<DynamicBatcher::Helper>(DynamicBatcher::Helper{
            [self = state_](Clock::time_point until,
                            std::optional<Clock::duration> away) {
              return self->loops[0]->help(until, away);
            },
            [self = state_] { self->loops[0]->wake(); }}));
  }
  for (auto& stream : streams) stream->connect();
  std::unique_lock lock(state.mu);
  std::exception_ptr error;
  auto last_connected = Clock::now();
  while (true) {
    if (state.first_error) error = state.first_error;
    if (error || state.ended || state.options.learner_queue->is_closed() ||
        state.options.inference_batcher->is_closed()) {
      break;
    }
    state.changed.wait_for(lock, kTickInterval);
    streams = state.streams;
    lock.unlock();
    const auto now = Clock::now();
    for (auto& stream : streams) {
      if (stream->is_connected()) last_connected = now;
      stream->check_step_timeout(now);
    }
    try {
      if (tick) tick();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (now - last_connected > state.options.connect_timeout && !error) {
      error = std::make_exception_ptr(ConnectionError(
          "no env server for " + in_seconds(state.options.connect_timeout) + ":" +
          state.last_errors_text() +
          "\nstart one with \"python -m polybeast_env\", or check the addresses"));
    }
  }
  state.stopping = true;
  streams = state.streams;
  lock.unlock();
  for (auto& stream : streams) stream->stop();
  state.options.inference_batcher->set_helper(nullptr);
  for (auto& loop : state.loops) loop->shutdown();
  threads.clear();  // Joins them: all that was pending has come back then.
  if (error) std::rethrow_exception(error);
}

void ActorPool::stop() { state_->end(); }

void ActorPool::add_address(const std::string& address) {
  check_address(address);
  State::add_stream(state_, address);
}

int64_t ActorPool::count() const { return state_->num_steps; }

ActorPool::Stats ActorPool::stats() const {
  Stats stats;
  stats.num_steps = state_->num_steps;
  stats.num_rollouts = state_->num_rollouts;
  stats.num_restarts = state_->num_restarts;
  stats.environment_seconds = 1e-9 * static_cast<double>(state_->environment_ns);
  std::lock_guard lock(state_->mu);
  stats.last_errors = state_->last_errors;
  for (const auto& stream : state_->streams) {
    switch (stream->stage()) {
      case Stream::Stage::kConnecting:
        ++stats.connecting;
        break;
      case Stream::Stage::kEnvironment:
        ++stats.in_environment;
        break;
      case Stream::Stage::kInference:
        ++stats.in_inference;
        break;
      case Stream::Stage::kQueue:
        ++stats.in_learner_queue;
        break;
      case Stream::Stage::kRetired:
        ++stats.retired[stream->address()];
        continue;
      case Stream::Stage::kStopped:
        break;
    }
    ++stats.num_streams;
  }
  return stats;
}

}  // namespace beast
