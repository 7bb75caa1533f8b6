// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <climits>
#include <functional>
#include <limits>

#include "check.h"
#include "messages.h"

namespace beast::test {
namespace {

constexpr size_t kMaxBytes = size_t{64} << 20;
constexpr size_t kPieceSizes[] = {SIZE_MAX, 1, 2, 7};

std::string hello_of(Pieces message) { return decode_hello(message).run_id; }

EnvSpec welcome_of(Pieces message, size_t max_message_bytes = kMaxBytes) {
  return decode_welcome(message, max_message_bytes);
}
EnvSpec welcome_of(const chimera::ServerMessage& message) {
  return welcome_of(Pieces(message.SerializeAsString()));
}

// The fields of the message, which is a step of the spec.
Fields step_of(const EnvSpec& spec, Pieces message) {
  Fields fields(spec);
  decode_step(message, fields.view());
  return fields;
}

Fields action_of(const EnvSpec& spec, Pieces message) {
  Fields fields(spec.action, spec.num_envs);
  decode_action(message, fields.observation_view());
  return fields;
}

Fields random_step(const EnvSpec& spec, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Fields fields(spec);
  fields.randomize(random);
  return fields;
}

Fields random_action(const EnvSpec& spec, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Fields fields(spec.action, spec.num_envs);
  fields.randomize(random);
  return fields;
}

// A Step as its fields, each of them encoded: number, bytes.
using Encoded = std::vector<std::pair<int, std::string>>;

Encoded encoded_step(const Fields& fields) {
  Encoded encoded;
  for (const auto& bytes : fields.observation) {
    encoded.emplace_back(1, bytes_field(1, text_of(bytes)));
  }
  for (size_t i = 0; i < fields.others.size(); ++i) {
    const int number = static_cast<int>(i) + 2;
    encoded.emplace_back(number, bytes_field(number, text_of(fields.others[i])));
  }
  return encoded;
}

std::string join(const Encoded& fields) {
  std::string inner;
  for (const auto& [unused_number, bytes] : fields) inner += bytes;
  return bytes_field(2, inner);
}

bool same(const Space& a, const Space& b) {
  if (!a.structure->equals(*b.structure) || a.leaves.size() != b.leaves.size()) {
    return false;
  }
  for (size_t i = 0; i < a.leaves.size(); ++i) {
    const LeafSpace &one = a.leaves[i], &other = b.leaves[i];
    if (one.dtype != other.dtype || !(one.shape == other.shape) ||
        one.num_values != other.num_values || one.start != other.start ||
        one.low != other.low || one.high != other.high) {
      return false;
    }
  }
  return true;
}

bool same(const EnvSpec& a, const EnvSpec& b) {
  return a.num_envs == b.num_envs && a.description == b.description &&
         same(a.observation, b.observation) && same(a.action, b.action);
}

// A Welcome with one float32 scalar each way.
chimera::ServerMessage small_welcome() {
  chimera::ServerMessage message;
  chimera::Welcome& welcome = *message.mutable_welcome();
  welcome.set_protocol_version(1);
  welcome.set_num_envs(1);
  welcome.mutable_observation()->mutable_leaf()->set_dtype(chimera::FLOAT32);
  welcome.mutable_action()->mutable_leaf()->set_dtype(chimera::FLOAT32);
  return message;
}

chimera::Space::Leaf& observation_leaf(chimera::ServerMessage& message) {
  return *message.mutable_welcome()->mutable_observation()->mutable_leaf();
}

// --- Hello ---

TEST(hello_round_trips) {
  for (const std::string& run_id :
       {std::string(), std::string("breakout-7"), std::string("öäü\n\0x", 9),
        std::string(100'000, 'x')}) {
    for (size_t size : kPieceSizes) {
      for (bool only_spec : {false, true}) {
        Pieces pieces(encode_hello(run_id, only_spec, !only_spec), size);
        const Hello hello = decode_hello(pieces);
        CHECK_EQ(hello.run_id, run_id);
        CHECK_EQ(hello.only_spec, only_spec);
        CHECK_EQ(hello.takes_newest, !only_spec);
      }
    }
  }
}

TEST(hello_reads_as_protobuf_says) {
  chimera::ClientMessage message;
  CHECK(message.ParseFromString(encode_hello("a")));
  CHECK_EQ(message.hello().protocol_version(), 1u);
  CHECK_EQ(message.hello().run_id(), "a");
  CHECK(!message.hello().only_spec());
  CHECK(message.ParseFromString(encode_hello("a", true)));
  CHECK(message.hello().only_spec());
}

TEST(hello_may_have_its_fields_in_any_order_and_unknown_ones) {
  const std::string version = tag(1, 0) + varint(1), run_id = bytes_field(2, "run");
  CHECK_EQ(hello_of(Pieces(bytes_field(1, run_id + version))), "run");
  CHECK_EQ(hello_of(Pieces(unknown_fields() +
                           bytes_field(1, unknown_fields() + version + run_id) +
                           unknown_fields())),
           "run");
}

TEST(hello_of_another_version_is_refused_with_both_versions) {
  for (uint32_t version : {0u, 2u, 3u, UINT32_MAX}) {
    chimera::ClientMessage message;
    message.mutable_hello()->set_protocol_version(version);
    CHECK_THROWS(VersionError, hello_of(Pieces(message.SerializeAsString())),
                 "version " + std::to_string(version) + ", this side 1");
  }
}

TEST(what_is_no_hello_is_refused) {
  const EnvSpec spec = rich_spec();
  std::mt19937_64 random(1);
  for (const std::string& message :
       {std::string(), action_proto(random_action(spec)).SerializeAsString(),
        bytes_field(1, ""), tag(1, 0) + varint(1), unknown_fields(),
        bytes_field(1, tag(2, 0) + varint(1)), noise(100, random)}) {
    CHECK_THROWS(ProtocolError, hello_of(Pieces(message)), "");
  }
}

TEST(hello_that_is_cut_anywhere_is_refused) {
  const std::string message = encode_hello("some run");
  for (size_t size = 0; size < message.size(); ++size) {
    for (size_t piece : kPieceSizes) {
      CHECK_THROWS(ProtocolError, hello_of(Pieces(message.substr(0, size), piece)), "");
    }
  }
}

// --- Welcome ---

TEST(welcome_round_trips) {
  for (int64_t num_envs : {int64_t{1}, int64_t{3}, EnvSpec::kMaxEnvs}) {
    const EnvSpec spec = rich_spec(num_envs);
    for (size_t size : kPieceSizes) {
      CHECK(same(welcome_of(Pieces(encode_welcome(spec), size)), spec));
    }
  }
}

TEST(every_dtype_makes_the_round_trip) {
  for (int number = 1; number <= 13; ++number) {
    EnvSpec spec;
    spec.observation = single(leaf(static_cast<DType>(number), {2}));
    spec.action = single(leaf(static_cast<DType>(number), {}));
    CHECK(same(welcome_of(Pieces(encode_welcome(spec))), spec));
  }
}

TEST(welcome_may_have_unknown_fields) {
  const std::string message = small_welcome().SerializeAsString();
  const std::string inner = small_welcome().welcome().SerializeAsString();
  welcome_of(Pieces(unknown_fields() + message + unknown_fields()));
  welcome_of(Pieces(bytes_field(1, unknown_fields() + inner + unknown_fields())));
}

TEST(welcome_may_have_its_fields_in_any_order) {
  const EnvSpec spec = rich_spec();
  chimera::ServerMessage message;
  CHECK(message.ParseFromString(encode_welcome(spec)));
  const chimera::Welcome& welcome = message.welcome();
  std::vector<std::string> fields{
      tag(1, 0) + varint(1), tag(2, 0) + varint(3),
      bytes_field(3, welcome.observation().SerializeAsString()),
      bytes_field(4, welcome.action().SerializeAsString()),
      bytes_field(5, welcome.description())};
  std::sort(fields.begin(), fields.end());
  do {
    std::string inner;
    for (const std::string& field : fields) inner += field;
    CHECK(same(welcome_of(Pieces(bytes_field(1, inner))), spec));
  } while (std::next_permutation(fields.begin(), fields.end()));
  // The value of an entry before its key, and a shape that is not packed.
  const std::string leaf = bytes_field(
      1, tag(2, 0) + varint(2) + tag(1, 0) + varint(12) + tag(2, 0) + varint(3));
  const std::string entry = bytes_field(2, leaf) + bytes_field(1, "key");
  const EnvSpec got = welcome_of(
      Pieces(bytes_field(1, tag(1, 0) + varint(1) + tag(2, 0) + varint(1) +
                                bytes_field(3, bytes_field(3, bytes_field(1, entry))) +
                                bytes_field(4, leaf))));
  CHECK_EQ(got.observation.structure->str(), "{key: *}");
  CHECK_EQ(got.observation.leaves[0].shape, Shape({2, 3}));
}

TEST(welcome_of_another_version_is_refused) {
  for (uint32_t version : {0u, 2u, UINT32_MAX}) {
    auto message = small_welcome();
    message.mutable_welcome()->set_protocol_version(version);
    CHECK_THROWS(VersionError, welcome_of(message), std::to_string(version));
  }
}

TEST(welcome_that_is_cut_anywhere_is_refused) {
  const std::string message = encode_welcome(rich_spec());
  for (size_t size = 0; size < message.size(); ++size) {
    CHECK_THROWS(ProtocolError, welcome_of(Pieces(message.substr(0, size))), "");
    CHECK_THROWS(ProtocolError, welcome_of(Pieces(message.substr(0, size), 1)), "");
  }
}

TEST(what_is_no_welcome_is_refused) {
  const EnvSpec spec = rich_spec();
  std::mt19937_64 random(1);
  for (const std::string& message :
       {std::string(), step_proto(random_step(spec)).SerializeAsString(),
        bytes_field(1, ""), unknown_fields(), noise(100, random)}) {
    CHECK_THROWS(ProtocolError, welcome_of(Pieces(message)), "");
  }
}

TEST(only_the_listed_dtype_numbers_are_taken) {
  std::vector<int> numbers{INT_MIN, INT_MIN + 1, -128,          INT_MAX - 255,
                           INT_MAX, 1 << 16,     (1 << 16) + 1, (1 << 24) + 12};
  for (int number = -300; number <= 300; ++number) numbers.push_back(number);
  for (int number : numbers) {
    auto message = small_welcome();
    observation_leaf(message).set_dtype(static_cast<chimera::DType>(number));
    if (number >= 1 && number <= 13) {
      CHECK_EQ(static_cast<int>(welcome_of(message).observation.leaves[0].dtype),
               number);
    } else {
      CHECK_THROWS(ProtocolError, welcome_of(message),
                   "observation has the unknown dtype " + std::to_string(number));
    }
  }
}

TEST(negative_and_overflowing_shapes_are_refused) {
  constexpr int64_t kMin = INT64_MIN, kMax = INT64_MAX, kHalf = int64_t{1} << 32;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {-1},
           {kMin},
           {2, -1},
           {-1, -1},
           {0, -1},
           {-5, 0},
           {kMax},
           {kMax, kMax},
           {kMax / 4 + 1},
           {kHalf, kHalf},
           {kHalf, kHalf, 0},
           {0, kHalf, kHalf},
           {kMin, kMin},
           {1 << 30, 1 << 30, 1 << 30},
           {3, 3, 3, 3, 3, kMax},
       }) {
    auto message = small_welcome();
    for (int64_t dim : shape) observation_leaf(message).add_shape(dim);
    CHECK_THROWS(ProtocolError, welcome_of(message), "observation");
  }
}

TEST(six_dimensions_are_taken_and_seven_refused) {
  auto message = small_welcome();
  for (int i = 0; i < 6; ++i) observation_leaf(message).add_shape(1);
  CHECK_EQ(welcome_of(message).observation.leaves[0].shape.rank(), 6);
  observation_leaf(message).add_shape(1);
  CHECK_THROWS(ProtocolError, welcome_of(message), "has more than 6 dimensions");
  for (int i = 0; i < 100'000; ++i) observation_leaf(message).add_shape(1);
  CHECK_THROWS(ProtocolError, welcome_of(message), "has more than 6 dimensions");
}

TEST(num_envs_is_between_1_and_the_maximum) {
  for (uint32_t num_envs : {0u, 65537u, 1u << 31, UINT32_MAX}) {
    auto message = small_welcome();
    message.mutable_welcome()->set_num_envs(num_envs);
    CHECK_THROWS(ProtocolError, welcome_of(message),
                 "num_envs is " + std::to_string(num_envs));
  }
}

TEST(bounds_have_the_size_of_their_array_or_none) {
  for (size_t size : {0, 1, 7, 8, 9, 16, 1000}) {
    for (bool is_low : {true, false}) {
      auto message = small_welcome();
      observation_leaf(message).add_shape(2);
      const std::string bound(size, 'x');
      if (is_low) {
        observation_leaf(message).set_low(bound);
      } else {
        observation_leaf(message).set_high(bound);
      }
      if (size == 0 || size == 8) {
        const LeafSpace leaf = welcome_of(message).observation.leaves[0];
        CHECK_EQ(is_low ? leaf.low : leaf.high, bound);
      } else {
        CHECK_THROWS(ProtocolError, welcome_of(message),
                     "a bound of " + std::to_string(size) + " bytes, expected 8");
      }
    }
  }
}

TEST(only_scalar_int64_leaves_are_discrete) {
  auto discrete_welcome = [](chimera::DType dtype, bool is_scalar, int64_t num_values,
                             int64_t start) {
    auto message = small_welcome();
    observation_leaf(message).set_dtype(dtype);
    if (!is_scalar) observation_leaf(message).add_shape(1);
    observation_leaf(message).set_num_values(num_values);
    observation_leaf(message).set_start(start);
    return message;
  };
  welcome_of(discrete_welcome(chimera::INT64, true, 4, -2));
  welcome_of(discrete_welcome(chimera::INT64, true, INT64_MAX, 0));
  welcome_of(discrete_welcome(chimera::INT64, true, INT64_MAX, INT64_MIN));
  for (const auto& message : {discrete_welcome(chimera::INT64, false, 4, 0),
                              discrete_welcome(chimera::INT32, true, 4, 0),
                              discrete_welcome(chimera::FLOAT32, true, 4, 0),
                              discrete_welcome(chimera::INT64, true, -1, 0),
                              discrete_welcome(chimera::INT64, true, INT64_MIN, 0),
                              discrete_welcome(chimera::INT64, true, 1, INT64_MAX),
                              discrete_welcome(chimera::INT64, true, INT64_MAX, 1),
                              discrete_welcome(chimera::FLOAT32, true, 0, 5)}) {
    CHECK_THROWS(ProtocolError, welcome_of(message), "num_values");
  }
}

// A space with a leaf so deep, in dicts or in tuples.
chimera::Space deep(int depth, bool is_dict) {
  chimera::Space space;
  space.mutable_leaf()->set_dtype(chimera::FLOAT32);
  for (int i = 0; i < depth; ++i) {
    chimera::Space outer;
    if (is_dict) {
      outer.mutable_dict()->add_entries()->mutable_value()->Swap(&space);
    } else {
      outer.mutable_tuple()->add_items()->Swap(&space);
    }
    space.Swap(&outer);
  }
  return space;
}

TEST(nests_are_at_most_16_deep) {
  for (bool is_dict : {false, true}) {
    auto message = small_welcome();
    *message.mutable_welcome()->mutable_observation() = deep(16, is_dict);
    CHECK_EQ(welcome_of(message).observation.leaves.size(), 1);
    for (int depth : {17, 18, 40}) {
      *message.mutable_welcome()->mutable_observation() = deep(depth, is_dict);
      CHECK_THROWS(ProtocolError, welcome_of(message), "");
    }
  }
}

TEST(nests_that_would_overflow_the_stack_are_refused) {
  std::vector<std::string> heads;  // From the inside out.
  size_t size = 0;
  for (int i = 0; i < 40'000; ++i) {
    heads.push_back(tag(i % 2 + 1, 2) + varint(size));
    size += heads.back().size();
  }
  std::string space;
  for (size_t i = heads.size(); i-- > 0;) space += heads[i];
  const std::string welcome = tag(1, 0) + varint(1) + tag(2, 0) + varint(1) +
                              bytes_field(3, space) + bytes_field(4, space);
  CHECK_THROWS(ProtocolError, welcome_of(Pieces(bytes_field(1, welcome))), "");
  // Groups, which nest without a length.
  std::string groups;
  for (int i = 0; i < 100'000; ++i) groups += tag(9, 3);
  CHECK_THROWS(ProtocolError, welcome_of(Pieces(groups)), "");
  CHECK_THROWS(ProtocolError, hello_of(Pieces(groups)), "");
  const EnvSpec spec = rich_spec();
  CHECK_THROWS(ProtocolError, step_of(spec, Pieces(groups)), "");
  CHECK_THROWS(ProtocolError, step_of(spec, Pieces(bytes_field(2, groups))), "");
}

TEST(spaces_have_1_to_256_leaves) {
  auto message = small_welcome();
  for (bool is_action : {false, true}) {
    auto& space = is_action ? *message.mutable_welcome()->mutable_action()
                            : *message.mutable_welcome()->mutable_observation();
    const chimera::Space good = space;
    space.mutable_tuple();
    CHECK_THROWS(ProtocolError, welcome_of(message), "has no leaf");
    space.mutable_dict();
    CHECK_THROWS(ProtocolError, welcome_of(message), "has no leaf");
    space.clear_kind();
    CHECK_THROWS(ProtocolError, welcome_of(message), "neither a leaf");
    for (int i = 0; i < 256; ++i) {
      space.mutable_tuple()->add_items()->mutable_leaf()->set_dtype(chimera::BOOL);
    }
    const EnvSpec spec = welcome_of(message);
    CHECK_EQ((is_action ? spec.action : spec.observation).leaves.size(), 256);
    space.mutable_tuple()->add_items()->mutable_leaf()->set_dtype(chimera::BOOL);
    CHECK_THROWS(ProtocolError, welcome_of(message), "[256] is one leaf too many");
    space = good;
  }
  message.mutable_welcome()->clear_action();
  CHECK_THROWS(ProtocolError, welcome_of(message), "action is missing");
}

TEST(keys_are_sorted_bytewise_and_distinct) {
  auto keyed = [](const std::vector<std::string>& keys) {
    auto message = small_welcome();
    auto& dict = *message.mutable_welcome()->mutable_observation()->mutable_dict();
    for (const std::string& key : keys) {
      auto& entry = *dict.add_entries();
      entry.set_key(key);
      entry.mutable_value()->mutable_leaf()->set_dtype(chimera::FLOAT32);
    }
    return message;
  };
  CHECK_EQ(welcome_of(keyed({"", "B", "a", "aa", "é"})).observation.leaves.size(), 5);
  for (const auto& keys : std::vector<std::vector<std::string>>{
           {"b", "a"}, {"a", "B"}, {"a", "a"}, {"", ""}, {"é", "z"}, {"a", "b", "a"}}) {
    CHECK_THROWS(ProtocolError, welcome_of(keyed(keys)), "not sorted or not distinct");
  }
}

TEST(a_welcome_that_is_taken_promises_steps_that_fit) {
  for (int64_t num_envs : {1, 2, 7, 1000}) {
    for (int64_t size : {0, 1, 500, 5000}) {
      EnvSpec spec;
      spec.num_envs = num_envs;
      spec.observation = single(leaf(DType::kUInt8, {size}));
      spec.action = single(leaf(DType::kFloat64, {size / 2}));
      const std::string message = encode_welcome(spec);
      const size_t needed =
          std::max(step_message(spec).num_bytes(), action_message(spec).num_bytes());
      CHECK(same(welcome_of(Pieces(message), needed), spec));
      CHECK_THROWS(ProtocolError, welcome_of(Pieces(message), needed - 1),
                   "max_message_bytes=" + std::to_string(needed - 1));
    }
  }
}

TEST(sizes_whose_sum_overflows_do_not_fit) {
  for (int count : {1, 4, 200}) {
    auto message = small_welcome();
    message.mutable_welcome()->set_num_envs(65536);
    auto& tuple = *message.mutable_welcome()->mutable_observation()->mutable_tuple();
    for (int i = 0; i < count; ++i) {
      auto& leaf = *tuple.add_items()->mutable_leaf();
      leaf.set_dtype(chimera::UINT8);
      leaf.add_shape(INT64_MAX);
    }
    CHECK_THROWS(ProtocolError, welcome_of(message), "does not fit");
  }
}

TEST(a_few_bytes_do_not_make_the_receiver_allocate_much) {
  // Four bytes for each empty tuple: a million nodes without a leaf.
  std::string space;
  for (int i = 0; i < 1'000'000; ++i) space += bytes_field(1, bytes_field(2, ""));
  const std::string leaf = bytes_field(1, bytes_field(1, tag(1, 0) + varint(12)));
  const std::string welcome = tag(1, 0) + varint(1) + tag(2, 0) + varint(1) +
                              bytes_field(3, bytes_field(2, leaf + space)) +
                              bytes_field(4, leaf.substr(2));
  CHECK_THROWS(ProtocolError, welcome_of(Pieces(bytes_field(1, welcome))), "");
}

// --- Failure ---

TEST(a_failure_reaches_whoever_waits_for_welcome_or_step) {
  const EnvSpec spec = rich_spec();
  for (size_t size : kPieceSizes) {
    const Pieces failure(encode_failure("it\nbroke"), size);
    CHECK_THROWS(ServerFailure, welcome_of(Pieces(failure.text, size)), "it\nbroke");
    CHECK_THROWS(ServerFailure, step_of(spec, Pieces(failure.text, size)), "it\nbroke");
  }
  CHECK_THROWS(ServerFailure, step_of(spec, Pieces(encode_failure(""))), "no reason");
  chimera::ServerMessage message;
  CHECK(message.ParseFromString(encode_failure("broke")));
  CHECK_EQ(message.failure().reason(), "broke");
}

TEST(a_failure_with_bytes_that_are_no_text_is_still_a_failure) {
  const EnvSpec spec = rich_spec();
  const std::string message = encode_failure("bad \xff\xfe bytes");
  CHECK_THROWS(ServerFailure, step_of(spec, Pieces(message)), "bytes");
  CHECK_THROWS(ServerFailure, welcome_of(Pieces(message)), "bytes");
}

TEST(a_failure_that_is_cut_anywhere_is_refused) {
  const EnvSpec spec = rich_spec();
  const std::string message = encode_failure("something");
  for (size_t size = 0; size < message.size(); ++size) {
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(message.substr(0, size))), "");
    CHECK_THROWS(ProtocolError, welcome_of(Pieces(message.substr(0, size))), "");
  }
}

// --- Step ---

TEST(fixed_message_is_what_protobuf_writes) {
  for (int64_t num_envs : {1, 2, 3, 100, 300}) {  // Lengths of one to three bytes.
    const EnvSpec spec = rich_spec(num_envs);
    const Fields fields = random_step(spec);
    const FixedMessage fixed = step_message(spec);
    std::string bytes(fixed.num_bytes(), '\xee');
    auto* data = reinterpret_cast<std::byte*>(bytes.data());
    fixed.write_frame(data);
    const StepView view = step_view(spec, fixed, data);
    auto put = [](const FieldView& field, const std::vector<std::byte>& value) {
      CHECK_EQ(field.num_bytes, value.size());
      std::copy(value.begin(), value.end(), field.data);
    };
    for (size_t i = 0; i < fields.observation.size(); ++i) {
      put(view.observation[i], fields.observation[i]);
    }
    const FieldView others[] = {
        view.reward,         view.terminated,   view.truncated,   view.first,
        view.episode_return, view.episode_step, view.busy_seconds};
    for (size_t i = 0; i < 7; ++i) put(others[i], fields.others[i]);

    chimera::ServerMessage parsed;
    CHECK(parsed.ParseFromString(bytes));
    CHECK(parsed.SerializeAsString() == step_proto(fields).SerializeAsString());
    CHECK(bytes == parsed.SerializeAsString());
    CHECK(step_of(spec, Pieces(bytes)) == fields);
  }
}

TEST(of_stacked_frames_the_newest_are_enough) {
  EnvSpec spec = rich_spec();
  spec.observation.structure = Structure::tuple({Structure::leaf(), Structure::leaf()});
  spec.observation.leaves = {leaf(DType::kUInt8, {4, 2, 3}),
                             leaf(DType::kFloat32, {2})};
  Fields before = random_step(spec, 1), now = random_step(spec, 2);
  CHECK(!is_shifted(spec, before.view(), now.view()));
  for (int k = 0; k < 3; ++k) {  // Three of four frames move on by one.
    std::copy_n(before.observation[0].begin() + 24 * k + 6, 18,
                now.observation[0].begin() + 24 * k);
  }
  CHECK(is_shifted(spec, before.view(), now.view()));

  const FixedMessage fixed = step_message(spec, /*newest=*/true);
  std::string bytes(fixed.num_bytes(), '\xee');
  auto* data = reinterpret_cast<std::byte*>(bytes.data());
  fixed.write_frame(data);
  copy_newest(spec, now.view(), step_view(spec, fixed, data, /*newest=*/true));
  for (size_t size : kPieceSizes) {
    Fields read(spec);
    StepView view = read.view();
    view.observation[0].images = {3, 4, 1, false, before.observation[0].data()};
    Pieces pieces(bytes, size);
    decode_step(pieces, view);
    CHECK(read == now);
  }
  CHECK_THROWS(ProtocolError, step_of(spec, Pieces(bytes)),
               "field 1 has 18 bytes, expected 72");
  now.observation[0][24] ^= std::byte{1};  // As after a reset of the second.
  CHECK(!is_shifted(spec, before.view(), now.view()));
}

TEST(fixed_action_is_what_protobuf_writes) {
  for (int64_t num_envs : {1, 3, 100, 300}) {
    const EnvSpec spec = rich_spec(num_envs);
    const Fields fields = random_action(spec);
    const FixedMessage fixed = action_message(spec);
    std::string bytes(fixed.num_bytes(), '\xee');
    auto* data = reinterpret_cast<std::byte*>(bytes.data());
    fixed.write_frame(data);
    for (size_t i = 0; i < fields.observation.size(); ++i) {
      std::copy(fields.observation[i].begin(), fields.observation[i].end(),
                data + fixed.offset(i));
    }
    CHECK(bytes == action_proto(fields).SerializeAsString());
    CHECK(action_of(spec, Pieces(bytes)) == fields);
  }
}

TEST(steps_of_protobuf_are_read) {
  const EnvSpec spec = rich_spec();
  const Fields fields = random_step(spec);
  const std::string message = step_proto(fields).SerializeAsString();
  for (size_t size : kPieceSizes) CHECK(step_of(spec, Pieces(message, size)) == fields);
}

TEST(fields_may_come_in_any_order_with_unknown_ones_between) {
  const EnvSpec spec = rich_spec();
  const Fields fields = random_step(spec);
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    // The leaves of the observation keep theirs.
    Encoded shuffled = encoded_step(fields), observation;
    std::erase_if(shuffled, [&](const auto& field) {
      if (field.first == 1) observation.push_back(field);
      return field.first == 1;
    });
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    size_t at = 0;
    for (const auto& field : observation) {
      at += random() % (shuffled.size() - at + 1);
      shuffled.insert(shuffled.begin() + static_cast<int64_t>(at++), field);
    }
    const bool has_unknown = round % 2 == 0;
    if (has_unknown) {
      for (size_t i = shuffled.size() + 1; i-- > 0;) {
        shuffled.insert(shuffled.begin() + static_cast<int64_t>(i),
                        {9, unknown_fields(9)});
      }
    }
    std::string message = join(shuffled);
    if (has_unknown) message = unknown_fields(4) + message + unknown_fields(4);
    CHECK(step_of(spec, Pieces(message, kPieceSizes[round % 4])) == fields);
  }
}

TEST(every_wrong_length_is_refused) {
  const EnvSpec spec = rich_spec();
  const Encoded good = encoded_step(random_step(spec));
  const Fields fields = random_step(spec);
  std::vector<std::string> values;
  for (const auto& bytes : fields.observation) values.push_back(text_of(bytes));
  for (const auto& bytes : fields.others) values.push_back(text_of(bytes));
  for (size_t i = 0; i < good.size(); ++i) {
    const size_t right = values[i].size();
    for (size_t size : {size_t{0}, right - 1, right + 1, 2 * right + 1, right + 4096}) {
      if (size == right || size == SIZE_MAX) continue;  // Of the leaf without elements.
      Encoded wrong = good;
      wrong[i].second = bytes_field(good[i].first, std::string(size, '\1'));
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(wrong))),
                   "expected " + std::to_string(right));
    }
    // A length that lies about what follows.
    for (uint64_t size :
         {uint64_t{INT32_MAX}, uint64_t{1} << 31, uint64_t{UINT32_MAX},
          (uint64_t{1} << 32) + right, uint64_t{1} << 63, ~uint64_t{0}}) {
      Encoded wrong = good;
      wrong[i].second = tag(good[i].first, 2) + varint(size) + values[i];
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(wrong))), "");
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(wrong), 1)), "");
    }
  }
}

