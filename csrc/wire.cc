// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace beast {
namespace {

using Field = MessageReader::Field;

// Numbers of fields in rpcenv.proto.
enum Kind { kHello = 1, kAction = 2, kWelcome = 1, kStep = 2, kFailure = 3 };
enum WelcomeField {
  kVersion = 1,
  kNumEnvs = 2,
  kObservation = 3,
  kActions = 4,
  kText = 5
};
enum SpaceField { kLeaf = 1, kTuple = 2, kDict = 3 };
enum LeafField {
  kDType = 1,
  kShape = 2,
  kNumValues = 3,
  kStart = 4,
  kLow = 5,
  kHigh = 6
};

// Writing.

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

void put_head(std::string& out, int number, size_t size) {
  put_varint(out, number << 3 | Field::kBytes);
  put_varint(out, size);
}

void put_bytes(std::string& out, int number, const std::string& bytes) {
  put_head(out, number, bytes.size());
  out += bytes;
}

void put_number(std::string& out, int number, uint64_t value) {
  if (value == 0) return;  // As proto3 does.
  put_varint(out, number << 3 | Field::kVarint);
  put_varint(out, value);
}

std::string as_message(int kind, const std::string& inner) {
  std::string out;
  put_bytes(out, kind, inner);
  return out;
}

std::string encode_leaf(const LeafSpace& leaf) {
  std::string out, shape;
  put_number(out, kDType, static_cast<uint64_t>(leaf.dtype));
  for (int64_t dim : leaf.shape.dims()) put_varint(shape, dim);
  if (!shape.empty()) put_bytes(out, kShape, shape);
  put_number(out, kNumValues, leaf.num_values);
  put_number(out, kStart, leaf.start);
  if (!leaf.low.empty()) put_bytes(out, kLow, leaf.low);
  if (!leaf.high.empty()) put_bytes(out, kHigh, leaf.high);
  return out;
}

std::string encode_space(const Structure& structure,
                         const std::vector<LeafSpace>& leaves, size_t& next_leaf) {
  if (structure.kind() == Structure::Kind::kLeaf) {
    return as_message(kLeaf, encode_leaf(leaves[next_leaf++]));
  }
  const bool is_dict = structure.kind() == Structure::Kind::kDict;
  std::string children;
  for (size_t i = 0; i < structure.children().size(); ++i) {
    std::string child = encode_space(*structure.children()[i], leaves, next_leaf);
    if (is_dict) {
      std::string entry;
      put_bytes(entry, 1, structure.keys()[i]);
      put_bytes(entry, 2, child);
      child = std::move(entry);
    }
    put_bytes(children, 1, child);
  }
  return as_message(is_dict ? kDict : kTuple, children);
}

// Reading. Errors name the message, then where in it.

struct InvalidSpec : ProtocolError {
  using ProtocolError::ProtocolError;
};

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw InvalidSpec("the server's Welcome is not valid: " + where + " " + what);
}

// Calls fn(field) for each field of the bytes, of which fn reads or skips what it gets.
template <class Fn>
void read_fields(MessageReader& in, const Field& field, Fn fn) {
  const size_t outer = in.enter(field);
  Field inner;
  while (in.next(inner)) fn(inner);
  in.leave(outer);
}

// Finds the one submessage of a message and calls fn(field) on it. Any other kind than
// those in `kinds` is refused, unknown fields are skipped.
template <class Fn>
void read_message(MessageReader& in, const char* name,
                  std::initializer_list<uint32_t> kinds, Fn fn) {
  bool found = false;
  try {
    Field field;
    while (in.next(field)) {
      if (std::find(kinds.begin(), kinds.end(), field.number) != kinds.end() &&
          field.type == Field::kBytes) {
        if (found) throw ProtocolError("more than one message in one");
        found = true;
        fn(field);
      } else if (field.number <= 3) {
        throw ProtocolError(std::string("another message: expected a message ") + name);
      } else {
        in.skip(field);
      }
    }
  } catch (const VersionError&) {
    throw;
  } catch (const InvalidSpec&) {
    throw;
  } catch (const ProtocolError& error) {
    throw ProtocolError(std::string(name) + ": " + error.what());
  }
  if (!found) throw ProtocolError(std::string("expected a message ") + name);
}

