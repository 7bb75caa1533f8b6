// SPDX-License-Identifier: Apache-2.0
#include "batching.h"

#include <stdexcept>

namespace beast {
namespace {

[[noreturn]] void refuse(const std::string& field, const std::string& expected,
                         const std::string& got) {
  throw std::invalid_argument(field + ": expected " + expected + ", got " + got);
}

}  // namespace

void BatchSizes::check() const {
  if (batch_dim < 0 || batch_dim >= static_cast<int64_t>(Shape::kMaxRank)) {
    refuse("batch_dim", "0 to 7", std::to_string(batch_dim));
  }
  if (minimum < 1) {
    refuse("minimum_batch_size", "at least 1", std::to_string(minimum));
  }
  if (maximum < minimum) {
    refuse("maximum_batch_size",
           "at least minimum_batch_size=" + std::to_string(minimum),
           std::to_string(maximum));
  }
  if (timeout && timeout->count() < 0) {
    refuse("timeout_ms", "at least 0, or None to wait for a whole batch",
           std::to_string(timeout->count()));
  }
}

Signature Signature::of(const Nest& nest) {
  Signature signature{nest.structure, {}};
  signature.fields.reserve(nest.leaves.size());
  for (const Array& leaf : nest.leaves) {
    signature.fields.push_back({leaf.dtype, leaf.shape});
  }
  return signature;
}

int64_t num_rows(const Nest& item, size_t batch_dim) {
  if (item.leaves.empty()) {
    refuse("the nest", "at least one array", item.structure->str());
  }
  int64_t rows = -1;
  for (size_t i = 0; i < item.leaves.size(); ++i) {
    const Shape& shape = item.leaves[i].shape;
    if (shape.rank() <= batch_dim) {
      refuse(item.structure->path(i),
             "at least " + std::to_string(batch_dim + 1) +
                 " dimensions (batch_dim=" + std::to_string(batch_dim) + ")",
             "shape " + shape.str());
    }
    if (rows == -1) rows = shape[batch_dim];
    if (shape[batch_dim] != rows) {
      refuse(item.structure->path(i),
             std::to_string(rows) + " rows in dimension " + std::to_string(batch_dim) +
                 " as in " + item.structure->path(0),
             "shape " + shape.str());
    }
  }
  if (rows < 1) refuse("the nest", "at least one row", std::to_string(rows));
  return rows;
}

void check_alike(const Nest& item, const Signature& expected, size_t batch_dim) {
  if (!item.structure->equals(*expected.structure)) {
    refuse("the nest", expected.structure->str(), item.structure->str());
  }
  for (size_t i = 0; i < item.leaves.size(); ++i) {
    const Array& leaf = item.leaves[i];
    const auto& [dtype, shape] = expected.fields[i];
    bool same = leaf.dtype == dtype && leaf.shape.rank() == shape.rank();
    for (size_t dim = 0; same && dim < shape.rank(); ++dim) {
      same = dim == batch_dim || leaf.shape[dim] == shape[dim];
    }
    if (!same) {
      refuse(item.structure->path(i),
             std::string(name(dtype)) + " of shape " + shape.str() +
                 " (any size in dimension " + std::to_string(batch_dim) + ")",
             std::string(name(leaf.dtype)) + " of shape " + leaf.shape.str());
    }
  }
}

Nest concatenate(std::span<const Piece> pieces, size_t batch_dim, BufferPool& pool) {
  int64_t rows = 0;
  for (const Piece& piece : pieces) rows += piece.end - piece.begin;
  Signature signature = Signature::of(*pieces.front().item);
  std::vector<bool> channels_last;
  for (size_t i = 0; i < signature.fields.size(); ++i) {
    Shape& shape = signature.fields[i].shape;
    shape[batch_dim] = rows;
    channels_last.push_back(batch_dim + 3 < shape.rank() &&
                            pieces.front().item->leaves[i].is_channels_last());
    if (channels_last[i]) shape.move(shape.rank() - 3, shape.rank() - 1);
  }
  Nest batch{signature.structure, pool.allocate(signature.fields)};
  for (size_t i = 0; i < batch.leaves.size(); ++i) {
    Array& target = batch.leaves[i];
    const size_t last = target.shape.rank() - 1;
    int64_t row = 0;
    for (const Piece& piece : pieces) {
      const Array& source = piece.item->leaves[i];
      if (channels_last[i]) {
        copy_rows(source.move(last - 2, last), piece.begin, piece.end, target, row,
                  batch_dim);
      } else {
        copy_rows(source, piece.begin, piece.end, target, row, batch_dim);
      }
      row += piece.end - piece.begin;
    }
    if (channels_last[i]) target = target.move(last, last - 2);
  }
  return batch;
}

}  // namespace beast
