// SPDX-License-Identifier: Apache-2.0
#include "rollout_writer.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "arrays.h"
#include "check.h"
#include "messages.h"

namespace beast::test {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;

// K environments whose row t has these values for environment k.
int64_t frame(int64_t t, int64_t k) { return 10 * t + k; }
int64_t action(int64_t t, int64_t k) { return 1000 + frame(t, k); }

EnvSpec small_spec(int64_t num_envs) {
  EnvSpec spec;
  spec.num_envs = num_envs;
  spec.observation.structure =
      Structure::dict({{"frame", Structure::leaf()}, {"image", Structure::leaf()}});
  spec.observation.leaves = {leaf(DType::kInt64, {}), leaf(DType::kUInt8, {2, 3})};
  spec.action = single(leaf(DType::kInt64, {}));
  return spec;
}

template <class T>
void put(const FieldView& field, const std::vector<T>& values) {
  CHECK_EQ(field.num_bytes, values.size() * sizeof(T));
  std::memcpy(field.data, values.data(), field.num_bytes);
}

// Writes row t as a server would send it.
void write_row(RolloutWriter& writer, int64_t t) {
  const int64_t num_envs = writer.spec().num_envs;
  Ints frames;
  Floats floats;
  std::vector<uint8_t> flags, pixels;
  std::vector<int32_t> steps;
  for (int64_t k = 0; k < num_envs; ++k) {
    frames.push_back(frame(t, k));
    floats.push_back(static_cast<float>(frame(t, k)));
    flags.push_back((t + k) % 2);
    steps.push_back(static_cast<int32_t>(frame(t, k)));
    for (int i = 0; i < 6; ++i) pixels.push_back(static_cast<uint8_t>(t + k + i));
  }
  const StepView view = writer.next_row();
  put(view.observation.at(0), frames);
  put(view.observation.at(1), pixels);
  put(view.reward, floats);
  put(view.terminated, flags);
  put(view.truncated, flags);
  put(view.first, flags);
  put(view.episode_return, floats);
  put(view.episode_step, steps);
  put(view.busy_seconds, Floats(num_envs, 0.25));
  CHECK_EQ(writer.busy_seconds(), 0.25 * num_envs);
}

Nest no_state() { return Nest::tuple({}); }

// One layer with two numbers, both of them `value`.
Nest state_of(int64_t value, int64_t num_rows = 1) {
  return Nest::tuple(
      {Nest::leaf(array_of<int64_t>({1, num_rows, 2}, Ints(2 * num_rows, value)))});
}

// The answer to row t: its actions, baselines and the state after it, as rows
// [begin, begin + K) of a batch with others around them.
Nest answer_of(const RolloutWriter& writer, int64_t t, int64_t begin, bool has_state) {
  const int64_t num_envs = writer.spec().num_envs, batch = begin + num_envs + 3;
  Ints actions(batch, -1), states(2 * batch, -1);
  Floats baselines(batch, -1);
  for (int64_t k = 0; k < num_envs; ++k) {
    actions[begin + k] = action(t, k);
    baselines[begin + k] = static_cast<float>(-t);
    states[2 * (begin + k)] = states[2 * (begin + k) + 1] = t + 1;
  }
  Nest row =
      Nest::dict({{"action", Nest::leaf(array_of<int64_t>({1, batch}, actions))},
                  {"baseline", Nest::leaf(array_of<float>({1, batch}, baselines))}});
  Nest state = Nest::tuple({});
  if (has_state) {
    state = Nest::tuple({Nest::leaf(array_of<int64_t>({1, batch, 2}, states))});
  }
  return Nest::tuple({row, state});
}

// Row t from beginning to end; gives the rollout if one is complete.
std::optional<Nest> do_row(RolloutWriter& writer, int64_t t, bool has_state = true) {
  write_row(writer, t);
  const Nest inputs = writer.inputs();
  const int64_t begin = t % 3;
  writer.answer(answer_of(writer, t, begin, has_state), begin,
                begin + writer.spec().num_envs);
  return writer.rollout();
}

// Whether rows [first, first + T] are in the rollout, each field of them.
void check_rollout(const Nest& rollout, int64_t first, int64_t length,
                   int64_t num_envs) {
  const Nest rows = rollout.at(0);
  CHECK_EQ(rows.structure->str(),
           "{action: *, baseline: *, episode_return: *, episode_step: *, first: *, "
           "last_action: *, observation: {frame: *, image: *}, reward: *, "
           "terminated: *, truncated: *}");
  Ints frames, actions, last_actions;
  Floats floats, baselines;
  std::vector<uint8_t> flags, pixels;
  std::vector<int32_t> steps;
  for (int64_t t = first; t <= first + length; ++t) {
    for (int64_t k = 0; k < num_envs; ++k) {
      frames.push_back(frame(t, k));
      floats.push_back(static_cast<float>(frame(t, k)));
      steps.push_back(static_cast<int32_t>(frame(t, k)));
      flags.push_back((t + k) % 2);
      actions.push_back(action(t, k));
      last_actions.push_back(t == 0 ? 0 : action(t - 1, k));
      baselines.push_back(static_cast<float>(-t));
      for (int i = 0; i < 6; ++i) pixels.push_back(static_cast<uint8_t>(t + k + i));
    }
  }
  auto array = [&](const char* key) { return rows.at(key).leaves.at(0); };
  const Array image = rows.at("observation").at("image").leaves.at(0);
  CHECK_EQ(image.shape, Shape({length + 1, num_envs, 2, 3}));
  CHECK_EQ(array("reward").shape, Shape({length + 1, num_envs}));
  CHECK(array("first").dtype == DType::kBool);
  CHECK_EQ(values<int64_t>(rows.at("observation").at("frame").leaves.at(0)), frames);
  CHECK_EQ(values<uint8_t>(image), pixels);
  CHECK_EQ(values<float>(array("reward")), floats);
  CHECK_EQ(values<uint8_t>(array("terminated")), flags);
  CHECK_EQ(values<uint8_t>(array("truncated")), flags);
  CHECK_EQ(values<uint8_t>(array("first")), flags);
  CHECK_EQ(values<float>(array("episode_return")), floats);
  CHECK_EQ(values<int32_t>(array("episode_step")), steps);
  CHECK_EQ(values<int64_t>(array("action")), actions);
  CHECK_EQ(values<int64_t>(array("last_action")), last_actions);
  CHECK_EQ(values<float>(array("baseline")), baselines);
}

TEST(inference_gets_the_row_and_the_state) {
  BufferPool pool;
  RolloutWriter writer(small_spec(2), 4, state_of(7), pool);
  write_row(writer, 0);
  Nest inputs = writer.inputs();
  CHECK_EQ(inputs.structure->str(),
           "({episode_return: *, episode_step: *, first: *, last_action: *, "
           "observation: {frame: *, image: *}, reward: *, terminated: *, "
           "truncated: *}, (*,))");
  Nest row = inputs.at(0);
  CHECK_EQ(row.at("observation").at("image").leaves[0].shape, Shape({1, 2, 2, 3}));
  CHECK_EQ(ints(row.at("observation").at("frame")), (Ints{0, 1}));
  CHECK_EQ(ints(row.at("last_action")), (Ints{0, 0}));
  CHECK_EQ(inputs.at(1).leaves[0].shape, Shape({1, 2, 2}));
  CHECK_EQ(ints(inputs.at(1)), (Ints{7, 7, 7, 7}));  // For each environment.

  writer.answer(answer_of(writer, 0, 2, true), 2, 4);
  CHECK(!writer.rollout());
  int64_t sent[2];
  std::memcpy(sent, writer.action(0), sizeof(sent));
  CHECK_EQ(Ints(sent, sent + 2), (Ints{1000, 1001}));
  write_row(writer, 1);
  inputs = writer.inputs();
  CHECK_EQ(ints(inputs.at(0).at("observation").at("frame")), (Ints{10, 11}));
  CHECK_EQ(ints(inputs.at(0).at("last_action")), (Ints{1000, 1001}));
  CHECK_EQ(ints(inputs.at(1)), (Ints{1, 1, 1, 1}));
}

TEST(rollouts_are_complete_and_share_one_row) {
  for (int64_t num_envs : {1, 2, 5}) {
    for (int64_t length : {1, 2, 7}) {
      BufferPool pool;
      RolloutWriter writer(small_spec(num_envs), length, state_of(0), pool);
      int64_t first = 0;
      for (int64_t t = 0; t < 5 * length + 1; ++t) {
        const auto rollout = do_row(writer, t);
        CHECK_EQ(rollout.has_value(), t > 0 && t % length == 0);
        if (!rollout) continue;
        check_rollout(*rollout, first, length, num_envs);
        // The state before its first row.
        CHECK_EQ(rollout->at(1).leaves[0].shape, Shape({1, num_envs, 2}));
        CHECK_EQ(ints(rollout->at(1)), Ints(2 * num_envs, first));
        first = t;
      }
      CHECK_EQ(first, 5 * length);
    }
  }
}

TEST(a_model_without_state_has_none_in_rollouts) {
  BufferPool pool;
  RolloutWriter writer(small_spec(2), 3, no_state(), pool);
  write_row(writer, 0);
  CHECK_EQ(writer.inputs().at(1).structure->str(), "()");
  writer.answer(answer_of(writer, 0, 0, false), 0, 2);
  std::optional<Nest> rollout;
  for (int64_t t = 1; t <= 3; ++t) rollout = do_row(writer, t, false);
  check_rollout(*rollout, 0, 3, 2);
  CHECK_EQ(rollout->at(1).structure->str(), "()");
}

TEST(rollouts_stay_as_they_are_while_the_next_is_written) {
  BufferPool pool;
  std::vector<Nest> rollouts;
  {
    RolloutWriter writer(small_spec(2), 3, state_of(0), pool);
    for (int64_t t = 0; t <= 30; ++t) {
      if (auto rollout = do_row(writer, t)) rollouts.push_back(*rollout);
    }
  }
  CHECK_EQ(rollouts.size(), 10);
  for (int64_t i = 0; i < 10; ++i) {
    check_rollout(rollouts[i], 3 * i, 3, 2);
    CHECK_EQ(ints(rollouts[i].at(1)), Ints(4, 3 * i));
  }
}

TEST(inputs_stay_as_they_are_until_they_are_answered) {
  BufferPool pool;
  RolloutWriter writer(small_spec(2), 2, state_of(0), pool);
  std::vector<Nest> inputs;  // Rows of a rollout do not share memory.
  for (int64_t t = 0; t <= 6; ++t) {
    write_row(writer, t);
    inputs.push_back(writer.inputs().at(0).at("observation").at("frame"));
    writer.answer(answer_of(writer, t, 0, true), 0, 2);
    writer.rollout();
  }
  for (int64_t t = 0; t <= 6; ++t) {
    CHECK_EQ(ints(inputs[t]), (Ints{frame(t, 0), frame(t, 1)}));
  }
}

TEST(memory_of_dropped_rollouts_is_used_again) {
  BufferPool pool;
  RolloutWriter writer(small_spec(2), 3, state_of(0), pool);
  size_t num_allocated = 0;
  for (int64_t t = 0; t <= 300; ++t) {
    do_row(writer, t);
    if (t == 30) num_allocated = pool.num_allocated();
  }
  CHECK_EQ(pool.num_allocated(), num_allocated);
}

TEST(a_rich_spec_comes_through) {
  BufferPool pool;
  RolloutWriter writer(rich_spec(2), 2, no_state(), pool);
  std::mt19937_64 random(1);
  std::vector<Fields> sent;
  std::optional<Nest> rollout;
  for (int64_t t = 0; t <= 2; ++t) {
    sent.emplace_back(writer.spec());
    sent.back().randomize(random);
    Pieces message(step_proto(sent.back()).SerializeAsString());
    decode_step(message, writer.next_row());
    CHECK_EQ(writer.inputs().at(0).at("last_action").structure->str(), "(*, *, *)");
    Array flag = array_of<uint8_t>({1, 2}, {1, 0});
    flag.dtype = DType::kBool;
    const Nest action =
        Nest::tuple({Nest::leaf(counting<int64_t>({1, 2}, t)),
                     Nest::leaf(counting<float>({1, 2, 2}, static_cast<float>(t))),
                     Nest::leaf(flag)});
    writer.answer(Nest::tuple({Nest::dict({{"action", action}}), no_state()}), 0, 2);
    rollout = writer.rollout();
  }
  CHECK(rollout.has_value());
  const Nest observation = rollout->at(0).at("observation");
  CHECK_EQ(observation.leaves[2].shape, Shape({3, 2, 0, 5}));
  CHECK_EQ(observation.leaves[4].shape, Shape({3, 2, 1, 1, 1, 1, 1, 1}));
  for (size_t leaf = 0; leaf < observation.leaves.size(); ++leaf) {
    for (int64_t t = 0; t <= 2; ++t) {
      const Array row = observation.leaves[leaf].select(t);
      CHECK_EQ(row.num_bytes(), sent[t].observation[leaf].size());
      CHECK(std::equal(row.data, row.data + row.num_bytes(),
                       sent[t].observation[leaf].data()));
    }
  }
  const Nest last_action = rollout->at(0).at("last_action");
  CHECK_EQ(values<float>(last_action.leaves[1].select(2)), (Floats{1, 2, 3, 4}));
}

// Rows of stacked images that sometimes begin anew, as a server sends them to who takes
// only the newest, or whole ones.
TEST(images_come_through_in_either_order_of_memory) {
  EnvSpec spec = small_spec(2);
  spec.observation.structure = Structure::tuple(
      {Structure::leaf(), Structure::leaf(), Structure::leaf(), Structure::leaf()});
  spec.observation.leaves = {
      leaf(DType::kUInt8, {4, 3, 2}), leaf(DType::kFloat32, {2, 2, 3}),
      leaf(DType::kInt16, {1, 3, 3}), leaf(DType::kBool, {3, 1, 5})};
  for (bool takes_newest : {false, true}) {
    for (bool channels_last : {false, true}) {
      BufferPool pool;
      RolloutWriter writer(spec, 3, no_state(), pool, channels_last);
      std::mt19937_64 random(1);
      std::vector<Fields> sent;
      int64_t num_newest = 0, num_rollouts = 0;
      for (int64_t t = 0; t <= 30; ++t) {
        sent.emplace_back(spec);
        Fields& now = sent.back();
        now.randomize(random);
        for (size_t i = 0; i < 4 && t % 5 != 0; ++i) {  // All move on by one frame.
          const size_t all = spec.observation.leaves[i].num_bytes();
          const size_t one = all / num_channels(spec.observation.leaves[i]);
          for (size_t k = 0; k < 2; ++k) {
            std::memcpy(now.observation[i].data() + k * all,
                        sent[t - 1].observation[i].data() + k * all + one, all - one);
          }
        }
        const bool is_newest =
            takes_newest && t > 0 && is_shifted(spec, sent[t - 1].view(), now.view());
        num_newest += is_newest;
        const FixedMessage fixed = step_message(spec, is_newest);
        std::string bytes(fixed.num_bytes(), '\0');
        auto* data = reinterpret_cast<std::byte*>(bytes.data());
        fixed.write_frame(data);
        if (is_newest) {
          copy_newest(spec, now.view(), step_view(spec, fixed, data, is_newest));
        } else {
          bytes = step_proto(now).SerializeAsString();
        }
        Pieces message(bytes, 11);
        decode_step(message, writer.next_row());
        const Nest inputs = writer.inputs().at(0).at("observation");
        for (size_t i = 0; i < 4; ++i) {
          const bool is_moved = channels_last && i != 2;
          CHECK_EQ(inputs.leaves[i].is_channels_last(), is_moved);
        }
        writer.answer(answer_of(writer, t, 0, false), 0, 2);
        const std::optional<Nest> rollout = writer.rollout();
        if (!rollout) continue;
        ++num_rollouts;
        const Nest rows = rollout->at(0).at("observation");
        for (size_t i = 0; i < 4; ++i) {
          for (int64_t row = 0; row <= 3; ++row) {
            const Array got = rows.leaves[i].select(row);
            CHECK_EQ(got.shape[1], spec.observation.leaves[i].shape[0]);
            const auto whole = BufferPool().allocate({{got.dtype, got.shape}})[0];
            copy(got, whole);
            const auto& expected = sent[t - 3 + row].observation[i];
            CHECK(std::equal(expected.begin(), expected.end(), whole.data));
          }
        }
      }
      CHECK_EQ(num_rollouts, 10);
      CHECK_EQ(num_newest, takes_newest ? 24 : 0);
    }
  }
}

TEST(huge_dimensions_of_empty_leaves_do_not_overflow) {
  EnvSpec spec = small_spec(3);
  constexpr int64_t kHuge = int64_t{1} << 40;
  spec.observation.leaves[1] = leaf(DType::kUInt8, {kHuge, int64_t{1} << 22, 0});
  BufferPool pool;
  RolloutWriter writer(spec, 80, no_state(), pool);
  CHECK_EQ(writer.next_row().observation[1].num_bytes, 0);
  const Nest inputs = writer.inputs();
  CHECK_EQ(inputs.at(0).at("observation").at("image").leaves[0].num_bytes(), 0);
}

// Rewards and one float leaf of two numbers, of environments 0 to 2: `bits` is the
// second number of environment 1.
template <class T>
std::string refused(DType dtype, T bits, float reward) {
  EnvSpec spec = small_spec(3);
  spec.description = "Game-v0";
  spec.observation.leaves[1] = leaf(dtype, {2});
  BufferPool pool;
  RolloutWriter writer(spec, 4, no_state(), pool);
  const StepView view = writer.next_row();
  std::vector<T> numbers(6, T{1});
  numbers[3] = bits;
  put(view.observation[1], numbers);
  put(view.reward, Floats{0, 0, reward});
  put(view.episode_step, std::vector<int32_t>{7, 8, 9});
  try {
    writer.check_next_row();
  } catch (const RolloutWriter::BadRow& error) {
    return error.what();
  }
  return "";
}

TEST(rows_that_are_not_finite_are_refused_by_name) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kMost = std::numeric_limits<float>::max();
  const std::string observation =
      "environment 1 of Game-v0 gave an observation that is not finite, in image, at "
      "step 8 of its episode; mend it, or replace such values in create_env";
  CHECK_EQ(refused<uint16_t>(DType::kFloat16, 0x7e00, 0), observation);   // NaN
  CHECK_EQ(refused<uint16_t>(DType::kBFloat16, 0xff80, 0), observation);  // -inf
  CHECK_EQ(refused<uint32_t>(DType::kFloat32, 0x7fc00000, 0), observation);
  CHECK_EQ(refused<uint64_t>(DType::kFloat64, uint64_t{0x7ff} << 52, 0), observation);
  // The largest there are, and integers of the same bits.
  CHECK_EQ(refused<uint16_t>(DType::kFloat16, 0x7bff, kMost), "");
  CHECK_EQ(refused<uint16_t>(DType::kBFloat16, 0xff7f, -kMost), "");
  CHECK_EQ(refused<uint32_t>(DType::kFloat32, 0x7f7fffff, 0), "");
  CHECK_EQ(refused<uint64_t>(DType::kFloat64, 0x7fefffffffffffff, 0), "");
  CHECK_EQ(refused<uint32_t>(DType::kInt32, 0x7fc00000, 0), "");
  for (float reward : {kInfinity, -kInfinity, std::nanf("")}) {
    CHECK_EQ(refused<uint32_t>(DType::kFloat32, 0, reward),
             "environment 2 of Game-v0 gave the reward " + std::to_string(reward) +
                 ", at step 9 of its episode; mend it, or replace such values in "
                 "create_env");
  }
}

