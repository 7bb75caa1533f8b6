// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <stdexcept>
#include <vector>

#include "batching.h"
#include "buffer_pool.h"
#include "env_spec.h"
#include "wire.h"

namespace beast {

// Writes the rollouts of K environments, each array once and in its place: [T + 1, K,
// ...] from a pool. For one thread at a time. A row goes through these calls, in this
// order:
//
//   next_row()  where the step's arrays belong
//   inputs()    (row, core_state) for inference: arrays [1, K, ...], [layers, K, ...]
//   answer()    (outputs, core_state) of inference; outputs is a dict with "action"
//   rollout()   (rows, core_state) if this row was the last of T + 1, else nothing
//
// Row 0 of a rollout repeats the last row of the one before; its core_state is the one
// before row 0.
class RolloutWriter {
 public:
  struct BadRow : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  // initial_state has one row in dimension 1, which is repeated K times. With
  // channels_last, images [C, H, W] are so in memory (see Array).
  RolloutWriter(EnvSpec spec, int64_t unroll_length, const Nest& initial_state,
                BufferPool& pool, bool channels_last = false);

  StepView next_row();
  // Throws BadRow where a reward or an observation in next_row() is not finite: neither
  // a loss nor a network can do anything with it.
  void check_next_row() const;
  Nest inputs();
  // Rows [begin, end) of outputs; throws std::invalid_argument if they do not fit.
  void answer(const Nest& outputs, int64_t begin, int64_t end);
  std::optional<Nest> rollout();

  // The action of the last answer: for each leaf, the bytes of [K, *shape].
  const std::byte* action(size_t leaf) const;
  const EnvSpec& spec() const { return spec_; }
  // How long the last row took the environments, as their server says.
  double busy_seconds() const;

 private:
  void begin_rollout();
  void check_outputs(const Nest& outputs) const;
  bool is_moved(size_t leaf) const;  // Of the observation: written as [H, W, C].

  const EnvSpec spec_;
  const int64_t num_rows_;  // T + 1
  const bool channels_last_;
  BufferPool& pool_;
  Structure::Ptr env_structure_;               // Of a row as the server sends it.
  Structure::Ptr inputs_structure_;            // (row, core_state)
  std::vector<BufferPool::Field> env_fields_;  // [T + 1, K, ...]
  size_t observation_at_, last_action_at_;     // First leaves in env_structure_.
  size_t reward_at_, terminated_at_, truncated_at_, first_at_, episode_return_at_,
      episode_step_at_;
  std::optional<Signature> outputs_signature_;  // Of the first answer.
  std::vector<BufferPool::Field> agent_fields_;
  size_t action_at_ = 0;  // First leaf of the action in the outputs.

  int64_t t_ = -1;                   // The current row.
  std::vector<float> busy_seconds_;  // Of each environment, for that row.
  std::vector<Array> env_rows_;      // This rollout, in the order of env_structure_,
  std::vector<Array> given_rows_;    // and as it is given out: images [C, H, W].
  std::vector<Array> agent_rows_;    // Likewise, of the outputs' dict.
  Nest start_state_;                 // Before row 0.
  Nest state_;                       // Before the current row; after it, once answered.
  Nest next_start_state_;            // Before the last row.
};

}  // namespace beast
