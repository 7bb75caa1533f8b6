// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "buffer_pool.h"
#include "nest.h"

namespace beast {

// What BatchingQueue and DynamicBatcher have in common: rows of nests, their checks and
// their concatenation. All functions throw std::invalid_argument that names the field,
// what was expected and what was got.

// How many rows may make a batch, and how long to wait for them.
struct BatchSizes {
  int64_t batch_dim = 1;
  int64_t minimum = 1;
  int64_t maximum = 1024;
  // Past it, a batch is made of what there is; counted from the oldest row's arrival.
  std::optional<std::chrono::milliseconds> timeout;

  void check() const;
};

// A nest's structure, dtypes and shapes, without its data.
struct Signature {
  Structure::Ptr structure;
  std::vector<BufferPool::Field> fields;

  static Signature of(const Nest& nest);
};

// The size of every leaf along batch_dim, which must be the same and at least one.
int64_t num_rows(const Nest& item, size_t batch_dim);

// Throws unless item is like expected in everything but the number of rows.
void check_alike(const Nest& item, const Signature& expected, size_t batch_dim);

// Rows [begin, end) of an item.
struct Piece {
  const Nest* item;
  int64_t begin;
  int64_t end;
};

// The pieces behind each other along batch_dim, copied once, into one block of pool.
// Images stay channels_last (see Array) where those of the first item are.
Nest concatenate(std::span<const Piece> pieces, size_t batch_dim, BufferPool& pool);

}  // namespace beast
