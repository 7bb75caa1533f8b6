// SPDX-License-Identifier: Apache-2.0
// Arrays and nests with known contents, for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "nest.h"

namespace beast::test {

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return DType::kUInt8;
  if constexpr (std::is_same_v<T, int16_t>) return DType::kInt16;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kInt64;
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
}

// A contiguous array that owns these values.
template <class T>
Array array_of(Shape shape, std::vector<T> values) {
  auto owner = std::make_shared<std::vector<T>>(std::move(values));
  auto* data = reinterpret_cast<std::byte*>(owner->data());
  return Array::contiguous(dtype_of<T>(), shape, data, std::move(owner));
}

// A contiguous array of first, first + 1, ...
template <class T>
Array counting(Shape shape, T first = 0) {
  std::vector<T> values(shape.num_elements());
  std::iota(values.begin(), values.end(), first);
  return array_of<T>(shape, std::move(values));
}

// The elements in the order of their indices, read one by one: no copy() in it.
template <class T>
std::vector<T> values(const Array& array, size_t dim = 0, int64_t offset = 0) {
  if (dim == array.shape.rank()) {
    return {*reinterpret_cast<const T*>(array.data + offset)};
  }
  std::vector<T> all;
  for (int64_t i = 0; i < array.shape[dim]; ++i) {
    auto part = values<T>(array, dim + 1, offset + i * array.strides[dim]);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// The elements of a leaf of a nest.
inline std::vector<int64_t> ints(const Nest& nest, size_t leaf = 0) {
  return values<int64_t>(nest.leaves.at(leaf));
}

// Rows [first, first + rows) of int64, each its own number.
inline Nest rows(int64_t first, int64_t count) {
  return Nest::leaf(counting<int64_t>({count}, first));
}

}  // namespace beast::test