// --- Answers that do not fit ---

struct Wrong {
  Nest outputs;
  const char* text;
};

Nest action_leaf(Shape shape) { return Nest::leaf(counting<int64_t>(shape)); }

TEST(the_first_answer_is_checked) {
  const Nest good_state = state_of(0, 2), good = action_leaf({1, 2});
  auto outputs = [&](Nest action) {
    return Nest::tuple({Nest::dict({{"action", action}}), good_state});
  };
  const Wrong all[] = {
      {action_leaf({1, 2}), "expected ({action: ..., ...}, core_state), got *"},
      {Nest::dict({{"action", good}}), "core_state), got {action: *}"},
      {Nest::tuple({Nest::dict({{"action", good}})}), "core_state), got"},
      {Nest::tuple({good, good_state}), "core_state), got"},
      {Nest::tuple({Nest::dict({{"policy", good}}), good_state}),
       "expected a key \"action\""},
      {Nest::tuple(
           {Nest::dict({{"action", good}, {"x", action_leaf({2})}}), good_state}),
       "output x: expected shape (1, B, ...), got (2,)"},
      {outputs(action_leaf({2, 2})), "expected shape (1, B, ...), got (2, 2)"},
      {outputs(action_leaf({1, 2, 1})), "expected int64 of shape (1, 2)"},
      {outputs(Nest::leaf(counting<int32_t>({1, 2}))), "got int32 of shape (1, 2)"},
      {outputs(Nest::tuple({good})), "expected * as the action space, got (*,)"},
      {outputs(Nest::tuple({})), "expected * as the action space, got ()"},
      {Nest::tuple({Nest::dict({{"action", good}}), no_state()}), "core_state"},
      {Nest::tuple({Nest::dict({{"action", good}}),
                    Nest::tuple({Nest::leaf(counting<int64_t>({1, 2, 3}))})}),
       "core_state"},
      {Nest::tuple({Nest::dict({{"action", good}}),
                    Nest::tuple({Nest::leaf(counting<float>({1, 2, 2}))})}),
       "core_state"},
  };
  for (const Wrong& wrong : all) {
    BufferPool pool;
    RolloutWriter writer(small_spec(2), 3, state_of(0), pool);
    write_row(writer, 0);
    writer.inputs();
    CHECK_THROWS(std::invalid_argument, writer.answer(wrong.outputs, 0, 2), wrong.text);
  }
}

