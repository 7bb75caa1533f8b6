// SPDX-License-Identifier: Apache-2.0
// Environments whose every number is known, sockets for their servers, and a client
// that sends whatever a test wants. For tests.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/method_handler.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "env_server.h"
#include "environment.h"
#include "log.h"
#include "messages.h"

namespace beast::test {

// A directory for sockets, gone in the end.
class TempDir {
 public:
  TempDir() {
    char path[] = "/tmp/beast-test-XXXXXX";
    if (mkdtemp(path) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = path;
  }
  TempDir(const TempDir&) = delete;
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string address(const std::string& name = "env") const {
    return "unix:" + path_ + "/" + name;
  }

 private:
  std::string path_;
};

// Keeps what is logged out of the tests' output, and for those who ask.
class LogCapture {
 public:
  LogCapture() {
    set_log_sink([text = text_](LogLevel, const std::string& message) {
      std::lock_guard lock(text->mu);
      text->all += message + "\n";
    });
  }
  ~LogCapture() { set_log_sink({}); }
  std::string text() const {
    std::lock_guard lock(text_->mu);
    return text_->all;
  }

 private:
  struct Text {
    std::mutex mu;
    std::string all;  // Guarded by mu.
  };
  const std::shared_ptr<Text> text_ = std::make_shared<Text>();
};

// Whoever comes waits until it is open.
class Gate {
 public:
  void open() {
    std::lock_guard lock(mu_);
    is_open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mu_);
    ++num_waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return is_open_; });
    --num_waiting_;
  }
  void await_waiting(int count) {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return num_waiting_ >= count; });
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  bool is_open_ = false;  // Guarded by mu_, as all below.
  int num_waiting_ = 0;
};

// K environments that count. Environment k ends its episodes after length + k steps, by
// turns in a termination and a truncation. What it observes:
//
//   env     k
//   frame   how often it stepped since it was made, resets and all
//   heard   the action that it was just given; -1 at first
//   stream  the number of its stream
//   flags   bool: whether the frame is odd, and whether it is even
//   window  the last kWindow frames of the episode, each as two bytes: its number
//           modulo 256 and k; where there were fewer, the first of them again
//
// A step earns the action's value.
class CountingEnv : public Environment {
 public:
  struct Options {
    int64_t num_envs = 1;
    int64_t length = 5;
    int64_t num_actions = 4;
    int64_t raise_at = -1;  // The frame; 0 is the reset.
    int64_t wait_at = -1;   // Likewise, at the gate.
    std::string reason = "the dice\nfell off the table";
    std::chrono::microseconds delay{0};
    std::shared_ptr<Gate> gate = nullptr;
  };
  static constexpr int64_t kWindow = 3;
  static inline std::atomic<int> num_live{0};

  static EnvSpec make_spec(const Options& options) {
    const Structure::Ptr leaf = Structure::leaf();
    EnvSpec spec;
    spec.num_envs = options.num_envs;
    spec.description = "Counting";
    spec.observation.structure = Structure::dict({{"env", leaf},
                                                  {"flags", leaf},
                                                  {"frame", leaf},
                                                  {"heard", leaf},
                                                  {"stream", leaf},
                                                  {"window", leaf}});
    const LeafSpace number = test::leaf(DType::kInt64, {});
    spec.observation.leaves = {number, test::leaf(DType::kBool, {2}),
                               number, number,
                               number, test::leaf(DType::kUInt8, {kWindow, 1, 2})};
    spec.action = single(discrete(options.num_actions));
    return spec;
  }

  CountingEnv(Options options, uint64_t stream)
      : options_(std::move(options)),
        spec_(make_spec(options_)),
        stream_(static_cast<int64_t>(stream)),
        steps_(options_.num_envs),
        num_episodes_(options_.num_envs),
        ended_(options_.num_envs, true),
        windows_(options_.num_envs) {
    ++num_live;
  }
  ~CountingEnv() override { --num_live; }

  const EnvSpec& spec() const override { return spec_; }

  void reset(EnvOutput& output) override {
    happen();
    for (int64_t k = 0; k < options_.num_envs; ++k) {
      observe(k, -1, output);
      ended_[k] = false;
      output.reward[k] = 99;  // Which nothing earned.
    }
  }

  void step(const std::vector<const std::byte*>& actions, EnvOutput& output) override {
    ++frame_;
    happen();
    for (int64_t k = 0; k < options_.num_envs; ++k) {
      int64_t action;
      std::memcpy(&action, actions.at(0) + k * 8, 8);
      observe(k, action, output);
      output.terminated[k] = output.truncated[k] = 0;
      if (ended_[k]) {
        ended_[k] = false;
        steps_[k] = 0;
        output.reward[k] = 99;
        continue;
      }
      output.reward[k] = static_cast<float>(action);
      if (++steps_[k] < options_.length + k) continue;
      ended_[k] = true;
      (num_episodes_[k]++ % 2 == 0 ? output.terminated : output.truncated)[k] = 1;
    }
  }

 private:
  void happen() {
    if (options_.delay.count() > 0) std::this_thread::sleep_for(options_.delay);
    if (frame_ == options_.wait_at) options_.gate->pass();
    if (frame_ == options_.raise_at) throw std::runtime_error(options_.reason);
  }

