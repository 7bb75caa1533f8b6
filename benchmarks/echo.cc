// SPDX-License-Identifier: Apache-2.0
// The bare gRPC ping-pong that benchmarks/transport.py compares the core with.
//
//     echo server unix:/tmp/echo
//     echo client unix:/tmp/echo --streams 8 --up 20 --down 28224 --seconds 3
//
// Bidirectional streams of plain byte buffers on the asynchronous API, all in one
// channel, each in lockstep: the client sends --up bytes, the server answers with as
// many as the client named in the call's metadata, --down. Each side polls one
// completion queue with --threads threads; one is the fastest here (2 cores, gRPC 1.51:
// 1.1 to 4.5 times as fast as two). With --copies N a message's bytes are also moved as
// often as anything must that makes rollouts of them: the server writes each answer
// anew, as an environment does, and the client copies it N times, into buffers as large
// as those of 21 rows for each stream. The client prints one line of JSON. The server
// prints its address once it listens, and ends on SIGTERM, on SIGINT, or when its
// standard input closes.

#include <grpc/grpc.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  std::string mode;
  std::string address;
  int64_t streams = 1;
  int64_t up = 20;
  int64_t down = 28224;
  double seconds = 3;
  int64_t threads = 1;
  int64_t copies = 0;
  std::vector<std::pair<std::string, int>> channel_args;  // --arg name=value
};

int64_t to_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), value);
  if (error != std::errc() || end != text.end() || value < 0) {
    throw std::invalid_argument("not a count: '" + std::string(text) + "'");
  }
  return value;
}

Flags parse_flags(int argc, char** argv) {
  Flags flags;
  if (argc < 3) {
    throw std::invalid_argument(
        "usage: echo server|client ADDRESS [--streams N] [--up BYTES] [--down BYTES] "
        "[--seconds S] [--threads N] [--copies N] [--arg NAME=INTEGER]");
  }
  flags.mode = argv[1];
  flags.address = argv[2];
  if (flags.mode != "server" && flags.mode != "client") {
    throw std::invalid_argument("first argument is 'server' or 'client', not '" +
                                flags.mode + "'");
  }
  for (int i = 3; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc)
      throw std::invalid_argument(std::string(name) + " lacks a value");
    const std::string value = argv[i + 1];
    if (name == "--streams") {
      flags.streams = to_int(value);
    } else if (name == "--up") {
      flags.up = to_int(value);
    } else if (name == "--down") {
      flags.down = to_int(value);
    } else if (name == "--seconds") {
      flags.seconds = std::stod(value);
    } else if (name == "--threads") {
      flags.threads = to_int(value);
    } else if (name == "--copies") {
      flags.copies = to_int(value);
    } else if (name == "--arg") {
      const size_t equals = value.find('=');
      if (equals == std::string::npos) {
        throw std::invalid_argument("--arg takes NAME=INTEGER, not '" + value + "'");
      }
      flags.channel_args.emplace_back(
          value.substr(0, equals), static_cast<int>(to_int(value.substr(equals + 1))));
    } else {
      throw std::invalid_argument("unknown flag " + std::string(name));
    }
  }
  return flags;
}

