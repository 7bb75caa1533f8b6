// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace beast {
namespace {

void copy_strided(const Array& source, const Array& target, size_t dim,
                  const std::byte* from, std::byte* to, size_t contiguous_from,
                  size_t run_bytes) {
  if (dim == contiguous_from) {
    std::memcpy(to, from, run_bytes);
    return;
  }
  const int64_t step_from = source.strides[dim], step_to = target.strides[dim];
  const int64_t size = source.shape[dim];
  for (int64_t i = 0; i < size; ++i, from += step_from, to += step_to) {
    if (dim + 1 == contiguous_from) {
      std::memcpy(to, from, run_bytes);
    } else {
      copy_strided(source, target, dim + 1, from, to, contiguous_from, run_bytes);
    }
  }
}

}  // namespace

Shape::Shape(std::initializer_list<int64_t> dims)
    : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const int64_t> dims) {
  if (dims.size() > kMaxRank) {
    throw std::invalid_argument("arrays have at most " + std::to_string(kMaxRank) +
                                " dimensions here, got " + std::to_string(dims.size()));
  }
  for (int64_t dim : dims) dims_[rank_++] = dim;
}

int64_t Shape::num_elements() const {
  int64_t product = 1;
  for (int64_t dim : dims()) {
    if (dim == 0) return 0;  // Whatever the others are: their product may overflow.
  }
  for (int64_t dim : dims()) product *= dim;
  return product;
}

void Shape::insert(size_t at, int64_t dim) {
  if (rank_ == kMaxRank) throw std::invalid_argument("too many dimensions");
  for (size_t i = rank_++; i > at; --i) dims_[i] = dims_[i - 1];
  dims_[at] = dim;
}

void Shape::move(size_t from, size_t to) {
  for (; from < to; ++from) std::swap(dims_[from], dims_[from + 1]);
  for (; from > to; --from) std::swap(dims_[from], dims_[from - 1]);
}

std::string Shape::str() const {
  std::string text = "(";
  for (size_t i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims_[i]);
  }
  return text + (rank_ == 1 ? ",)" : ")");
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (size_t i = 0; i < rank_; ++i) {
    if (dims_[i] != other.dims_[i]) return false;
  }
  return true;
}

Array Array::contiguous(DType dtype, Shape shape, std::byte* data,
                        std::shared_ptr<void> owner) {
  Shape strides = shape;
  int64_t stride = itemsize(dtype);
  for (size_t i = shape.rank(); i-- > 0;) {
    strides[i] = stride;
    // As numpy does: no stride is 0 or, with an empty dimension, beyond all bounds.
    if (!__builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride))
      continue;
    stride = itemsize(dtype);
  }
  return {dtype, shape, strides, data, std::move(owner)};
}

bool Array::is_contiguous() const {
  int64_t stride = itemsize(dtype);
  for (size_t i = shape.rank(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != stride) return false;
    stride *= shape[i];
  }
  return true;
}

bool Array::is_channels_last() const {
  const size_t rank = shape.rank();
  if (rank < 3 || shape[rank - 3] == 1 || num_bytes() == 0) return false;
  const int64_t pixel_bytes = shape[rank - 3] * itemsize(dtype);
  return strides[rank - 3] == static_cast<int64_t>(itemsize(dtype)) &&
         strides[rank - 1] == pixel_bytes &&
         strides[rank - 2] == pixel_bytes * shape[rank - 1];
}

Array Array::narrow(size_t dim, int64_t begin, int64_t end) const {
  Array part = *this;
  part.data += begin * strides[dim];
  part.shape[dim] = end - begin;
  return part;
}

Array Array::select(int64_t index) const {
  std::span<const int64_t> dims = shape.dims(), steps = strides.dims();
  return {dtype, Shape(dims.subspan(1)), Shape(steps.subspan(1)),
          data + index * strides[0], owner};
}

Array Array::unsqueeze(size_t at) const {
  Array result = *this;
  // A dimension of one is never stepped along; this stride keeps it contiguous.
  int64_t stride = at < shape.rank() ? shape[at] * strides[at] : itemsize(dtype);
  result.shape.insert(at, 1);
  result.strides.insert(at, stride);
  return result;
}

Array Array::move(size_t from, size_t to) const {
  Array result = *this;
  result.shape.move(from, to);
  result.strides.move(from, to);
  return result;
}

void copy(const Array& source, const Array& target) {
  if (source.dtype != target.dtype || !(source.shape == target.shape)) {
    throw std::invalid_argument("copy of " + std::string(name(source.dtype)) +
                                source.shape.str() + " into " +
                                std::string(name(target.dtype)) + target.shape.str());
  }
  if (source.num_bytes() == 0) return;
  // Inner dimensions that lie together in both are one run of bytes.
  size_t contiguous_from = source.shape.rank();
  int64_t run_bytes = itemsize(source.dtype);
  while (contiguous_from > 0) {
    const size_t dim = contiguous_from - 1;
    const bool together = source.shape[dim] == 1 || (source.strides[dim] == run_bytes &&
                                                     target.strides[dim] == run_bytes);
    if (!together) break;
    run_bytes *= source.shape[dim];
    contiguous_from = dim;
  }
  copy_strided(source, target, 0, source.data, target.data, contiguous_from, run_bytes);
}

void copy_rows(const Array& source, int64_t begin, int64_t end, const Array& target,
               int64_t to, size_t dim) {
  if (!source.is_contiguous() || !target.is_contiguous()) {
    copy(source.narrow(dim, begin, end), target.narrow(dim, to, to + end - begin));
    return;
  }
  size_t row_bytes = itemsize(source.dtype);
  for (size_t i = dim + 1; i < source.shape.rank(); ++i) row_bytes *= source.shape[i];
  if (row_bytes == 0) return;  // Data may be null, and the other dimensions anything.
  int64_t num_runs = 1;
  for (size_t i = 0; i < dim; ++i) num_runs *= source.shape[i];
  const size_t source_step = source.shape[dim] * row_bytes;
  const size_t target_step = target.shape[dim] * row_bytes;
  const std::byte* from = source.data + begin * row_bytes;
  std::byte* into = target.data + to * row_bytes;
  for (int64_t i = 0; i < num_runs; ++i) {
    std::memcpy(into, from, (end - begin) * row_bytes);
    from += source_step;
    into += target_step;
  }
}

std::optional<size_t> checked_num_bytes(DType dtype, std::span<const int64_t> dims) {
  if (dims.size() > Shape::kMaxRank) return std::nullopt;
  int64_t bytes = itemsize(dtype);
  bool empty = false;
  for (int64_t dim : dims) {
    if (dim < 0) return std::nullopt;
    if (dim == 0) empty = true;
    if (dim > 0 && __builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
  }
  return empty ? 0 : static_cast<size_t>(bytes);
}

}  // namespace beast