  void observe(int64_t k, int64_t heard, EnvOutput& output) {
    const int64_t numbers[] = {k, 0, frame_, heard, stream_};
    for (size_t leaf : {0, 2, 3, 4}) {
      std::memcpy(output.observation.at(leaf) + 8 * k, &numbers[leaf], 8);
    }
    output.observation.at(1)[2 * k] = std::byte(frame_ % 2 == 1);
    output.observation.at(1)[2 * k + 1] = std::byte(frame_ % 2 == 0);
    Window& window = windows_[k];
    const std::array<std::byte, 2> newest{std::byte(frame_ % 256), std::byte(k)};
    std::shift_left(window.begin(), window.end(), 1);
    window.back() = newest;
    if (ended_[k]) window.fill(newest);
    std::memcpy(output.observation.at(5) + k * sizeof(window), &window, sizeof(window));
  }

  const Options options_;
  const EnvSpec spec_;
  const int64_t stream_;
  int64_t frame_ = 0;
  std::vector<int64_t> steps_, num_episodes_;  // Of the episode; so far.
  std::vector<bool> ended_;                    // Then the next step begins another one.
  using Window = std::array<std::array<std::byte, 2>, kWindow>;
  std::vector<Window> windows_;
};

// The options of a server of them; num_threads and all the rest may be changed.
inline EnvServer::Options serving(const std::string& address,
                                  CountingEnv::Options options = {}) {
  EnvServer::Options server;
  server.address = address;
  server.make_environment = [options](uint64_t stream) {
    return std::make_unique<CountingEnv>(options, stream);
  };
  return server;
}

// Until the condition holds, or a while has passed; then whether it holds.
template <class Fn>
bool soon(Fn condition, std::chrono::milliseconds limit = std::chrono::seconds(10)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return condition();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline int num_threads_now() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

// --- A client of plain bytes ---

inline std::shared_ptr<grpc::Channel> plain_channel(const std::string& address,
                                                    int number = 0) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // A server that comes back is found at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 10);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 50);
  // Channels with other arguments have other connections.
  arguments.SetInt("beast.channel_number", number);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   arguments);
}

// One call, whose operations wait until they are done.
class RawStream {
 public:
  struct Options {
    std::string authorization = "";  // Metadata, if not empty.
    std::string method = kStreamMethod;
    std::chrono::milliseconds deadline{30'000};
  };

  explicit RawStream(const std::string& address) : RawStream(plain_channel(address)) {}
  explicit RawStream(std::shared_ptr<grpc::Channel> channel)
      : RawStream(std::move(channel), Options()) {}
  RawStream(std::shared_ptr<grpc::Channel> channel, const Options& options)
      : stub_(std::move(channel)) {
    context_.set_deadline(std::chrono::system_clock::now() + options.deadline);
    if (!options.authorization.empty()) {
      context_.AddMetadata("authorization", options.authorization);
    }
    call_ = stub_.PrepareCall(&context_, options.method, &cq_);
    call_->StartCall(nullptr);
    await();
  }
  ~RawStream() {
    context_.TryCancel();
    call_.reset();
    cq_.Shutdown();
    void* tag;
    bool ok;
    while (cq_.Next(&tag, &ok)) {
    }
  }

  bool write(const std::string& message) {  // Whether it went out.
    const grpc::Slice slice(message);
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    return await();
  }
  std::optional<std::string> read() {  // Nothing at the stream's end.
    grpc::ByteBuffer buffer;
    call_->Read(&buffer, nullptr);
    if (!await()) return std::nullopt;
    grpc::Slice slice;
    if (!buffer.DumpToSingleSlice(&slice).ok()) return "";
    return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  void writes_done() {
    call_->WritesDone(nullptr);
    await();
  }
  void cancel() { context_.TryCancel(); }
  grpc::Status finish() {
    grpc::Status status;
    call_->Finish(&status, nullptr);
    await();
    return status;
  }

 private:
  bool await() {
    void* tag;
    bool ok = false;
    return cq_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue cq_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

// --- A server of plain bytes ---

// Runs a script for each call, on a thread of gRPC's.
class RawServer {
 public:
  class Call {
   public:
    using Messages = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

    Call(grpc::ServerContext* context, Messages* messages)
        : context_(context), messages_(messages) {}
    bool write(const std::string& message) {  // Whether it went out.
      const grpc::Slice slice(message);
      return messages_->Write(grpc::ByteBuffer(&slice, 1));
    }
    std::optional<std::string> read() {  // Nothing once the client is done or gone.
      grpc::ByteBuffer buffer;
      if (!messages_->Read(&buffer)) return std::nullopt;
      grpc::Slice slice;
      if (!buffer.DumpToSingleSlice(&slice).ok()) return "";
      return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    bool is_cancelled() const { return context_->IsCancelled(); }

   private:
    grpc::ServerContext* const context_;
    Messages* const messages_;
  };
  using Script = std::function<grpc::Status(Call&)>;

  RawServer(const std::string& address, Script script) : service_(std::move(script)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(-1);
    builder.SetMaxSendMessageSize(-1);
    server_ = builder.BuildAndStart();
    if (!server_) throw std::runtime_error("cannot listen on " + address);
  }
  ~RawServer() { server_->Shutdown(std::chrono::system_clock::now()); }

 private:
  // What protobuf's plugin would have written.
  class Service : public grpc::Service {
   public:
    explicit Service(Script script) : script_(std::move(script)) {
      using Handler = grpc::internal::BidiStreamingHandler<Service, grpc::ByteBuffer,
                                                           grpc::ByteBuffer>;
      AddMethod(new grpc::internal::RpcServiceMethod(
          kStreamMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
          new Handler(
              [](Service* self, grpc::ServerContext* context,
                 Call::Messages* messages) {
                Call call(context, messages);
                return self->script_(call);
              },
              this)));
    }

   private:
    const Script script_;
  };

  Service service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace beast::test
