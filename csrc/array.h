// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "dtype.h"

namespace beast {

// Up to eight dimensions, held inline: rows are made and dropped in hot loops.
class Shape {
 public:
  static constexpr size_t kMaxRank = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  explicit Shape(std::span<const int64_t> dims);  // Throws past kMaxRank dimensions.

  size_t rank() const { return rank_; }
  int64_t& operator[](size_t i) { return dims_[i]; }
  int64_t operator[](size_t i) const { return dims_[i]; }
  const int64_t* data() const { return dims_.data(); }
  std::span<const int64_t> dims() const { return {dims_.data(), rank_}; }
  int64_t num_elements() const;
  void insert(size_t at, int64_t dim);
  void move(size_t from, size_t to);  // One dimension to the place of another.
  std::string str() const;            // As Python writes it: (81, 32, 4).
  bool operator==(const Shape& other) const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  uint8_t rank_ = 0;
};

// A typed, strided view of memory that `owner` keeps alive. Copying it copies no data.
// Not synchronised: whoever hands an Array on no longer writes through it.
struct Array {
  DType dtype = DType::kUInt8;
  Shape shape;
  Shape strides;  // In bytes.
  std::byte* data = nullptr;
  std::shared_ptr<void> owner;

  // A view of C-contiguous memory.
  static Array contiguous(DType dtype, Shape shape, std::byte* data,
                          std::shared_ptr<void> owner);

  size_t num_bytes() const { return shape.num_elements() * itemsize(dtype); }
  bool is_contiguous() const;
  // Images [..., C, H, W], C > 1, each of which lies in memory as [H, W, C].
  bool is_channels_last() const;
  // The part [begin, end) along dim, without a copy.
  Array narrow(size_t dim, int64_t begin, int64_t end) const;
  // The element at index along the first dimension, without a copy.
  Array select(int64_t index) const;
  // The same elements with a dimension of size one put in at `at`.
  Array unsqueeze(size_t at) const;
  // The same elements with one dimension moved to the place of another.
  Array move(size_t from, size_t to) const;
};

// Copies the elements of source into target; dtypes and shapes must be equal.
void copy(const Array& source, const Array& target);

// Copies rows [begin, end) of source along dim to the rows of target that begin at
// `to`. All else must be equal, which the caller has checked; contiguous arrays go
// fastest.
void copy_rows(const Array& source, int64_t begin, int64_t end, const Array& target,
               int64_t to, size_t dim);

// What memory a C-contiguous array takes; nothing where that overflows, where a
// dimension is negative, or past kMaxRank dimensions. For shapes from outside.
std::optional<size_t> checked_num_bytes(DType dtype, std::span<const int64_t> dims);

}  // namespace beast
