// SPDX-License-Identifier: Apache-2.0
#include "channel_settings.h"

#include <absl/synchronization/mutex.h>
#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <stdexcept>
#include <utility>

namespace beast {
namespace {

using Argument = std::pair<const char*, int>;

constexpr Argument kClientArguments[] = {
    // A frozen peer is noticed within 5 + 5 s, also while no step is under way.
    {GRPC_ARG_KEEPALIVE_TIME_MS, 5000},
    {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000},
    {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
    {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
    // gRPC's own back-off grows to two minutes; a server is back sooner than that.
    {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100},
    {GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 3000},  // How long one attempt may take.
    {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000},
    {GRPC_ARG_ENABLE_RETRIES, 0},  // A stream that broke is another life.
    // A whole message of 32 frames goes out without waiting for window updates. (gRPC's
    // measuring of the bandwidth stays on: without, 28 KB take up to twice as long.)
    {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20},
    // A frame in one read of the socket instead of four: a bare echo of 28 KB on 8
    // streams went from 34,000 to 47,000 per second.
    {GRPC_ARG_TCP_READ_CHUNK_SIZE, 64 << 10},
    {GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, 32 << 10},
};

constexpr Argument kServerArguments[] = {
    {GRPC_ARG_KEEPALIVE_TIME_MS, 10000},
    {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000},
    {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
    {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
    {GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000},
    {GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0},
    // Connections that say nothing, or nothing more, are closed: each has a file.
    {GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000},
    {GRPC_ARG_MAX_CONNECTION_IDLE_MS, 60'000},
    // Two servers on one port would share it silently.
    {GRPC_ARG_ALLOW_REUSEPORT, 0},
    {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20},
};

std::vector<grpc::Slice> slices_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  buffer.Dump(&slices);  // Fails only where there is none.
  return slices;
}

std::vector<std::span<const std::byte>> pieces_of(
    const std::vector<grpc::Slice>& slices) {
  std::vector<std::span<const std::byte>> pieces;
  pieces.reserve(slices.size());
  for (const grpc::Slice& slice : slices) {
    if (slice.size() == 0) continue;
    pieces.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()),
                        slice.size());
  }
  return pieces;
}

}  // namespace

ReceivedMessage::ReceivedMessage(const grpc::ByteBuffer& buffer)
    : slices_(slices_of(buffer)), reader_(pieces_of(slices_)) {}

std::shared_ptr<grpc::Channel> make_channel(const std::string& address,
                                            const Security& security,
                                            size_t max_message_bytes) {
  prepare_process();
  grpc::ChannelArguments arguments;
  for (const auto& [name, value] : kClientArguments) arguments.SetInt(name, value);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(max_message_bytes));
  if (!security.server_name.empty()) {
    arguments.SetSslTargetNameOverride(security.server_name);
  }
  return grpc::CreateCustomChannel(address, channel_credentials(security), arguments);
}

void configure_server(grpc::ServerBuilder& builder, size_t max_message_bytes,
                      int max_calls_per_connection) {
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, max_calls_per_connection);
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(max_message_bytes));
  for (const auto& [name, value] : kServerArguments) {
    builder.AddChannelArgument(name, value);
  }
}

void prepare_process() {
  static const bool unused_done = [] {
    grpc_init();
    // Debian's Abseil looks for deadlocks at each of gRPC's locks, as a debug build.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#ifdef __GLIBC__
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    mallopt(M_MMAP_THRESHOLD, 32 << 20);  // The largest that glibc takes.
#endif
    return true;
  }();
  static_cast<void>(unused_done);
}

void check_max_message_bytes(size_t bytes) {
  if (bytes < 1024 || bytes > (size_t{1} << 31) - 1) {
    throw std::invalid_argument("max_message_bytes: expected 1024 to 2147483647, got " +
                                std::to_string(bytes));
  }
}

bool is_final(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::FAILED_PRECONDITION:
      return true;
    default:
      return false;
  }
}

}  // namespace beast