TEST(missing_and_repeated_fields_are_refused) {
  const EnvSpec spec = rich_spec();
  const Encoded good = encoded_step(random_step(spec));
  for (size_t i = 0; i < good.size(); ++i) {
    Encoded wrong = good;
    wrong.erase(wrong.begin() + static_cast<int64_t>(i));
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(wrong))), "field ");
    for (size_t at = 0; at <= good.size(); ++at) {
      wrong = good;
      wrong.insert(wrong.begin() + static_cast<int64_t>(at), good[i]);
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(wrong))), "field ");
    }
  }
  CHECK_THROWS(ProtocolError, step_of(spec, Pieces(bytes_field(2, ""))), "is missing");
}

TEST(wrong_wire_types_are_refused) {
  const EnvSpec spec = rich_spec();
  const Encoded good = encoded_step(random_step(spec));
  const std::string payload[] = {varint(1), "12345678", "", "", "", "1234", "", ""};
  for (size_t i = 0; i < good.size(); ++i) {
    for (uint32_t type : {0, 1, 3, 4, 5, 6, 7}) {
      for (bool is_extra : {false, true}) {
        Encoded wrong = good;
        const std::string field = tag(good[i].first, type) + payload[type];
        wrong[i].second = is_extra ? field + wrong[i].second : field;
        CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(wrong))), "");
      }
    }
  }
  const std::string step = join(good);
  for (uint32_t type : {0, 1, 3, 4, 5, 6, 7}) {
    for (uint32_t number : {1, 2, 3}) {
      const std::string field = tag(number, type) + payload[type];
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(field)), "");
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(field + step)), "");
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(step + field)), "");
    }
  }
}

