// SPDX-License-Identifier: Apache-2.0
#include "probe.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <thread>
#include <variant>

#include "channel_settings.h"
#include "wire.h"

namespace beast {
namespace {

// One try: the spec, or how the call ended.
std::variant<EnvSpec, grpc::Status> try_once(
    grpc::GenericStub& stub, const std::string& address, const Security& security,
    std::chrono::system_clock::time_point deadline, size_t max_message_bytes,
    const Tick& tick) {
  if (!security.token.empty() && !is_socket_safe(address)) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, kNoSocket);
  }
  grpc::CompletionQueue cq;
  grpc::ClientContext context;
  context.set_deadline(deadline);
  if (!security.token.empty()) {
    context.AddMetadata("authorization", "Bearer " + security.token);
  }
  grpc::ByteBuffer received;
  grpc::Status status;
  auto call = stub.PrepareCall(&context, kStreamMethod, &cq);
  auto next =
      [&] {  // Whether the pending operation went well; it ends by the deadline.
        void* tag;
        bool ok = false;
        while (
            cq.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kTickInterval) ==
            grpc::CompletionQueue::TIMEOUT) {
          try {
            if (tick) tick();
          } catch (...) {
            context.TryCancel();
            cq.Next(&tag, &ok);
            throw;
          }
        }
        return ok;
      };
  call->StartCall(nullptr);
  bool ok = next();
  if (ok) {
    const grpc::Slice hello(encode_hello("probe", /*only_spec=*/true));
    call->Write(grpc::ByteBuffer(&hello, 1), nullptr);
    ok = next();
  }
  if (ok) {
    call->Read(&received, nullptr);
    ok = next();
  }
  if (ok) {
    context.TryCancel();
    ReceivedMessage message(received);
    return decode_welcome(message.reader(), max_message_bytes);
  }
  call->Finish(&status, nullptr);
  next();
  return status;
}

}  // namespace

EnvSpec probe(const std::string& address, const Security& security,
              std::chrono::milliseconds timeout, size_t max_message_bytes,
              const Tick& tick) {
  check_address(address);
  check_max_message_bytes(max_message_bytes);
  grpc::GenericStub stub(make_channel(address, security, max_message_bytes));
  // Of this clock, which nobody sets: gRPC takes the time of day at each call anew.
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  std::string reason = "no answer";
  while (true) {
    try {
      const auto until = std::chrono::system_clock::now() + (deadline - Clock::now());
      auto result = try_once(stub, address, security, until, max_message_bytes, tick);
      if (auto* spec = std::get_if<EnvSpec>(&result)) return std::move(*spec);
      const auto& status = std::get<grpc::Status>(result);
      if (is_final(status)) {
        throw ConnectionError(address + ": " + status.error_message());
      }
      if (status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED) {
        reason = status.error_message();
      }
    } catch (const ServerFailure& error) {
      throw std::runtime_error(address + ": the environment raised:\n" + error.what());
    } catch (const ProtocolError& error) {
      throw ConnectionError(address + ": " + error.what());
    }
    if (Clock::now() >= deadline) break;
    if (tick) tick();
    std::this_thread::sleep_for(kTickInterval);
  }
  throw TimeoutError("no env server at " + address + " within " + in_seconds(timeout) +
                     ": " + reason + "; start one with \"python -m polybeast_env\"");
}

}  // namespace beast
