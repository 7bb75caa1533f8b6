// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <optional>

#include "rpcenv.pb.h"

namespace beast {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kLengthDelimited = 2;
constexpr int kActionKind = 2, kStepKind = 2, kFailureKind = 3;

uint32_t make_tag(int field_number) { return field_number << 3 | kLengthDelimited; }

std::string varint(uint32_t value) {
  std::string text(5, '\0');
  auto* begin = reinterpret_cast<uint8_t*>(text.data());
  text.resize(CodedOutputStream::WriteVarint32ToArray(value, begin) - begin);
  return text;
}

void space_to_proto(const Structure& structure, const std::vector<LeafSpace>& leaves,
                    size_t& next_leaf, chimera::Space& space) {
  switch (structure.kind()) {
    case Structure::Kind::kLeaf: {
      const LeafSpace& leaf = leaves[next_leaf++];
      chimera::Space::Leaf& out = *space.mutable_leaf();
      out.set_dtype(static_cast<chimera::DType>(leaf.dtype));
      for (int64_t dim : leaf.shape.dims()) out.add_shape(dim);
      out.set_num_values(leaf.num_values);
      out.set_start(leaf.start);
      out.set_low(leaf.low);
      out.set_high(leaf.high);
      return;
    }
    case Structure::Kind::kTuple:
      space.mutable_tuple();
      for (const auto& child : structure.children()) {
        space_to_proto(*child, leaves, next_leaf, *space.mutable_tuple()->add_items());
      }
      return;
    case Structure::Kind::kDict:
      space.mutable_dict();
      for (size_t i = 0; i < structure.keys().size(); ++i) {
        auto& entry = *space.mutable_dict()->add_entries();
        entry.set_key(structure.keys()[i]);
        space_to_proto(*structure.children()[i], leaves, next_leaf,
                       *entry.mutable_value());
      }
      return;
  }
}

// The message field, then where in the space: "observation.image".
[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw ProtocolError("the server's Welcome is not valid: " + where + " " + what);
}

LeafSpace leaf_from_proto(const chimera::Space::Leaf& in, const std::string& where) {
  LeafSpace leaf;
  const auto dtype = dtype_from_number(in.dtype());
  if (!dtype) refuse(where, "has the unknown dtype " + std::to_string(in.dtype()));
  leaf.dtype = *dtype;
  if (in.shape_size() > static_cast<int>(Space::kMaxRank)) {
    refuse(where, "has " + std::to_string(in.shape_size()) + " dimensions, at most " +
                      std::to_string(Space::kMaxRank) + " are allowed");
  }
  const std::span<const int64_t> dims(in.shape().data(), in.shape_size());
  const auto num_bytes = checked_num_bytes(leaf.dtype, dims);
  if (!num_bytes) refuse(where, "has a negative or overflowing shape");
  leaf.shape = Shape(dims);
  const bool discrete = leaf.dtype == DType::kInt64 && leaf.shape.rank() == 0;
  int64_t unused_last;
  if (in.num_values() < 0 || (in.num_values() > 0 && !discrete) ||
      (in.num_values() == 0 && in.start() != 0) ||
      __builtin_add_overflow(in.start(), in.num_values(), &unused_last)) {
    refuse(where, "has num_values or start that only scalar int64 leaves may have");
  }
  leaf.num_values = in.num_values();
  leaf.start = in.start();
  for (const std::string* bound : {&in.low(), &in.high()}) {
    if (!bound->empty() && bound->size() != *num_bytes) {
      refuse(where, "has a bound of " + std::to_string(bound->size()) +
                        " bytes, expected " + std::to_string(*num_bytes));
    }
  }
  leaf.low = in.low();
  leaf.high = in.high();
  return leaf;
}

// Containers without a leaf in them are refused: a few bytes would make many nodes.
Structure::Ptr space_from_proto(const chimera::Space& in, const std::string& where,
                                int depth, std::vector<LeafSpace>& leaves) {
  if (depth > Structure::kMaxDepth) refuse(where, "is nested too deeply");
  const size_t leaves_before = leaves.size();
  const auto not_empty = [&](Structure::Ptr structure) {
    if (leaves.size() == leaves_before) refuse(where, "has no leaf");
    return structure;
  };
  switch (in.kind_case()) {
    case chimera::Space::kLeaf:
      if (leaves.size() == Space::kMaxLeaves) refuse(where, "is one leaf too many");
      leaves.push_back(leaf_from_proto(in.leaf(), where));
      return Structure::leaf();
    case chimera::Space::kTuple: {
      std::vector<Structure::Ptr> children;
      for (const auto& item : in.tuple().items()) {
        const std::string index = "[" + std::to_string(children.size()) + "]";
        children.push_back(space_from_proto(item, where + index, depth + 1, leaves));
      }
      return not_empty(Structure::tuple(std::move(children)));
    }
    case chimera::Space::kDict: {
      std::vector<std::pair<std::string, Structure::Ptr>> children;
      for (const auto& entry : in.dict().entries()) {
        // Strictly rising keys: leaves then stand in the order of their structure.
        if (!children.empty() && children.back().first >= entry.key()) {
          refuse(where, "has keys that are not sorted or not distinct");
        }
        children.emplace_back(entry.key(),
                              space_from_proto(entry.value(), where + "." + entry.key(),
                                               depth + 1, leaves));
      }
      return not_empty(Structure::dict(std::move(children)));
    }
    case chimera::Space::KIND_NOT_SET:
      break;
  }
  refuse(where, "is neither a leaf nor a tuple nor a dict");
}

Space space_from_proto(const chimera::Space& in, const std::string& where) {
  Space space;
  space.structure = space_from_proto(in, where, 0, space.leaves);
  return space;
}

// Reads the bytes fields of a submessage into their places. Each must come exactly once
// (a repeated one: as often as there are views), with exactly the expected length.
class FieldReader {
 public:
  FieldReader(CodedInputStream& in, const char* message) : in_(in), message_(message) {}