TEST(steps_that_are_cut_anywhere_are_refused) {
  const EnvSpec spec = rich_spec();
  const std::string message = step_proto(random_step(spec)).SerializeAsString();
  const std::string longer = message + unknown_fields();
  for (size_t size = 0; size < message.size(); ++size) {
    for (size_t piece : kPieceSizes) {
      CHECK_THROWS(ProtocolError, step_of(spec, Pieces(message.substr(0, size), piece)),
                   "");
    }
    // Cut within, the lengths around it right.
    if (size < 3) continue;
    const std::string inner = message.substr(2 + (message.size() > 129), size - 2);
    if (inner.size() + 3 >= message.size()) continue;
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(bytes_field(2, inner))), "");
  }
  for (size_t size = message.size() + 1; size < longer.size(); ++size) {
    try {  // Whole unknown fields are fine, halves are not: protobuf says which.
      step_of(spec, Pieces(longer.substr(0, size)));
      CHECK(chimera::ServerMessage().ParseFromString(longer.substr(0, size)));
    } catch (const ProtocolError&) {
      CHECK(!chimera::ServerMessage().ParseFromString(longer.substr(0, size)));
    }
  }
}

TEST(only_one_step_is_in_a_message_and_nothing_else) {
  const EnvSpec spec = rich_spec();
  const std::string step = step_proto(random_step(spec)).SerializeAsString();
  const std::string failure = encode_failure("broke");
  for (const std::string& message :
       {step + step, step + failure, failure + step, failure + failure,
        encode_welcome(spec), encode_welcome(spec) + step, step + encode_welcome(spec),
        encode_hello("a"), std::string(), unknown_fields(), step + std::string(1, '\0'),
        std::string(1, '\0') + step, std::string(100, '\0')}) {
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(message)), "");
  }
}