bool is_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t size = lead < 0x80   ? 1
                        : lead < 0xc2 ? 0
                        : lead < 0xe0 ? 2
                        : lead < 0xf0 ? 3
                        : lead < 0xf5 ? 4
                                      : 0;
    if (size == 0 || i + size > text.size()) return false;
    for (size_t k = 1; k < size; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    }
    if (size > 2) {  // Not overlong, no surrogate, not past U+10FFFF.
      const auto second = static_cast<unsigned char>(text[i + 1]);
      if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
          (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) {
        return false;
      }
    }
    i += size;
  }
  return true;
}

// For people to see, whatever it is.
std::string readable(std::string text) {
  if (is_utf8(text)) return text;
  for (char& c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) c = '?';
  }
  return text;
}

std::string read_text(MessageReader& in, const Field& field, const std::string& where) {
  std::string text = in.read_string(field);
  if (!is_utf8(text)) refuse(where, "has a text that is not UTF-8");
  return text;
}

int64_t read_number(const Field& field, const std::string& where) {
  if (field.type != Field::kVarint) refuse(where, "has bytes where a number belongs");
  return static_cast<int64_t>(field.value);
}

LeafSpace read_leaf(MessageReader& in, const Field& field, const std::string& where) {
  LeafSpace leaf;
  int64_t dtype_number = 0;
  std::vector<int64_t> dims;
  auto add_dim = [&](int64_t dim) {
    if (dims.size() == Space::kMaxRank) {
      refuse(where, "has more than " + std::to_string(Space::kMaxRank) + " dimensions");
    }
    dims.push_back(dim);
  };
  read_fields(in, field, [&](const Field& inner) {
    switch (inner.number) {
      case kDType:
        dtype_number = read_number(inner, where);
        break;
      case kShape:
        if (inner.type == Field::kVarint) {
          add_dim(static_cast<int64_t>(inner.value));  // Not packed, which is allowed.
        } else {
          const size_t outer = in.enter(inner);
          while (!in.at_end()) add_dim(static_cast<int64_t>(in.read_varint()));
          in.leave(outer);
        }
        break;
      case kNumValues:
        leaf.num_values = read_number(inner, where);
        break;
      case kStart:
        leaf.start = read_number(inner, where);
        break;
      case kLow:
        leaf.low = in.read_string(inner, SIZE_MAX);
        break;
      case kHigh:
        leaf.high = in.read_string(inner, SIZE_MAX);
        break;
      default:
        in.skip(inner);
    }
  });
  const auto dtype = dtype_from_number(dtype_number);
  if (!dtype) refuse(where, "has the unknown dtype " + std::to_string(dtype_number));
  leaf.dtype = *dtype;
  const auto num_bytes = checked_num_bytes(leaf.dtype, dims);
  if (!num_bytes) refuse(where, "has a negative or overflowing shape");
  leaf.shape = Shape(dims);
  const bool discrete = leaf.dtype == DType::kInt64 && dims.empty();
  int64_t unused_last;
  if (leaf.num_values < 0 || (leaf.num_values > 0 && !discrete) ||
      (leaf.num_values == 0 && leaf.start != 0) ||
      __builtin_add_overflow(leaf.start, leaf.num_values, &unused_last)) {
    refuse(where, "has num_values or start that only scalar int64 leaves may have");
  }
  for (const std::string* bound : {&leaf.low, &leaf.high}) {
    if (!bound->empty() && bound->size() != *num_bytes) {
      refuse(where, "has a bound of " + std::to_string(bound->size()) +
                        " bytes, expected " + std::to_string(*num_bytes));
    }
  }
  return leaf;
}

Structure::Ptr read_space(MessageReader& in, const Field& field,
                          const std::string& where, int depth,
                          std::vector<LeafSpace>& leaves);

