// SPDX-License-Identifier: Apache-2.0
#include "rollout_writer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace beast {
namespace {

Shape row_shape(int64_t num_rows, int64_t num_envs, const Shape& shape) {
  Shape result{num_rows, num_envs};
  for (int64_t dim : shape.dims()) result.insert(result.rank(), dim);
  return result;
}

void copy_row(const std::vector<Array>& from, int64_t from_row,
              const std::vector<Array>& to, int64_t to_row) {
  for (size_t i = 0; i < from.size(); ++i) {
    copy(from[i].select(from_row), to[i].select(to_row));
  }
}

Nest allocate_like(const Signature& signature, BufferPool& pool) {
  if (signature.fields.empty()) return {signature.structure, {}};
  return {signature.structure, pool.allocate(signature.fields)};
}

// The index of the first number in data that is infinite or no number, or -1: such have
// all bits of the exponent set. Compared as integers, which compilers vectorise.
template <class T>
int64_t find_not_finite(const std::byte* data, size_t num_bytes, T exponent) {
  const T* numbers = reinterpret_cast<const T*>(data);
  const size_t size = num_bytes / sizeof(T);
  bool any = false;
  for (size_t i = 0; i < size; ++i) any |= (numbers[i] & exponent) == exponent;
  if (!any) return -1;
  return std::find_if(numbers, numbers + size,
                      [&](T x) { return (x & exponent) == exponent; }) -
         numbers;
}

int64_t find_not_finite(DType dtype, const std::byte* data, size_t num_bytes) {
  switch (dtype) {
    case DType::kFloat16:
      return find_not_finite<uint16_t>(data, num_bytes, 0x7c00);
    case DType::kBFloat16:
      return find_not_finite<uint16_t>(data, num_bytes, 0x7f80);
    case DType::kFloat32:
      return find_not_finite<uint32_t>(data, num_bytes, 0x7f800000);
    case DType::kFloat64:
      return find_not_finite<uint64_t>(data, num_bytes, 0x7ff0000000000000);
    default:
      return -1;
  }
}

void copy_all(const Nest& from, const Nest& to) {
  for (size_t i = 0; i < from.leaves.size(); ++i) copy(from.leaves[i], to.leaves[i]);
}

}  // namespace

RolloutWriter::RolloutWriter(EnvSpec spec, int64_t unroll_length,
                             const Nest& initial_state, BufferPool& pool,
                             bool channels_last)
    : spec_(std::move(spec)),
      num_rows_(unroll_length + 1),
      channels_last_(channels_last),
      pool_(pool),
      busy_seconds_(spec_.num_envs) {
  const Structure::Ptr leaf = Structure::leaf();
  env_structure_ = Structure::dict({{"observation", spec_.observation.structure},
                                    {"reward", leaf},
                                    {"terminated", leaf},
                                    {"truncated", leaf},
                                    {"first", leaf},
                                    {"last_action", spec_.action.structure},
                                    {"episode_return", leaf},
                                    {"episode_step", leaf}});
  env_fields_.resize(env_structure_->num_leaves());
  auto set = [&](const char* key, size_t i, DType dtype, const Shape& shape) {
    env_fields_[env_structure_->at(key).first_leaf + i] = {
        dtype, row_shape(num_rows_, spec_.num_envs, shape)};
  };
  for (size_t i = 0; i < spec_.observation.leaves.size(); ++i) {
    const LeafSpace& space = spec_.observation.leaves[i];
    Shape shape = space.shape;
    if (is_moved(i)) shape.move(0, 2);
    set("observation", i, space.dtype, shape);
  }
  for (size_t i = 0; i < spec_.action.leaves.size(); ++i) {
    const LeafSpace& space = spec_.action.leaves[i];
    set("last_action", i, space.dtype, space.shape);
  }
  set("reward", 0, DType::kFloat32, {});
  set("terminated", 0, DType::kBool, {});
  set("truncated", 0, DType::kBool, {});
  set("first", 0, DType::kBool, {});
  set("episode_return", 0, DType::kFloat32, {});
  set("episode_step", 0, DType::kInt32, {});
  auto at = [&](const char* key) { return env_structure_->at(key).first_leaf; };
  observation_at_ = at("observation");
  last_action_at_ = at("last_action");
  reward_at_ = at("reward");
  terminated_at_ = at("terminated");
  truncated_at_ = at("truncated");
  first_at_ = at("first");
  episode_return_at_ = at("episode_return");
  episode_step_at_ = at("episode_step");
  inputs_structure_ = Structure::tuple({env_structure_, initial_state.structure});

  Signature state = Signature::of(initial_state);
  for (auto& field : state.fields) field.shape[1] = spec_.num_envs;
  state_ = allocate_like(state, pool_);
  for (size_t i = 0; i < state_.leaves.size(); ++i) {
    for (int64_t k = 0; k < spec_.num_envs; ++k) {
      copy(initial_state.leaves[i], state_.leaves[i].narrow(1, k, k + 1));
    }
  }
  begin_rollout();
  start_state_ = allocate_like(state, pool_);
  copy_all(state_, start_state_);
}