TEST(field_number_zero_is_refused) {
  const EnvSpec spec = rich_spec();
  const std::string step = step_proto(random_step(spec)).SerializeAsString();
  for (const std::string& zero :
       {std::string("\0\0", 2), tag(0, 2) + varint(0), tag(0, 5) + "1234"}) {
    Encoded fields = encoded_step(random_step(spec));
    fields.insert(fields.begin() + 2, {0, zero});
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(join(fields))), "");
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(zero + step)), "");
    CHECK_THROWS(ProtocolError, step_of(spec, Pieces(step + zero)), "");
  }
}

TEST(bools_become_0_or_1_and_other_bytes_stay) {
  const EnvSpec spec = rich_spec();
  Fields sent(spec);
  auto fill = [](std::vector<std::byte>& bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(255 - 127 * (i % 3));
  };
  for (auto& bytes : sent.observation) fill(bytes);
  for (auto& bytes : sent.others) fill(bytes);
  const Fields got = step_of(spec, Pieces(step_proto(sent).SerializeAsString()));
  auto check = [](const std::vector<std::byte>& sent, const std::vector<std::byte>& got,
                  bool is_bool) {
    for (size_t i = 0; i < sent.size(); ++i) {
      CHECK(got[i] == (is_bool ? std::byte(sent[i] != std::byte{0}) : sent[i]));
    }
  };
  for (size_t i = 0; i < sent.observation.size(); ++i) {
    check(sent.observation[i], got.observation[i], i == 0);
  }
  for (size_t i = 0; i < 6; ++i) {
    check(sent.others[i], got.others[i], i >= 1 && i <= 3);
  }
}

