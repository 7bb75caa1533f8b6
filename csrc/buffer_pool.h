// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "nest.h"

namespace beast {

// Memory for batches, rollouts and messages, used again and again: a fresh 19 MB array
// costs more in page faults than the copy into it. Thread-safe. Blocks may outlive the
// pool. A block goes back when its last owner drops it; up to kMaxIdle of each size
// are kept, the rest is freed.
class BufferPool {
 public:
  // Told of every new block before its first use, and of every block before it is
  // freed; that is where memory is pinned. Called without a lock held.
  struct Hooks {
    std::function<void(void* data, size_t size)> allocated;
    std::function<void(void* data)> freed;
  };
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kMaxIdle = 64;

  BufferPool() : BufferPool(Hooks{}) {}
  explicit BufferPool(Hooks hooks);

  // At least size bytes, 64-byte aligned, with what was in them before.
  std::shared_ptr<std::byte> allocate(size_t size);

  // Contiguous arrays of these dtypes and shapes in one block.
  struct Field {
    DType dtype;
    Shape shape;
  };
  std::vector<Array> allocate(const std::vector<Field>& fields);

  size_t num_allocated() const;  // Blocks ever made; does not grow in a steady state.

 private:
  struct State;
  std::shared_ptr<State> state_;  // Shared with the blocks that are out.
};

}  // namespace beast