grpc::ByteBuffer make_message(int64_t size) {
  const std::string bytes(static_cast<size_t>(size), 'x');
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// What a completion queue hands back: the function to call with the operation's fate.
using Tag = std::function<void(bool)>;

void poll_queue(grpc::CompletionQueue* queue) {
  void* tag = nullptr;
  bool ok = false;
  while (queue->Next(&tag, &ok)) (*static_cast<Tag*>(tag))(ok);
}

// One call at the server; deletes itself when its stream ends. The next read is started
// together with the write, but after it: a read begins by sending a window update.
class ServerCall {
 public:
  ServerCall(grpc::AsyncGenericService* service, grpc::ServerCompletionQueue* queue)
      : service_(service), queue_(queue) {
    ++num_calls_;
    service_->RequestCall(&context_, &stream_, queue_, queue_, &on_accept_);
  }

  // To be called before the queue is shut down: each may start an operation on it.
  static void wait_until_all_ended() {
    for (int n = num_calls_; n != 0; n = num_calls_) num_calls_.wait(n);
  }

 private:
  void accept(bool ok) {
    if (!ok) return end();  // The server shuts down.
    new ServerCall(service_, queue_);
    const auto size = context_.client_metadata().find("down");
    if (size == context_.client_metadata().end()) {
      const grpc::Status status(grpc::StatusCode::INVALID_ARGUMENT, "down is missing");
      return stream_.Finish(status, &on_finish_);
    }
    const std::string_view bytes(size->second.data(), size->second.size());
    reply_ = make_message(to_int(bytes));
    is_fresh_ = context_.client_metadata().contains("copies");
    if (is_fresh_) observation_.assign(to_int(bytes), 'x');
    pending_ = 1;
    stream_.Read(&request_, &on_done_);
  }

  // Called when the read ends and when the write, if there was one, ends.
  void done(bool ok) {
    if (!ok) failed_ = true;
    if (--pending_ != 0) return;
    if (failed_) return end();  // The client is gone.
    pending_ = 2;
    if (is_fresh_) {
      const grpc::Slice slice(observation_);  // Copies it.
      reply_ = grpc::ByteBuffer(&slice, 1);
    }
    stream_.Write(reply_, &on_done_);
    stream_.Read(&request_, &on_done_);
  }

  void end() {
    delete this;
    --num_calls_;
    num_calls_.notify_all();
  }

  inline static std::atomic<int> num_calls_{0};
  grpc::AsyncGenericService* const service_;
  grpc::ServerCompletionQueue* const queue_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  grpc::ByteBuffer request_;
  grpc::ByteBuffer reply_;
  bool is_fresh_ = false;  // Each reply is written anew, from the observation.
  std::string observation_;
  std::atomic<int> pending_{0};  // Operations under way.
  std::atomic<bool> failed_{false};
  Tag on_accept_ = [this](bool ok) { accept(ok); };
  Tag on_done_ = [this](bool ok) { done(ok); };
  Tag on_finish_ = [this](bool) { end(); };
};

void wait_for_end() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
  if (signal_fd < 0) throw std::runtime_error("signalfd failed");
  pollfd fds[2] = {{signal_fd, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
  char unused_input[256];
  while (true) {
    if (poll(fds, 2, -1) < 0) continue;
    if (fds[0].revents != 0) break;
    if (fds[1].revents == 0) continue;
    if (read(STDIN_FILENO, unused_input, sizeof(unused_input)) <= 0) break;
  }
  close(signal_fd);
}

void run_server(const Flags& flags) {
  sigset_t signals;  // Blocked before any thread starts: only signalfd sees them.
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigprocmask(SIG_BLOCK, &signals, nullptr);

  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(flags.address, grpc::InsecureServerCredentials());
  builder.RegisterAsyncGenericService(&service);
  builder.SetMaxReceiveMessageSize(-1);
  for (const auto& [name, value] : flags.channel_args) {
    builder.AddChannelArgument(name, value);
  }
  const auto queue = builder.AddCompletionQueue();
  const auto server = builder.BuildAndStart();
  if (!server) throw std::runtime_error("cannot listen at " + flags.address);

  new ServerCall(&service, queue.get());
  std::vector<std::jthread> threads;
  for (int64_t i = 0; i < flags.threads; ++i) {
    threads.emplace_back(poll_queue, queue.get());
  }
  std::printf("%s\n", flags.address.c_str());
  std::fflush(stdout);
  wait_for_end();
  server->Shutdown(std::chrono::system_clock::now());  // Cancels what still runs.
  ServerCall::wait_until_all_ended();
  queue->Shutdown();
}

// One stream of the client, in lockstep with the server until cancelled or broken.
class ClientStream {
 public:
  ClientStream(grpc::GenericStub* stub, grpc::CompletionQueue* queue,
               const Flags& flags, std::atomic<int64_t>* num_messages)
      : num_messages_(num_messages),
        message_(make_message(flags.up)),
        down_(flags.down),
        copies_(flags.copies, std::vector<char>(kRows * flags.down)) {
    context_.AddMetadata("down", std::to_string(flags.down));
    if (flags.copies > 0) context_.AddMetadata("copies", "");
    stream_ = stub->PrepareCall(&context_, "/echo", queue);
    stream_->StartCall(&on_start_);
  }

  void cancel() { context_.TryCancel(); }
  void wait_until_ended() const { ended_.wait(false); }
  bool ended() const { return ended_; }

 private:
  static constexpr int64_t kRows = 21;  // Of a rollout.

  void exchange() {
    pending_ = 2;
    stream_->Write(message_, &on_done_);
    stream_->Read(&reply_, &on_done_);
  }

  // Called when the read ends and when the write ends.
  void done(bool ok) {
    if (!ok) failed_ = true;
    if (--pending_ != 0) return;
    if (failed_ || static_cast<int64_t>(reply_.Length()) != down_) return end();
    num_messages_->fetch_add(1, std::memory_order_relaxed);
    if (!copies_.empty()) copy_reply();
    exchange();
  }

  // Out of the message, then from each buffer to the next.
  void copy_reply() {
    row_ = (row_ + 1) % kRows;
    char* to = copies_[0].data() + row_ * down_;
    std::vector<grpc::Slice> slices;
    reply_.Dump(&slices);
    for (const grpc::Slice& slice : slices) {
      to = std::copy(slice.begin(), slice.end(), to);
    }
    for (size_t i = 1; i < copies_.size(); ++i) {
      std::copy_n(copies_[i - 1].data() + row_ * down_, down_,
                  copies_[i].data() + row_ * down_);
    }
  }

  void end() {
    ended_ = true;
    ended_.notify_all();
  }

  std::atomic<int64_t>* const num_messages_;
  const grpc::ByteBuffer message_;
  const int64_t down_;
  std::vector<std::vector<char>> copies_;
  int64_t row_ = 0;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer reply_;
  std::atomic<int> pending_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> ended_{false};
  Tag on_start_ = [this](bool ok) { ok ? exchange() : end(); };
  Tag on_done_ = [this](bool ok) { done(ok); };
};

struct Usage {
  double seconds = 0;  // Of all threads, user and system.
  int64_t switches = 0;
};

Usage usage_now() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return {seconds(usage.ru_utime) + seconds(usage.ru_stime),
          usage.ru_nvcsw + usage.ru_nivcsw};
}

void run_client(const Flags& flags) {
  grpc::ChannelArguments channel_args;
  channel_args.SetMaxReceiveMessageSize(-1);
  for (const auto& [name, value] : flags.channel_args) channel_args.SetInt(name, value);
  const auto channel = grpc::CreateCustomChannel(
      flags.address, grpc::InsecureChannelCredentials(), channel_args);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() +
                                 std::chrono::seconds(10))) {
    throw std::runtime_error("no echo server at " + flags.address + " after 10 s");
  }
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  std::atomic<int64_t> num_messages{0};
  std::vector<std::unique_ptr<ClientStream>> streams;
  for (int64_t i = 0; i < flags.streams; ++i) {
    streams.push_back(
        std::make_unique<ClientStream>(&stub, &queue, flags, &num_messages));
  }
  std::vector<std::jthread> threads;
  for (int64_t i = 0; i < flags.threads; ++i) threads.emplace_back(poll_queue, &queue);

  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // Warm up.
  const int64_t messages_before = num_messages;
  const Usage usage_before = usage_now();
  const auto start = Clock::now();
  std::this_thread::sleep_for(std::chrono::duration<double>(flags.seconds));
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const int64_t messages = num_messages - messages_before;
  const Usage usage = usage_now();
  bool broken = messages == 0;
  for (const auto& stream : streams) broken |= stream->ended();

  for (const auto& stream : streams) stream->cancel();
  for (const auto& stream : streams) stream->wait_until_ended();
  queue.Shutdown();
  threads.clear();  // Joins them.
  if (broken) throw std::runtime_error("a stream broke");
  const double count = static_cast<double>(messages);
  std::printf(
      "{\"rate\": %.1f, \"streams\": %lld, \"up\": %lld, \"down\": %lld, "
      "\"threads\": %lld, \"seconds\": %.3f, \"client_cpu_us_per_message\": %.3f, "
      "\"client_switches_per_message\": %.3f}\n",
      count / seconds, static_cast<long long>(flags.streams),
      static_cast<long long>(flags.up), static_cast<long long>(flags.down),
      static_cast<long long>(flags.threads), seconds,
      1e6 * (usage.seconds - usage_before.seconds) / count,
      static_cast<double>(usage.switches - usage_before.switches) / count);
}

}  // namespace

int main(int argc, char** argv) {
  grpc_init();  // Never undone: that could wait for a poller of gRPC's, for 10 seconds.
  try {
    const Flags flags = parse_flags(argc, argv);
    flags.mode == "server" ? run_server(flags) : run_client(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "echo: %s\n", error.what());
    return 1;
  }
  return 0;
}