// --- Action ---

TEST(actions_of_protobuf_are_read) {
  const EnvSpec spec = rich_spec();
  const Fields fields = random_action(spec);
  const std::string message = action_proto(fields).SerializeAsString();
  for (size_t size : kPieceSizes)
    CHECK(action_of(spec, Pieces(message, size)) == fields);
  CHECK(action_of(spec, Pieces(unknown_fields() + message + unknown_fields())) ==
        fields);
}

TEST(wrong_actions_are_refused) {
  const EnvSpec spec = rich_spec();
  const Fields fields = random_action(spec);
  const std::string message = action_proto(fields).SerializeAsString();
  for (size_t size = 0; size < message.size(); ++size) {
    CHECK_THROWS(ProtocolError, action_of(spec, Pieces(message.substr(0, size))), "");
  }
  for (size_t i = 0; i < 3; ++i) {
    for (int change : {-1, 1, 8}) {
      chimera::ClientMessage wrong = action_proto(fields);
      std::string& bytes = *wrong.mutable_action()->mutable_action(static_cast<int>(i));
      bytes.resize(bytes.size() + change);
      CHECK_THROWS(ProtocolError, action_of(spec, Pieces(wrong.SerializeAsString())),
                   "Action: field 1");
    }
  }
  chimera::ClientMessage fewer = action_proto(fields), more = action_proto(fields);
  fewer.mutable_action()->mutable_action()->RemoveLast();
  more.mutable_action()->add_action("");
  CHECK_THROWS(ProtocolError, action_of(spec, Pieces(fewer.SerializeAsString())),
               "is missing");
  CHECK_THROWS(ProtocolError, action_of(spec, Pieces(more.SerializeAsString())),
               "too often");
  for (const std::string& other :
       {encode_hello("a"), encode_hello("a") + message, message + encode_hello("a"),
        message + message, encode_failure("a"), std::string()}) {
    CHECK_THROWS(ProtocolError, action_of(spec, Pieces(other)), "");
  }
}

