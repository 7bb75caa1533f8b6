// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace beast {

// Element types that may cross a border: Python's, a queue's or the network's. The
// numbers are those of rpcenv.proto and never change.
enum class DType : uint8_t {
  kBool = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kUInt16 = 4,
  kInt16 = 5,
  kUInt32 = 6,
  kInt32 = 7,
  kUInt64 = 8,
  kInt64 = 9,
  kFloat16 = 10,
  kBFloat16 = 11,
  kFloat32 = 12,
  kFloat64 = 13,
};

// The DType of a number from outside, or nothing: numbers not listed are refused.
std::optional<DType> dtype_from_number(int64_t number);
std::optional<DType> dtype_from_name(std::string_view name);  // As numpy spells it.

size_t itemsize(DType dtype);
std::string_view name(DType dtype);

}  // namespace beast