TEST(later_answers_are_like_the_first) {
  const Nest good = action_leaf({1, 2}), state = state_of(0, 2);
  for (const Nest& later :
       {Nest::tuple({Nest::dict({{"action", good}, {"x", good}}), state}),
        Nest::tuple(
            {Nest::dict({{"action", Nest::leaf(counting<int32_t>({1, 2}))}}), state}),
        Nest::tuple({Nest::dict({{"action", good}}), no_state()})}) {
    BufferPool pool;
    RolloutWriter writer(small_spec(2), 3, state_of(0), pool);
    write_row(writer, 0);
    writer.inputs();
    writer.answer(Nest::tuple({Nest::dict({{"action", good}}), state}), 0, 2);
    write_row(writer, 1);
    writer.inputs();
    CHECK_THROWS(std::invalid_argument, writer.answer(later, 0, 2), "expected");
  }
}

TEST(an_answer_has_a_row_for_each_environment) {
  BufferPool pool;
  RolloutWriter writer(small_spec(2), 3, state_of(0), pool);
  write_row(writer, 0);
  writer.inputs();
  const Nest outputs = answer_of(writer, 0, 0, true);
  CHECK_THROWS(std::invalid_argument, writer.answer(outputs, 0, 1), "");
  CHECK_THROWS(std::invalid_argument, writer.answer(outputs, 0, 3), "");
}

TEST(an_output_must_not_have_the_name_of_a_field) {
  BufferPool pool;
  RolloutWriter writer(small_spec(2), 1, no_state(), pool);
  const Nest outputs =
      Nest::tuple({Nest::dict({{"action", action_leaf({1, 2})},
                               {"reward", Nest::leaf(counting<float>({1, 2}))}}),
                   no_state()});
  auto act = [&] {
    for (int64_t t = 0; t <= 1; ++t) {
      write_row(writer, t);
      writer.inputs();
      writer.answer(outputs, 0, 2);
      writer.rollout();
    }
  };
  CHECK_THROWS(std::invalid_argument, act(), "reward");
}

}  // namespace
}  // namespace beast::test