  void read(std::span<const std::span<const FieldView>> fields) {
    size_t seen[8] = {};
    while (const uint32_t tag = in_.ReadTag()) {
      const uint32_t number = tag >> 3;
      if (number < 1 || number > fields.size()) {
        skip(tag);
        continue;
      }
      if ((tag & 7) != kLengthDelimited) fail(number, "is not a bytes field");
      const auto& views = fields[number - 1];
      if (seen[number] == views.size()) fail(number, "comes too often");
      read_bytes(number, views[seen[number]++]);
    }
    if (!in_.ConsumedEntireMessage()) throw ProtocolError(broken());
    for (size_t number = 1; number <= fields.size(); ++number) {
      if (seen[number] < fields[number - 1].size()) fail(number, "is missing");
    }
  }

  void skip(uint32_t tag) {
    if (tag >> 3 == 0) throw ProtocolError(broken());
    int size;
    switch (tag & 7) {
      case 0: {
        uint64_t unused_value;
        if (in_.ReadVarint64(&unused_value)) return;
        break;
      }
      case 1:
        if (in_.Skip(8)) return;
        break;
      case 2:
        if (in_.ReadVarintSizeAsInt(&size) && in_.Skip(size)) return;
        break;
      case 5:
        if (in_.Skip(4)) return;
        break;
    }
    throw ProtocolError(broken());
  }

  std::string broken() const { return std::string(message_) + ": truncated or broken"; }

 private:
  [[noreturn]] void fail(uint32_t number, const std::string& what) const {
    throw ProtocolError(std::string(message_) + ": field " + std::to_string(number) +
                        " " + what);
  }

  void read_bytes(uint32_t number, const FieldView& view) {
    int size;
    if (!in_.ReadVarintSizeAsInt(&size)) throw ProtocolError(broken());
    if (static_cast<size_t>(size) != view.num_bytes) {
      fail(number, "has " + std::to_string(size) + " bytes, expected " +
                       std::to_string(view.num_bytes));
    }
    if (!in_.ReadRaw(view.data, size)) throw ProtocolError(broken());
    if (!view.is_bool) return;
    for (size_t i = 0; i < view.num_bytes; ++i) {
      view.data[i] = std::byte{view.data[i] != std::byte{0}};
    }
  }

