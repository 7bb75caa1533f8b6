// SPDX-License-Identifier: Apache-2.0
// Messages of rpcenv.proto, right and wrong ones, for tests.
#pragma once

#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rpcenv.pb.h"
#include "wire.h"

namespace beast::test {

// protobuf prints a line for each message with bytes that are no text; not here.
inline const auto the_unused_log_handler = google::protobuf::SetLogHandler(nullptr);

// --- Bytes, as the wire has them ---

inline std::string varint(uint64_t value) {
  std::string text;
  for (; value >= 128; value >>= 7) text += static_cast<char>(value | 128);
  return text + static_cast<char>(value);
}

inline std::string tag(uint32_t field, uint32_t wire_type) {
  return varint(uint64_t{field} << 3 | wire_type);
}

// A field with bytes or a submessage.
inline std::string bytes_field(uint32_t field, const std::string& bytes) {
  return tag(field, 2) + varint(bytes.size()) + bytes;
}

// Fields that no version of the protocol knows yet, of every wire type.
inline std::string unknown_fields(uint32_t first = 100) {
  return tag(first, 0) + varint(uint64_t{1} << 60) + tag(first + 1, 1) + "12345678" +
         bytes_field(first + 2, "unknown") + tag(first + 3, 5) + "1234" +
         bytes_field((1 << 29) - 1, "");
}

// A reader of the message in pieces of so many bytes, each in memory of its own, as
// gRPC has what came in several frames. There is an empty piece, too.
struct Pieces {
  explicit Pieces(std::string message, size_t size = SIZE_MAX)
      : text(std::move(message)), reader(cut(size)) {}
  operator MessageReader&() { return reader; }

  const std::string text;
  std::vector<std::vector<std::byte>> memory;
  MessageReader reader;

 private:
  std::vector<std::span<const std::byte>> cut(size_t size) {
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    for (size_t at = 0; at < text.size(); at += std::min(size, text.size() - at)) {
      memory.emplace_back(data + at, data + at + std::min(size, text.size() - at));
    }
    memory.insert(memory.begin() + memory.size() / 2, std::vector<std::byte>());
    return {memory.begin(), memory.end()};
  }
};

// --- Spaces ---

inline LeafSpace leaf(DType dtype, Shape shape) {
  LeafSpace space;
  space.dtype = dtype;
  space.shape = shape;
  return space;
}

inline LeafSpace discrete(int64_t num_values, int64_t start = 0) {
  LeafSpace space = leaf(DType::kInt64, {});
  space.num_values = num_values;
  space.start = start;
  return space;
}

inline Space single(LeafSpace leaf) { return {Structure::leaf(), {std::move(leaf)}}; }

// A spec with something of everything.
inline EnvSpec rich_spec(int64_t num_envs = 3) {
  const Structure::Ptr leaf = Structure::leaf();
  EnvSpec spec;
  spec.num_envs = num_envs;
  spec.description = "Everything-v0";
  spec.observation.structure = Structure::dict(
      {{"flags", leaf},
       {"image", leaf},
       {"nothing", leaf},
       {"pair", Structure::tuple({leaf, Structure::dict({{"", leaf}})})}});
  spec.observation.leaves = {
      test::leaf(DType::kBool, {4}), test::leaf(DType::kUInt8, {2, 3}),
      test::leaf(DType::kFloat64, {0, 5}), test::leaf(DType::kFloat32, {}),
      test::leaf(DType::kInt16, {1, 1, 1, 1, 1, 1})};
  spec.action.structure = Structure::tuple({leaf, leaf, leaf});
  spec.action.leaves = {discrete(4, -1), test::leaf(DType::kFloat32, {2}),
                        test::leaf(DType::kBool, {})};
  spec.action.leaves[1].low = "aaaabbbb";
  spec.action.leaves[1].high = std::string("\0\0\0\0zzzz", 8);
  return spec;
}

// --- Steps ---

// The arrays of a Step or an Action, each in memory of its own, so that the address
// sanitizer sees a byte too many.
struct Fields {
  std::vector<std::vector<std::byte>> observation;  // Or the leaves of the action.
  std::vector<std::vector<std::byte>> others;       // reward to busy_seconds.
  std::vector<bool> is_bool;                        // Of observation.