// Containers without a leaf in them are refused: a few bytes would make many nodes.
Structure::Ptr read_tuple(MessageReader& in, const Field& field,
                          const std::string& where, int depth,
                          std::vector<LeafSpace>& leaves) {
  std::vector<Structure::Ptr> children;
  read_fields(in, field, [&](const Field& inner) {
    if (inner.number != 1) return in.skip(inner);
    const std::string index = "[" + std::to_string(children.size()) + "]";
    children.push_back(read_space(in, inner, where + index, depth + 1, leaves));
  });
  if (children.empty()) refuse(where, "has no leaf");
  return Structure::tuple(std::move(children));
}

Structure::Ptr read_dict(MessageReader& in, const Field& field,
                         const std::string& where, int depth,
                         std::vector<LeafSpace>& leaves) {
  std::vector<std::pair<std::string, Structure::Ptr>> children;
  read_fields(in, field, [&](const Field& entry) {
    if (entry.number != 1) return in.skip(entry);
    std::optional<std::string> key;
    Structure::Ptr value;
    read_fields(in, entry, [&](const Field& inner) {
      if (inner.number == 1 && !key) {
        key = read_text(in, inner, where);
      } else if (inner.number == 2 && !value) {
        value =
            read_space(in, inner, where + "." + key.value_or("?"), depth + 1, leaves);
      } else if (inner.number <= 2) {
        refuse(where, "has an entry with two keys or values");
      } else {
        in.skip(inner);
      }
    });
    if (!value) refuse(where, "has a key without a value");
    // Strictly rising keys: leaves then stand in the order of their structure.
    if (!children.empty() && children.back().first >= key.value_or("")) {
      refuse(where, "has keys that are not sorted or not distinct");
    }
    children.emplace_back(key.value_or(""), std::move(value));
  });
  if (children.empty()) refuse(where, "has no leaf");
  return Structure::dict(std::move(children));
}

Structure::Ptr read_space(MessageReader& in, const Field& field,
                          const std::string& where, int depth,
                          std::vector<LeafSpace>& leaves) {
  if (depth > Structure::kMaxDepth) refuse(where, "is nested too deeply");
  Structure::Ptr structure;
  read_fields(in, field, [&](const Field& inner) {
    if (inner.number > kDict) return in.skip(inner);
    if (structure) refuse(where, "is more than one space");
    if (inner.number == kLeaf) {
      if (leaves.size() == Space::kMaxLeaves) refuse(where, "is one leaf too many");
      leaves.push_back(read_leaf(in, inner, where));
      structure = Structure::leaf();
    } else if (inner.number == kTuple) {
      structure = read_tuple(in, inner, where, depth, leaves);
    } else {
      structure = read_dict(in, inner, where, depth, leaves);
    }
  });
  if (!structure) refuse(where, "is neither a leaf nor a tuple nor a dict");
  return structure;
}

// Writes the items to every num_channels-th place.
template <size_t kItemBytes>
void spread(std::span<const std::byte> items, size_t num_channels, std::byte* to) {
  for (size_t i = 0; i < items.size(); i += kItemBytes) {
    std::memcpy(to + i * num_channels, items.data() + i, kItemBytes);
  }
}

void spread(std::span<const std::byte> items, const FieldView::Images& images,
            std::byte* to) {
  auto* fn = &spread<1>;
  if (images.item_bytes == 2) fn = &spread<2>;
  if (images.item_bytes == 4) fn = &spread<4>;
  if (images.item_bytes == 8) fn = &spread<8>;
  fn(items, images.num_channels, to);
}