  CodedInputStream& in_;
  const char* message_;
};

// Calls `read` on the one submessage of the message, which must be of this kind, or
// `read_failure` where that is given and it is a Failure.
template <class Read>
void read_kind(MessageReader& message, const char* name, int kind, Read read,
               std::string* failure = nullptr) {
  CodedInputStream in(&message);
  in.SetTotalBytesLimit(INT32_MAX);
  FieldReader fields(in, name);
  bool found = false;
  while (const uint32_t tag = in.ReadTag()) {
    const int number = static_cast<int>(tag >> 3);
    const bool wanted = number == kind || (failure && number == kFailureKind);
    if (!wanted || (tag & 7) != kLengthDelimited) {
      if (number <= 3) throw ProtocolError(std::string("expected a message ") + name);
      fields.skip(tag);
      continue;
    }
    int size;
    if (found || !in.ReadVarintSizeAsInt(&size)) {
      throw ProtocolError(fields.broken());
    }
    const auto limit = in.PushLimit(size);
    if (number == kind) {
      read(fields);
    } else {
      chimera::Failure parsed;
      if (!parsed.MergeFromCodedStream(&in)) throw ProtocolError(fields.broken());
      *failure = parsed.reason().empty() ? "no reason given" : parsed.reason();
    }
    if (in.BytesUntilLimit() != 0) throw ProtocolError(fields.broken());
    in.PopLimit(limit);
    found = true;
  }
  if (!in.ConsumedEntireMessage()) throw ProtocolError(fields.broken());
  if (!found) throw ProtocolError(std::string("expected a message ") + name);
}

std::string version_error(const char* whose, uint32_t version) {
  return std::string("the ") + whose + " speaks protocol version " +
         std::to_string(version) + ", this side " + std::to_string(kProtocolVersion) +
         "; run the same version of Chimera on both sides";
}

}  // namespace

std::string encode_hello(const std::string& run_id) {
  chimera::ClientMessage message;
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  message.mutable_hello()->set_run_id(run_id);
  return message.SerializeAsString();
}

std::string decode_hello(MessageReader& in) {
  chimera::ClientMessage message;
  if (!message.ParseFromZeroCopyStream(&in) || !message.has_hello()) {
    throw ProtocolError("expected a message Hello");
  }
  const uint32_t version = message.hello().protocol_version();
  if (version != kProtocolVersion) throw VersionError(version_error("client", version));
  return message.hello().run_id();
}

std::string encode_welcome(const EnvSpec& spec) {
  chimera::ServerMessage message;
  chimera::Welcome& welcome = *message.mutable_welcome();
  welcome.set_protocol_version(kProtocolVersion);
  welcome.set_num_envs(static_cast<uint32_t>(spec.num_envs));
  size_t next_leaf = 0;
  space_to_proto(*spec.observation.structure, spec.observation.leaves, next_leaf,
                 *welcome.mutable_observation());
  next_leaf = 0;
  space_to_proto(*spec.action.structure, spec.action.leaves, next_leaf,
                 *welcome.mutable_action());
  welcome.set_description(spec.description);
  return message.SerializeAsString();
}

EnvSpec decode_welcome(MessageReader& in, size_t max_message_bytes) {
  chimera::ServerMessage message;
  if (!message.ParseFromZeroCopyStream(&in)) {
    throw ProtocolError("expected a message Welcome");
  }
  if (message.has_failure()) throw ServerFailure(message.failure().reason());
  if (!message.has_welcome()) throw ProtocolError("expected a message Welcome");
  const chimera::Welcome& welcome = message.welcome();
  if (welcome.protocol_version() != kProtocolVersion) {
    throw VersionError(version_error("server", welcome.protocol_version()));
  }
  EnvSpec spec;
  spec.num_envs = welcome.num_envs();
  if (spec.num_envs < 1 || spec.num_envs > EnvSpec::kMaxEnvs) {
    refuse("num_envs", "is " + std::to_string(spec.num_envs));
  }
  spec.observation = space_from_proto(welcome.observation(), "observation");
  spec.action = space_from_proto(welcome.action(), "action");
  spec.description = welcome.description();
  for (const Space* space : {&spec.observation, &spec.action}) {
    const size_t limit = max_message_bytes / spec.num_envs;
    size_t total = 0;  // Of at most kMaxLeaves times limit + 1: far from an overflow.
    for (const LeafSpace& leaf : space->leaves) {
      total += std::min(leaf.num_bytes(), limit + 1);
    }
    const bool is_action = space == &spec.action;
    if (total <= limit) {
      total =
          is_action ? action_message(spec).num_bytes() : step_message(spec).num_bytes();
      if (total <= max_message_bytes) continue;
    }
    refuse(is_action ? "action" : "observation",
           "for " + std::to_string(spec.num_envs) +
               " environments does not fit into max_message_bytes=" +
               std::to_string(max_message_bytes));
  }
  return spec;
}

