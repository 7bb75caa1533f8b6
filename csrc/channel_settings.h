// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <string>
#include <vector>

#include "message_reader.h"
#include "security.h"

namespace beast {

// What gRPC's two ends are told. They are set side by side because they must agree:
// otherwise a server takes a client that pings as often as it was told to for an
// attacker, and hangs up.
std::shared_ptr<grpc::Channel> make_channel(const std::string& address,
                                            const Security& security,
                                            size_t max_message_bytes);
void configure_server(grpc::ServerBuilder& builder, size_t max_message_bytes,
                      int max_calls_per_connection);

// A message that was received, for reading.
class ReceivedMessage {
 public:
  explicit ReceivedMessage(const grpc::ByteBuffer& buffer);
  MessageReader& reader() { return reader_; }

 private:
  std::vector<grpc::Slice> slices_;
  MessageReader reader_;
};

// What a process that uses gRPC much wants, done once: malloc keeps freed memory (gRPC
// makes and frees a buffer for each message, and giving its pages back to the system
// each time cost up to half of the time), and gRPC stays loaded (its shutdown, when the
// last channel goes, was seen to wait ten seconds for a thread of its own).
void prepare_process();

// Throws std::invalid_argument for sizes that gRPC or protobuf cannot have.
void check_max_message_bytes(size_t bytes);

// What is said where is_socket_safe() is false.
constexpr char kNoSocket[] = "there is no socket yet";

// Whether a server that ends a call so would end every further call so, too.
bool is_final(const grpc::Status& status);

}  // namespace beast