// With is_newest, of stacked frames only the last is in the message: the others are
// those of the Step before, one place further on.
void read_images(MessageReader& in, const FieldView& place, bool is_newest) {
  const FieldView::Images& images = place.images;
  const size_t num_bytes = place.num_bytes / images.num_envs;
  const size_t channel_bytes = num_bytes / images.num_channels;
  std::vector<std::byte> channel(images.channels_last ? channel_bytes : 0);
  for (size_t k = 0; k < images.num_envs; ++k) {
    std::byte* data = place.data + k * num_bytes;
    const size_t num_kept = is_newest ? images.num_channels - 1 : 0;
    if (is_newest) {
      const size_t shift = images.channels_last ? images.item_bytes : channel_bytes;
      std::memcpy(data, images.previous + k * num_bytes + shift, num_bytes - shift);
    }
    if (!images.channels_last) {
      in.read(data + num_kept * channel_bytes, num_bytes - num_kept * channel_bytes);
      continue;
    }
    for (size_t c = num_kept; c < images.num_channels; ++c) {
      in.read(channel.data(), channel.size());
      spread(channel, images, data + c * images.item_bytes);
    }
  }
}

// Reads the bytes fields 1, 2, ... of a submessage into their places. Each must come
// exactly once (a repeated one: as often as there are views), with exactly its length.
void read_arrays(MessageReader& in, const Field& field,
                 std::span<const std::span<const FieldView>> views) {
  size_t seen[9] = {};
  const auto fail = [](uint32_t number, const std::string& what) {
    throw ProtocolError("field " + std::to_string(number) + " " + what);
  };
  read_fields(in, field, [&](const Field& inner) {
    if (inner.number > views.size()) return in.skip(inner);
    if (inner.type != Field::kBytes) fail(inner.number, "is not a bytes field");
    const auto& places = views[inner.number - 1];
    if (seen[inner.number] == places.size()) fail(inner.number, "comes too often");
    const FieldView& place = places[seen[inner.number]++];
    const FieldView::Images& images = place.images;
    const bool is_newest =
        images.previous && inner.size * images.num_channels == place.num_bytes;
    if (inner.size != place.num_bytes && !is_newest) {
      fail(inner.number, "has " + std::to_string(inner.size) + " bytes, expected " +
                             std::to_string(place.num_bytes));
    }
    if (is_newest || images.channels_last) {
      read_images(in, place, is_newest);
    } else {
      in.read(place.data, place.num_bytes);
    }
    if (!place.is_bool) return;
    for (size_t i = 0; i < place.num_bytes; ++i) {
      place.data[i] = std::byte{place.data[i] != std::byte{0}};
    }
  });
  for (uint32_t number = 1; number <= views.size(); ++number) {
    if (seen[number] < views[number - 1].size()) fail(number, "is missing");
  }
}

std::string read_failure(MessageReader& in, const Field& field) {
  std::string reason;
  read_fields(in, field, [&](const Field& inner) {
    if (inner.number != 1) return in.skip(inner);
    reason = in.read_string(inner, SIZE_MAX);
  });
  return reason.empty() ? "no reason given" : readable(std::move(reason));
}

void check_version(const char* whose, uint64_t version) {
  if (version == kProtocolVersion) return;
  throw VersionError(std::string("the ") + whose + " speaks protocol version " +
                     std::to_string(version) + ", this side " +
                     std::to_string(kProtocolVersion) +
                     "; run the same version of Chimera on both sides");
}

}  // namespace

std::string encode_hello(const std::string& run_id, bool only_spec, bool takes_newest) {
  std::string hello;
  put_number(hello, 1, kProtocolVersion);
  if (!run_id.empty()) put_bytes(hello, 2, run_id);
  put_number(hello, 3, only_spec);
  put_number(hello, 4, takes_newest);
  return as_message(kHello, hello);
}

Hello decode_hello(MessageReader& in) {
  Hello hello;
  read_message(in, "Hello", {kHello}, [&](const Field& field) {
    uint64_t version = 0;
    read_fields(in, field, [&](const Field& inner) {
      if (inner.number == 1 && inner.type == Field::kVarint) {
        version = inner.value;
      } else if (inner.number == 2) {
        hello.run_id = readable(in.read_string(inner));
      } else if (inner.number == 3 && inner.type == Field::kVarint) {
        hello.only_spec = inner.value != 0;
      } else if (inner.number == 4 && inner.type == Field::kVarint) {
        hello.takes_newest = inner.value != 0;
      } else {
        in.skip(inner);
      }
    });
    check_version("client", version);
  });
  return hello;
}