TEST(bools_of_actions_become_0_or_1) {
  const EnvSpec spec = rich_spec();
  Fields sent(spec.action, spec.num_envs);
  sent.observation[2] = {std::byte{0}, std::byte{2}, std::byte{255}};
  const Fields got = action_of(spec, Pieces(action_proto(sent).SerializeAsString()));
  CHECK(got.observation[2] ==
        (std::vector<std::byte>{std::byte{0}, std::byte{1}, std::byte{1}}));
}

// --- Fuzz, without a network ---

// The step as a message, without what the protocol does not know.
std::string known_fields(const chimera::Step& step) {
  chimera::ServerMessage message;
  chimera::Step& out = *message.mutable_step();
  *out.mutable_observation() = step.observation();
  out.set_reward(step.reward());
  out.set_terminated(step.terminated());
  out.set_truncated(step.truncated());
  out.set_first(step.first());
  out.set_episode_return(step.episode_return());
  out.set_episode_step(step.episode_step());
  out.set_busy_seconds(step.busy_seconds());
  return message.SerializeAsString();
}

TEST(what_is_read_of_damaged_messages_is_what_protobuf_reads) {
  const uint64_t seed = from_environment("BEAST_SEED", 1);
  const int num_messages = from_environment("BEAST_FUZZ", 20'000);
  std::printf("seed %llu, %d messages of each kind\n",
              static_cast<unsigned long long>(seed), num_messages);
  std::mt19937_64 random(seed);
  const EnvSpec spec = rich_spec();
  int num_read = 0, num_lenient = 0;
  for (int i = 0; i < num_messages; ++i) {
    Fields fields = random_step(spec, random());
    const std::string step = mutate(step_proto(fields).SerializeAsString(), random);
    try {
      Fields got(spec);
      Pieces pieces(step, kPieceSizes[i % 4]);
      // Bools are made 0 or 1, which is not what this is about.
      StepView view = got.view();
      for (FieldView& field : view.observation) field.is_bool = false;
      view.terminated.is_bool = view.truncated.is_bool = view.first.is_bool = false;
      decode_step(pieces, view);
      chimera::ServerMessage parsed;
      if (!parsed.ParseFromString(step)) {
        ++num_lenient;  // A tag past 32 bits, of which we drop the rest.
        continue;
      }
      CHECK(known_fields(parsed.step()) == step_proto(got).SerializeAsString());
      ++num_read;
    } catch (const ProtocolError&) {
    } catch (const ServerFailure&) {
    }
    const std::string welcome = mutate(encode_welcome(rich_spec()), random);
    try {
      const EnvSpec got = welcome_of(Pieces(welcome), 1 << 20);
      CHECK(same(welcome_of(Pieces(encode_welcome(got)), 1 << 20), got));
      ++num_read;
    } catch (const ProtocolError&) {
    } catch (const ServerFailure&) {
    }
    try {
      hello_of(Pieces(mutate(encode_hello("run"), random)));
      ++num_read;
    } catch (const ProtocolError&) {
    }
    Fields action = random_action(spec, random());
    const std::string message =
        mutate(action_proto(action).SerializeAsString(), random);
    try {
      action_of(spec, Pieces(message));
      num_lenient += !chimera::ClientMessage().ParseFromString(message);
      ++num_read;
    } catch (const ProtocolError&) {
    }
  }
  CHECK(num_lenient < num_messages / 100);
  CHECK(num_read > num_messages / 20);  // Some of them are not damaged where it counts.
}

}  // namespace
}  // namespace beast::test
