// SPDX-License-Identifier: Apache-2.0
#include "dtype.h"

#include <array>

namespace beast {
namespace {

struct Entry {
  std::string_view name;
  size_t itemsize;
};

constexpr std::array<Entry, 14> kTable{{
    {"", 0},  // Zero is protobuf's "not set".
    {"bool", 1},
    {"uint8", 1},
    {"int8", 1},
    {"uint16", 2},
    {"int16", 2},
    {"uint32", 4},
    {"int32", 4},
    {"uint64", 8},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
}};

}  // namespace

std::optional<DType> dtype_from_number(int64_t number) {
  if (number < 1 || number >= static_cast<int64_t>(kTable.size())) return std::nullopt;
  return static_cast<DType>(number);
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (size_t i = 1; i < kTable.size(); ++i) {
    if (kTable[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

size_t itemsize(DType dtype) { return kTable[static_cast<size_t>(dtype)].itemsize; }

std::string_view name(DType dtype) { return kTable[static_cast<size_t>(dtype)].name; }

}  // namespace beast