std::string encode_failure(const std::string& reason) {
  chimera::ServerMessage message;
  message.mutable_failure()->set_reason(reason);
  return message.SerializeAsString();
}

FixedMessage::FixedMessage(int kind, std::span<const int> field_numbers,
                           std::span<const size_t> sizes) {
  std::vector<std::string> heads;
  size_t inner = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    heads.push_back(varint(make_tag(field_numbers[i])) +
                    varint(static_cast<uint32_t>(sizes[i])));
    inner += heads.back().size() + sizes[i];
  }
  const std::string outer =
      varint(make_tag(kind)) + varint(static_cast<uint32_t>(inner));
  frame_.emplace_back(0, outer);
  num_bytes_ = outer.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    frame_.emplace_back(num_bytes_, heads[i]);
    offsets_.push_back(num_bytes_ + heads[i].size());
    num_bytes_ = offsets_.back() + sizes[i];
  }
}

void FixedMessage::write_frame(std::byte* data) const {
  for (const auto& [where, what] : frame_) {
    std::copy_n(reinterpret_cast<const std::byte*>(what.data()), what.size(),
                data + where);
  }
}

FixedMessage step_message(const EnvSpec& spec) {
  std::vector<int> numbers;
  std::vector<size_t> sizes;
  for (const LeafSpace& leaf : spec.observation.leaves) {
    numbers.push_back(1);
    sizes.push_back(spec.num_envs * leaf.num_bytes());
  }
  const size_t small[] = {4, 1, 1, 1, 4, 4};  // Bytes of reward, ..., episode_step.
  for (int i = 0; i < 6; ++i) {
    numbers.push_back(i + 2);
    sizes.push_back(spec.num_envs * small[i]);
  }
  return FixedMessage(kStepKind, numbers, sizes);
}

StepView step_view(const EnvSpec& spec, const FixedMessage& message, std::byte* data) {
  StepView view{};
  const size_t num_envs = spec.num_envs;
  size_t i = 0;
  for (const LeafSpace& leaf : spec.observation.leaves) {
    view.observation.push_back({data + message.offset(i++), num_envs * leaf.num_bytes(),
                                leaf.dtype == DType::kBool});
  }
  view.reward = {data + message.offset(i++), num_envs * 4, false};
  view.terminated = {data + message.offset(i++), num_envs, true};
  view.truncated = {data + message.offset(i++), num_envs, true};
  view.first = {data + message.offset(i++), num_envs, true};
  view.episode_return = {data + message.offset(i++), num_envs * 4, false};
  view.episode_step = {data + message.offset(i++), num_envs * 4, false};
  return view;
}

FixedMessage action_message(const EnvSpec& spec) {
  std::vector<int> numbers;
  std::vector<size_t> sizes;
  for (const LeafSpace& leaf : spec.action.leaves) {
    numbers.push_back(1);
    sizes.push_back(spec.num_envs * leaf.num_bytes());
  }
  return FixedMessage(kActionKind, numbers, sizes);
}

void decode_step(MessageReader& message, const StepView& view) {
  const std::span<const FieldView> fields[] = {
      view.observation,        {&view.reward, 1}, {&view.terminated, 1},
      {&view.truncated, 1},    {&view.first, 1},  {&view.episode_return, 1},
      {&view.episode_step, 1},
  };
  std::string failure;
  read_kind(
      message, "Step", kStepKind, [&](FieldReader& in) { in.read(fields); }, &failure);
  if (!failure.empty()) throw ServerFailure(failure);
}

void decode_action(MessageReader& message, const std::vector<FieldView>& view) {
  const std::span<const FieldView> fields[] = {view};
  read_kind(message, "Action", kActionKind, [&](FieldReader& in) { in.read(fields); });
}

}  // namespace beast
