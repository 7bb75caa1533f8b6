// SPDX-License-Identifier: Apache-2.0
#include "buffer_pool.h"

#include <bit>
#include <new>

namespace beast {
namespace {

// Four sizes per power of two, so that batches of similar sizes share blocks.
size_t round_up(size_t size) {
  if (size <= 256) return 256;
  const size_t step = std::bit_floor(size - 1) / 4;
  return (size + step - 1) / step * step;
}

}  // namespace

struct BufferPool::State {
  explicit State(Hooks h) : hooks(std::move(h)) {}
  ~State() {
    for (auto& [size, blocks] : idle) {
      for (std::byte* block : blocks) release(block);
    }
  }
  void release(std::byte* block) {
    if (hooks.freed) hooks.freed(block);
    ::operator delete (block, std::align_val_t{kAlignment});
  }

  const Hooks hooks;
  std::mutex mu;
  std::map<size_t, std::vector<std::byte*>> idle;  // Guarded by mu; by capacity.
  size_t num_allocated = 0;                        // Guarded by mu.
};

BufferPool::BufferPool(Hooks hooks)
    : state_(std::make_shared<State>(std::move(hooks))) {}

std::shared_ptr<std::byte> BufferPool::allocate(size_t size) {
  const size_t capacity = round_up(size);
  std::byte* block = nullptr;
  {
    std::lock_guard lock(state_->mu);
    auto& blocks = state_->idle[capacity];
    if (blocks.empty()) {
      ++state_->num_allocated;
    } else {
      block = blocks.back();
      blocks.pop_back();
    }
  }
  if (block == nullptr) {
    block = static_cast<std::byte*>(
        ::operator new (capacity, std::align_val_t{kAlignment}));
    try {
      if (state_->hooks.allocated) state_->hooks.allocated(block, capacity);
    } catch (...) {
      ::operator delete (block, std::align_val_t{kAlignment});
      throw;
    }
  }
  return {block, [state = state_, capacity](std::byte* block) {
            {
              std::lock_guard lock(state->mu);
              auto& blocks = state->idle[capacity];
              if (blocks.size() < kMaxIdle) {
                blocks.push_back(block);
                return;
              }
            }
            state->release(block);
          }};
}

std::vector<Array> BufferPool::allocate(const std::vector<Field>& fields) {
  size_t size = 0;
  for (const Field& field : fields) {
    const size_t bytes = field.shape.num_elements() * itemsize(field.dtype);
    size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::shared_ptr<std::byte> block = allocate(size);
  std::vector<Array> arrays;
  arrays.reserve(fields.size());
  std::byte* data = block.get();
  for (const Field& field : fields) {
    arrays.push_back(Array::contiguous(field.dtype, field.shape, data, block));
    const size_t bytes = arrays.back().num_bytes();
    data += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  return arrays;
}

size_t BufferPool::num_allocated() const {
  std::lock_guard lock(state_->mu);
  return state_->num_allocated;
}

}  // namespace beast