  explicit Fields(const EnvSpec& spec) : Fields(spec.observation, spec.num_envs) {
    for (size_t size : {4, 1, 1, 1, 4, 4, 4}) others.emplace_back(spec.num_envs * size);
  }
  Fields(const Space& space, int64_t num_envs) {
    for (const LeafSpace& leaf : space.leaves) {
      observation.emplace_back(num_envs * leaf.num_bytes());
      is_bool.push_back(leaf.dtype == DType::kBool);
    }
  }

  std::vector<FieldView> observation_view() {
    std::vector<FieldView> views;
    for (size_t i = 0; i < observation.size(); ++i) {
      views.push_back({observation[i].data(), observation[i].size(), is_bool[i]});
    }
    return views;
  }
  StepView view() {
    auto other = [this](size_t i, bool is_bool) -> FieldView {
      return {others[i].data(), others[i].size(), is_bool};
    };
    return {observation_view(), other(0, false), other(1, true),  other(2, true),
            other(3, true),     other(4, false), other(5, false), other(6, false)};
  }

  // Bytes that are right for their fields.
  void randomize(std::mt19937_64& random) {
    for (size_t i = 0; i < observation.size(); ++i) {
      for (auto& byte : observation[i]) {
        byte = std::byte(is_bool[i] ? random() % 2 : random() % 256);
      }
    }
    for (size_t i = 0; i < others.size(); ++i) {
      const bool is_flag = i >= 1 && i <= 3;
      for (auto& byte : others[i]) byte = std::byte(random() % (is_flag ? 2 : 256));
    }
  }

  bool operator==(const Fields&) const = default;
};

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// What protobuf makes of them.
inline chimera::ServerMessage step_proto(const Fields& fields) {
  chimera::ServerMessage message;
  chimera::Step& step = *message.mutable_step();
  for (const auto& bytes : fields.observation) step.add_observation(text_of(bytes));
  step.set_reward(text_of(fields.others[0]));
  step.set_terminated(text_of(fields.others[1]));
  step.set_truncated(text_of(fields.others[2]));
  step.set_first(text_of(fields.others[3]));
  step.set_episode_return(text_of(fields.others[4]));
  step.set_episode_step(text_of(fields.others[5]));
  step.set_busy_seconds(text_of(fields.others[6]));
  return message;
}

inline chimera::ClientMessage action_proto(const Fields& fields) {
  chimera::ClientMessage message;
  message.mutable_action();
  for (const auto& bytes : fields.observation) {
    message.mutable_action()->add_action(text_of(bytes));
  }
  return message;
}

// --- Fuzz ---

// The message, damaged in one or several ways.
inline std::string mutate(std::string message, std::mt19937_64& random) {
  static constexpr uint64_t kNumbers[] = {0,
                                          1,
                                          127,
                                          128,
                                          255,
                                          16383,
                                          16384,
                                          uint64_t{1} << 20,
                                          (uint64_t{1} << 31) - 1,
                                          uint64_t{1} << 31,
                                          (uint64_t{1} << 32) - 1,
                                          uint64_t{1} << 32,
                                          uint64_t{1} << 62,
                                          (uint64_t{1} << 63) - 1,
                                          uint64_t{1} << 63,
                                          ~uint64_t{0}};
  const auto at = [&](size_t size) { return static_cast<size_t>(random() % size); };
  for (int rounds = 1 + static_cast<int>(random() % 3); rounds > 0; --rounds) {
    if (message.empty()) message = std::string(1, static_cast<char>(random()));
    const size_t i = at(message.size());
    switch (random() % 8) {
      case 0:  // One bit.
        message[i] = static_cast<char>(message[i] ^ 1 << random() % 8);
        break;
      case 1:  // One byte.
        message[i] = static_cast<char>(random());
        break;
      case 2:  // The end is missing.
        message.resize(i);
        break;
      case 3:  // A piece is missing.
        message.erase(i, 1 + at(16));
        break;
      case 4:  // A piece comes twice.
        message.insert(at(message.size()), message.substr(i, 1 + at(64)));
        break;
      case 5: {  // Bytes too many.
        std::string noise(1 + at(16), '\0');
        for (char& byte : noise) byte = static_cast<char>(random());
        message.insert(i, noise);
        break;
      }
      case 6:  // Another number: a length, a dtype, a dimension, a tag.
        message.replace(i, 1, varint(kNumbers[at(std::size(kNumbers))]));
        break;
      case 7:  // A field that is not known.
        message.insert(i, unknown_fields(1 + at(200)));
        break;
    }
  }
  return message;
}

inline std::string noise(size_t size, std::mt19937_64& random) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace beast::test