void RolloutWriter::begin_rollout() {
  env_rows_ = given_rows_ = pool_.allocate(env_fields_);
  for (size_t i = 0; i < spec_.observation.leaves.size(); ++i) {
    Array& rows = given_rows_[observation_at_ + i];
    if (is_moved(i)) rows = rows.move(4, 2);  // [T + 1, K, H, W, C]
  }
  agent_rows_.clear();
  if (!agent_fields_.empty()) agent_rows_ = pool_.allocate(agent_fields_);
}

bool RolloutWriter::is_moved(size_t leaf) const {
  return channels_last_ && num_channels(spec_.observation.leaves[leaf]) > 1;
}

StepView RolloutWriter::next_row() {
  auto field = [&](size_t leaf) -> FieldView {
    const Array& array = env_rows_[leaf];
    return {array.data + (t_ + 1) * array.strides[0], array.num_bytes() / num_rows_,
            array.dtype == DType::kBool};
  };
  StepView view{};
  view.observation.reserve(spec_.observation.leaves.size());
  for (size_t i = 0; i < spec_.observation.leaves.size(); ++i) {
    FieldView& to = view.observation.emplace_back(field(observation_at_ + i));
    const Array& rows = env_rows_[observation_at_ + i];
    const size_t channels = num_channels(spec_.observation.leaves[i]);
    if (channels == 1) continue;
    const std::byte* previous = t_ < 0 ? nullptr : to.data - rows.strides[0];
    to.images = {static_cast<size_t>(spec_.num_envs), channels, itemsize(rows.dtype),
                 is_moved(i), previous};
  }
  view.reward = field(reward_at_);
  view.terminated = field(terminated_at_);
  view.truncated = field(truncated_at_);
  view.first = field(first_at_);
  view.episode_return = field(episode_return_at_);
  view.episode_step = field(episode_step_at_);
  view.busy_seconds = {reinterpret_cast<std::byte*>(busy_seconds_.data()),
                       busy_seconds_.size() * sizeof(float), false};
  return view;
}

void RolloutWriter::check_next_row() const {
  auto check = [&](size_t leaf) {
    const Array& array = env_rows_[leaf];
    const std::byte* row = array.data + (t_ + 1) * array.strides[0];
    const size_t num_bytes = array.num_bytes() / num_rows_;
    const int64_t at = find_not_finite(array.dtype, row, num_bytes);
    if (at < 0) return;
    const int64_t k = at / (num_bytes / itemsize(array.dtype) / spec_.num_envs);
    std::string what;
    if (leaf == reward_at_) {
      float reward;
      std::memcpy(&reward, row + at * sizeof(reward), sizeof(reward));
      what = "the reward " + std::to_string(reward);
    } else {
      what = "an observation that is not finite";
      const auto& leaves = spec_.observation.leaves;
      if (leaves.size() > 1) {
        what += ", in " + spec_.observation.structure->path(leaf - observation_at_);
      }
    }
    const Array& steps = env_rows_[episode_step_at_];
    int32_t step;
    std::memcpy(&step, steps.data + (t_ + 1) * steps.strides[0] + k * sizeof(step),
                sizeof(step));
    throw BadRow("environment " + std::to_string(k) + " of " + spec_.description +
                 " gave " + what + ", at step " + std::to_string(step) +
                 " of its episode; mend it, or replace such values in create_env");
  };
  check(reward_at_);
  for (size_t i = 0; i < spec_.observation.leaves.size(); ++i) {
    check(observation_at_ + i);
  }
}

Nest RolloutWriter::inputs() {
  ++t_;
  for (size_t i = 0; i < spec_.action.leaves.size(); ++i) {
    const Array last_action = env_rows_[last_action_at_ + i].select(t_);
    if (t_ == 0) {
      std::memset(last_action.data, 0, last_action.num_bytes());
    } else {
      copy(agent_rows_[action_at_ + i].select(t_ - 1), last_action);
    }
  }
  Nest inputs{inputs_structure_, {}};
  inputs.leaves.reserve(env_rows_.size() + state_.leaves.size());
  for (const Array& rows : given_rows_) {
    inputs.leaves.push_back(rows.narrow(0, t_, t_ + 1));
  }
  for (const Array& state : state_.leaves) inputs.leaves.push_back(state);
  return inputs;
}

