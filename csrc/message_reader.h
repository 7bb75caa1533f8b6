// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace beast {

// A message that breaks the rules of protobuf's encoding or of rpcenv.proto.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads protobuf's encoding, field by field, from a message that lies in several pieces
// of memory, as gRPC receives it. Throws ProtocolError for whatever is truncated or
// broken, never reads outside of the pieces, and allocates nothing by what the message
// says.
//
// We read it ourselves because libprotobuf cannot live in a Python process beside
// another version of itself (of grpcio-tools, Ray, TensorFlow, ...): they share
// variables, and the process crashes.
class MessageReader {
 public:
  struct Field {
    uint32_t number = 0;
    enum Type : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 } type;
    uint64_t value = 0;  // Of a varint.
    size_t size = 0;     // Of bytes, which must be read, entered or skipped next.
  };

  explicit MessageReader(std::vector<std::span<const std::byte>> pieces);

  // False at the end of the message, or of the submessage that was entered last.
  bool next(Field& field);
  void read(std::byte* target, size_t size);
  std::string read_string(const Field& field, size_t max_size = size_t{1} << 20);
  void skip(const Field& field);
  uint64_t read_varint();  // For packed fields: inside of bytes that were entered.

  // The bytes of the field become the whole message until leave(), which throws unless
  // all of them were read.
  size_t enter(const Field& field);
  void leave(size_t outer);
  bool at_end() const { return left_ == 0; }

 private:
  [[noreturn]] static void fail();
  void skip(size_t size);

  std::vector<std::span<const std::byte>> pieces_;
  size_t piece_ = 0;   // The current one,
  size_t offset_ = 0;  // and where in it.
  size_t left_ = 0;    // Bytes until the end of the current (sub)message.
};

}  // namespace beast
