// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "env_spec.h"
#include "message_reader.h"

namespace beast {

// Messages of rpcenv.proto, written and read straight from and to where the arrays
// belong. What comes from outside is checked before it is used; whatever is wrong with
// it is a ProtocolError.

// What a server said in a Failure: its environment raised.
struct ServerFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The other side speaks another version: no use in trying again.
struct VersionError : ProtocolError {
  using ProtocolError::ProtocolError;
};

constexpr uint32_t kProtocolVersion = 1;
constexpr char kStreamMethod[] = "/chimera.RpcEnv/Stream";

struct Hello {
  std::string run_id;
  bool only_spec = false;     // Welcome is all that the client wants.
  bool takes_newest = false;  // Steps may hold only what is new of stacked frames.
};
std::string encode_hello(const std::string& run_id, bool only_spec = false,
                         bool takes_newest = false);
Hello decode_hello(MessageReader& message);
std::string encode_welcome(const EnvSpec& spec);
// A step of the spec fits into max_message_bytes.
EnvSpec decode_welcome(MessageReader& message, size_t max_message_bytes);
std::string encode_failure(const std::string& reason);

// A message whose fields all have a length that is known beforehand: the bytes between
// them are written once, by write_frame, the arrays at data + offset(i).
class FixedMessage {
 public:
  // A submessage with the number kind, in it bytes fields with these numbers and sizes.
  FixedMessage(int kind, std::span<const int> field_numbers,
               std::span<const size_t> sizes);

  size_t num_bytes() const { return num_bytes_; }
  size_t offset(size_t field) const { return offsets_[field]; }
  void write_frame(std::byte* data) const;

 private:
  std::vector<std::pair<size_t, std::string>> frame_;  // Where, what.
  std::vector<size_t> offsets_;
  size_t num_bytes_ = 0;
};

// Where the arrays of a message lie or belong.
struct FieldView {
  std::byte* data;
  size_t num_bytes;
  bool is_bool;  // Then every byte is made 0 or 1.
  // More of images, [K, C, H, W] in the message with C > 1, for who reads them.
  struct Images {
    size_t num_envs = 0;  // K; 0 if this is not known to be images.
    size_t num_channels = 0;
    size_t item_bytes = 0;
    bool channels_last = false;           // They belong there as [K, H, W, C].
    const std::byte* previous = nullptr;  // Those of the Step before, if there is one.
  } images = {};
};
struct StepView {
  std::vector<FieldView> observation;
  FieldView reward, terminated, truncated, first, episode_return, episode_step,
      busy_seconds;
};

// C of images [C, H, W], which may be stacked frames; else 1.
int64_t num_channels(const LeafSpace& leaf);
// With newest, only the last of stacked frames.
FixedMessage step_message(const EnvSpec& spec, bool newest = false);
StepView step_view(const EnvSpec& spec, const FixedMessage& message, std::byte* data,
                   bool newest = false);
// Whether stacked frames are those of the Step before, one place further on, but for
// the last ones.
bool is_shifted(const EnvSpec& spec, const StepView& before, const StepView& now);
// To a view with only the newest frames.
void copy_newest(const EnvSpec& spec, const StepView& from, const StepView& to);
FixedMessage action_message(const EnvSpec& spec);

// Reads a Step into view; throws ServerFailure where the message is a Failure.
void decode_step(MessageReader& message, const StepView& view);
void decode_action(MessageReader& message, const std::vector<FieldView>& view);

}  // namespace beast