void RolloutWriter::check_outputs(const Nest& outputs) const {
  const Structure& structure = *outputs.structure;
  const bool is_pair =
      structure.kind() == Structure::Kind::kTuple && structure.children().size() == 2;
  if (!is_pair || structure.children()[0]->kind() != Structure::Kind::kDict) {
    throw std::invalid_argument(
        "the outputs of inference: expected ({action: ..., ...}, core_state), got " +
        structure.str());
  }
  const Nest row = outputs.at(0), state = outputs.at(1);
  for (size_t i = 0; i < row.leaves.size(); ++i) {
    const Shape& shape = row.leaves[i].shape;
    if (shape.rank() < 2 || shape[0] != 1) {
      throw std::invalid_argument("output " + row.structure->path(i) +
                                  ": expected shape (1, B, ...), got " + shape.str());
    }
  }
  const auto& keys = row.structure->keys();
  if (std::find(keys.begin(), keys.end(), "action") == keys.end()) {
    throw std::invalid_argument(
        "the outputs of inference: expected a key \"action\", got " +
        row.structure->str());
  }
  const Nest action = row.at("action");
  if (!action.structure->equals(*spec_.action.structure)) {
    throw std::invalid_argument("output action: expected " +
                                spec_.action.structure->str() +
                                " as the action space, got " + action.structure->str());
  }
  const int64_t batch = action.leaves[0].shape[1];
  for (size_t i = 0; i < action.leaves.size(); ++i) {
    const LeafSpace& space = spec_.action.leaves[i];
    const Array& leaf = action.leaves[i];
    const Shape expected = row_shape(1, batch, space.shape);
    if (leaf.dtype != space.dtype || !(leaf.shape == expected)) {
      throw std::invalid_argument(
          "output action: expected " + std::string(name(space.dtype)) + " of shape " +
          expected.str() + " as the action space, got " +
          std::string(name(leaf.dtype)) + " of shape " + leaf.shape.str());
    }
  }
  try {
    check_alike(state, Signature::of(state_), 1);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("output core_state, ") + error.what());
  }
}

void RolloutWriter::answer(const Nest& outputs, int64_t begin, int64_t end) {
  if (!outputs_signature_) {
    check_outputs(outputs);
    outputs_signature_ = Signature::of(outputs);
    const Structure::Part row = outputs.structure->at(0);
    for (size_t i = 0; i < row.structure->num_leaves(); ++i) {
      auto [dtype, shape] = outputs_signature_->fields[i];
      shape[0] = num_rows_;
      shape[1] = spec_.num_envs;
      agent_fields_.push_back({dtype, shape});
    }
    action_at_ = row.structure->at("action").first_leaf;
    agent_rows_ = pool_.allocate(agent_fields_);
  }
  check_alike(outputs, *outputs_signature_, 1);
  if (begin < 0 || end - begin != spec_.num_envs ||
      (!outputs.leaves.empty() && end > outputs.leaves[0].shape[1])) {
    throw std::invalid_argument(
        "the outputs of inference: expected a row for each of " +
        std::to_string(spec_.num_envs) + " environments, got " +
        std::to_string(end - begin));
  }
  if (t_ == num_rows_ - 1) {
    next_start_state_ = allocate_like(Signature::of(state_), pool_);
    copy_all(state_, next_start_state_);
  }
  for (size_t i = 0; i < agent_rows_.size(); ++i) {
    copy_rows(outputs.leaves[i], begin, end, agent_rows_[i].narrow(0, t_, t_ + 1), 0,
              1);
  }
  for (size_t i = 0; i < state_.leaves.size(); ++i) {
    copy_rows(outputs.leaves[agent_rows_.size() + i], begin, end, state_.leaves[i], 0,
              1);
  }
}

std::optional<Nest> RolloutWriter::rollout() {
  if (t_ < num_rows_ - 1) return std::nullopt;
  const Structure::Ptr agent_structure = outputs_signature_->structure->at(0).structure;
  std::vector<std::pair<std::string, Nest>> rows;
  for (const Nest& part :
       {Nest{env_structure_, given_rows_}, Nest{agent_structure, agent_rows_}}) {
    for (const std::string& key : part.structure->keys()) {
      rows.emplace_back(key, part.at(key));
    }
  }
  Nest result = Nest::tuple({Nest::dict(std::move(rows)), start_state_});

  const std::vector<Array> env_rows = env_rows_, agent_rows = agent_rows_;
  begin_rollout();
  copy_row(env_rows, t_, env_rows_, 0);
  copy_row(agent_rows, t_, agent_rows_, 0);
  start_state_ = next_start_state_;
  t_ = 0;
  return result;
}

double RolloutWriter::busy_seconds() const {
  double sum = 0;
  for (float seconds : busy_seconds_) {
    if (seconds > 0 && seconds < 3600) sum += seconds;  // Whatever a server may say.
  }
  return sum;
}

const std::byte* RolloutWriter::action(size_t leaf) const {
  return agent_rows_[action_at_ + leaf].select(t_).data;
}

}  // namespace beast
