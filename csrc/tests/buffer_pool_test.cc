// SPDX-License-Identifier: Apache-2.0
#include "buffer_pool.h"

#include <cstring>
#include <set>

#include "check.h"

namespace beast::test {
namespace {

TEST(a_dropped_block_is_used_again) {
  BufferPool pool;
  std::byte* first = pool.allocate(1000).get();
  for (int i = 0; i < 100; ++i) CHECK(pool.allocate(1000).get() == first);
  CHECK_EQ(pool.num_allocated(), 1);
}

TEST(blocks_that_are_out_are_distinct) {
  BufferPool pool;
  std::vector<std::shared_ptr<std::byte>> blocks;
  std::set<std::byte*> distinct;
  for (int i = 0; i < 10; ++i) {
    blocks.push_back(pool.allocate(100));
    distinct.insert(blocks.back().get());
  }
  CHECK_EQ(distinct.size(), 10);
  CHECK_EQ(pool.num_allocated(), 10);
}

TEST(similar_sizes_share_blocks) {
  BufferPool pool;
  pool.allocate(10'000);
  pool.allocate(10'100);
  CHECK_EQ(pool.num_allocated(), 1);
}

TEST(every_size_is_aligned_and_all_of_it_may_be_written) {
  BufferPool pool;
  for (size_t size : {0, 1, 255, 256, 257, 319, 320, 321, 511, 512, 513, 4095, 65537}) {
    auto block = pool.allocate(size);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block.get()) % BufferPool::kAlignment, 0);
    std::memset(block.get(), 0xff, size);  // The address sanitizer watches.
  }
}

TEST(arrays_lie_aligned_in_one_block_without_overlap) {
  BufferPool pool;
  const std::vector<BufferPool::Field> fields{{DType::kUInt8, {3}},
                                              {DType::kFloat32, {2, 5}},
                                              {DType::kInt64, {0, 4}},
                                              {DType::kBool, {}}};
  const std::vector<Array> arrays = pool.allocate(fields);
  CHECK_EQ(pool.num_allocated(), 1);
  CHECK_EQ(arrays.size(), 4);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Array& array = arrays[i];
    CHECK(array.dtype == fields[i].dtype);
    CHECK_EQ(array.shape, fields[i].shape);
    CHECK(array.is_contiguous());
    CHECK_EQ(reinterpret_cast<uintptr_t>(array.data) % BufferPool::kAlignment, 0);
    if (i > 0) CHECK(array.data >= arrays[i - 1].data + arrays[i - 1].num_bytes());
    std::memset(array.data, 0xff, array.num_bytes());
  }
}

TEST(a_block_goes_back_when_the_last_of_its_arrays_is_dropped) {
  BufferPool pool;
  const std::vector<BufferPool::Field> fields{{DType::kUInt8, {3}},
                                              {DType::kUInt8, {3}}};
  std::vector<Array> arrays = pool.allocate(fields);
  arrays.pop_back();
  pool.allocate(fields);
  CHECK_EQ(pool.num_allocated(), 2);  // The first is still out.
  arrays.clear();
  auto one = pool.allocate(fields), other = pool.allocate(fields);
  CHECK_EQ(pool.num_allocated(), 2);
}

struct Count {
  std::mutex mu;
  std::set<void*> live;  // Guarded by mu, as all below.
  size_t num_allocated = 0;

  BufferPool::Hooks hooks() {
    return {[this](void* data, size_t size) {
              std::memset(data, 0, size);
              std::lock_guard lock(mu);
              ++num_allocated;
              CHECK(live.insert(data).second);
            },
            [this](void* data) {
              std::lock_guard lock(mu);
              live.erase(data);
            }};
  }
};

TEST(hooks_see_every_block_once_when_made_and_once_when_freed) {
  Count count;
  {
    BufferPool pool(count.hooks());
    for (int i = 0; i < 10; ++i) pool.allocate(1000);
    CHECK_EQ(count.num_allocated, 1);
    auto other = pool.allocate(5000);
    CHECK_EQ(count.num_allocated, 2);
    CHECK_EQ(count.live.size(), 2);
  }
  CHECK_EQ(count.live.size(), 0);
}

TEST(blocks_outlive_the_pool) {
  Count count;
  std::shared_ptr<std::byte> block;
  {
    BufferPool pool(count.hooks());
    block = pool.allocate(1000);
    pool.allocate(5000);
  }
  CHECK(count.live.contains(block.get()));
  std::memset(block.get(), 1, 1000);
  block.reset();
  CHECK_EQ(count.live.size(), 0);
}

TEST(idle_blocks_past_the_limit_are_freed) {
  Count count;
  BufferPool pool(count.hooks());
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (size_t i = 0; i < BufferPool::kMaxIdle + 10; ++i) {
    blocks.push_back(pool.allocate(1000));
  }
  blocks.clear();
  CHECK_EQ(count.live.size(), BufferPool::kMaxIdle);
}

TEST(a_hook_that_throws_loses_no_memory) {
  BufferPool pool({[](void*, size_t) { throw std::runtime_error("cannot pin"); }, {}});
  CHECK_THROWS(std::runtime_error, pool.allocate(1000), "cannot pin");
}

TEST(threads_share_a_pool_without_sharing_blocks) {
  Count count;
  {
    BufferPool pool(count.hooks());
    std::vector<std::future<void>> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.push_back(in_thread([&pool, thread] {
        for (int i = 0; i < 2000; ++i) {
          auto block = pool.allocate(100 + i % 3 * 1000);
          std::memset(block.get(), thread, 100);
          for (int at = 0; at < 100; ++at) {
            CHECK_EQ(static_cast<int>(block.get()[at]), thread);
          }
        }
      }));
    }
    for (auto& thread : threads) thread.get();
    CHECK(pool.num_allocated() <= 12);  // One of each size for each thread.
  }
  CHECK_EQ(count.live.size(), 0);
}

}  // namespace
}  // namespace beast::test