std::string encode_welcome(const EnvSpec& spec) {
  std::string welcome;
  put_number(welcome, kVersion, kProtocolVersion);
  put_number(welcome, kNumEnvs, spec.num_envs);
  size_t next_leaf = 0;
  put_bytes(
      welcome, kObservation,
      encode_space(*spec.observation.structure, spec.observation.leaves, next_leaf));
  next_leaf = 0;
  put_bytes(welcome, kActions,
            encode_space(*spec.action.structure, spec.action.leaves, next_leaf));
  put_bytes(welcome, kText, spec.description);
  return as_message(kWelcome, welcome);
}

EnvSpec decode_welcome(MessageReader& in, size_t max_message_bytes) {
  EnvSpec spec;
  spec.num_envs = 0;
  uint64_t version = 0;
  std::string failure;
  auto read_one = [&](const Field& field, const char* where, Space& space) {
    if (!space.leaves.empty()) refuse(where, "is given twice");
    space.structure = read_space(in, field, where, 0, space.leaves);
  };
  read_message(in, "Welcome", {kWelcome, kFailure}, [&](const Field& field) {
    if (field.number == kFailure) {
      failure = read_failure(in, field);
      return;
    }
    read_fields(in, field, [&](const Field& inner) {
      switch (inner.number) {
        case kVersion:
          version = read_number(inner, "protocol_version");
          break;
        case kNumEnvs:
          spec.num_envs = read_number(inner, "num_envs");
          break;
        case kObservation:
          // Before anything that another version may have changed.
          if (version != 0) check_version("server", version);
          read_one(inner, "observation", spec.observation);
          break;
        case kActions:
          read_one(inner, "action", spec.action);
          break;
        case kText:
          spec.description = read_text(in, inner, "description");
          break;
        default:
          in.skip(inner);
      }
    });
    check_version("server", version);
  });
  if (!failure.empty()) throw ServerFailure(failure);
  if (spec.num_envs < 1 || spec.num_envs > EnvSpec::kMaxEnvs) {
    refuse("num_envs", "is " + std::to_string(spec.num_envs));
  }
  for (const Space* space : {&spec.observation, &spec.action}) {
    const bool is_action = space == &spec.action;
    if (space->leaves.empty())
      refuse(is_action ? "action" : "observation", "is missing");
    const size_t limit = max_message_bytes / spec.num_envs;
    size_t total = 0;  // Of at most kMaxLeaves times limit + 1: far from an overflow.
    for (const LeafSpace& leaf : space->leaves) {
      total += std::min(leaf.num_bytes(), limit + 1);
    }
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
  std::string failure;
  put_bytes(failure, 1, reason);
  return as_message(kFailure, failure);
}

FixedMessage::FixedMessage(int kind, std::span<const int> field_numbers,
                           std::span<const size_t> sizes) {
  std::vector<std::string> heads;
  size_t inner = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    put_head(heads.emplace_back(), field_numbers[i], sizes[i]);
    inner += heads.back().size() + sizes[i];
  }
  std::string outer;
  put_head(outer, kind, inner);
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

int64_t num_channels(const LeafSpace& leaf) {
  const bool is_image = leaf.shape.rank() == 3 && leaf.num_bytes() > 0;
  return is_image ? leaf.shape[0] : 1;
}

FixedMessage step_message(const EnvSpec& spec, bool newest) {
  std::vector<int> numbers;
  std::vector<size_t> sizes;
  for (const LeafSpace& leaf : spec.observation.leaves) {
    numbers.push_back(1);
    const int64_t num_parts = newest ? num_channels(leaf) : 1;
    sizes.push_back(spec.num_envs * leaf.num_bytes() / num_parts);
  }
  const size_t small[] = {4, 1, 1, 1, 4, 4, 4};  // Bytes of reward, ..., busy_seconds.
  for (int i = 0; i < 7; ++i) {
    numbers.push_back(i + 2);
    sizes.push_back(spec.num_envs * small[i]);
  }
  return FixedMessage(kStep, numbers, sizes);
}

StepView step_view(const EnvSpec& spec, const FixedMessage& message, std::byte* data,
                   bool newest) {
  StepView view{};
  const size_t num_envs = spec.num_envs;
  size_t i = 0;
  for (const LeafSpace& leaf : spec.observation.leaves) {
    const size_t num_bytes =
        num_envs * leaf.num_bytes() / (newest ? num_channels(leaf) : 1);
    view.observation.push_back(
        {data + message.offset(i++), num_bytes, leaf.dtype == DType::kBool});
  }
  view.reward = {data + message.offset(i++), num_envs * 4, false};
  view.terminated = {data + message.offset(i++), num_envs, true};
  view.truncated = {data + message.offset(i++), num_envs, true};
  view.first = {data + message.offset(i++), num_envs, true};
  view.episode_return = {data + message.offset(i++), num_envs * 4, false};
  view.episode_step = {data + message.offset(i++), num_envs * 4, false};
  view.busy_seconds = {data + message.offset(i++), num_envs * 4, false};
  return view;
}

bool is_shifted(const EnvSpec& spec, const StepView& before, const StepView& now) {
  for (size_t i = 0; i < spec.observation.leaves.size(); ++i) {
    const LeafSpace& leaf = spec.observation.leaves[i];
    if (num_channels(leaf) == 1) continue;
    const size_t all = leaf.num_bytes(), one = all / num_channels(leaf);
    const std::byte* a = before.observation[i].data + one;
    const std::byte* b = now.observation[i].data;
    for (int64_t k = 0; k < spec.num_envs; ++k, a += all, b += all) {
      if (std::memcmp(a, b, all - one) != 0) return false;
    }
  }
  return true;
}

void copy_newest(const EnvSpec& spec, const StepView& from, const StepView& to) {
  for (size_t i = 0; i < spec.observation.leaves.size(); ++i) {
    const LeafSpace& leaf = spec.observation.leaves[i];
    const size_t all = leaf.num_bytes(), one = all / num_channels(leaf);
    for (int64_t k = 0; k < spec.num_envs; ++k) {
      std::memcpy(to.observation[i].data + k * one,
                  from.observation[i].data + (k + 1) * all - one, one);
    }
  }
  for (auto field : {&StepView::reward, &StepView::terminated, &StepView::truncated,
                     &StepView::first, &StepView::episode_return,
                     &StepView::episode_step, &StepView::busy_seconds}) {
    std::memcpy((to.*field).data, (from.*field).data, (to.*field).num_bytes);
  }
}

FixedMessage action_message(const EnvSpec& spec) {
  std::vector<int> numbers;
  std::vector<size_t> sizes;
  for (const LeafSpace& leaf : spec.action.leaves) {
    numbers.push_back(1);
    sizes.push_back(spec.num_envs * leaf.num_bytes());
  }
  return FixedMessage(kAction, numbers, sizes);
}

void decode_step(MessageReader& message, const StepView& view) {
  const std::span<const FieldView> fields[] = {
      view.observation,        {&view.reward, 1},       {&view.terminated, 1},
      {&view.truncated, 1},    {&view.first, 1},        {&view.episode_return, 1},
      {&view.episode_step, 1}, {&view.busy_seconds, 1},
  };
  std::string failure;
  read_message(message, "Step", {kStep, kFailure}, [&](const Field& field) {
    if (field.number == kFailure) {
      failure = read_failure(message, field);
    } else {
      read_arrays(message, field, fields);
    }
  });
  if (!failure.empty()) throw ServerFailure(failure);
}

void decode_action(MessageReader& message, const std::vector<FieldView>& view) {
  const std::span<const FieldView> fields[] = {view};
  read_message(message, "Action", {kAction},
               [&](const Field& field) { read_arrays(message, field, fields); });
}

}  // namespace beast
