// SPDX-License-Identifier: Apache-2.0
#include "message_reader.h"

#include <algorithm>
#include <cstring>

namespace beast {

MessageReader::MessageReader(std::vector<std::span<const std::byte>> pieces)
    : pieces_(std::move(pieces)) {
  for (const auto& piece : pieces_) left_ += piece.size();
}

void MessageReader::fail() { throw ProtocolError("truncated or broken"); }

uint64_t MessageReader::read_varint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    std::byte byte;
    read(&byte, 1);
    value |= (static_cast<uint64_t>(byte) & 0x7f) << shift;
    if ((byte & std::byte{0x80}) == std::byte{0}) return value;
  }
  fail();
}

bool MessageReader::next(Field& field) {
  if (left_ == 0) return false;
  const uint64_t tag = read_varint();
  field = {static_cast<uint32_t>(tag >> 3), static_cast<Field::Type>(tag & 7)};
  if (tag > UINT32_MAX || field.number == 0) fail();
  switch (field.type) {
    case Field::kVarint:
      field.value = read_varint();
      return true;
    case Field::kFixed64:
      field.size = 8;
      break;
    case Field::kFixed32:
      field.size = 4;
      break;
    case Field::kBytes: {
      const uint64_t size = read_varint();
      field.size = size;
      break;
    }
    default:  // Groups, which proto3 does not have, and numbers that mean nothing.
      fail();
  }
  if (field.size > left_) fail();
  return true;
}

void MessageReader::read(std::byte* target, size_t size) {
  if (size > left_) fail();
  left_ -= size;
  while (size > 0) {
    const auto& piece = pieces_[piece_];
    const size_t part = std::min(size, piece.size() - offset_);
    if (part > 0) std::memcpy(target, piece.data() + offset_, part);
    target += part;
    size -= part;
    offset_ += part;
    if (offset_ == piece.size()) {
      ++piece_;
      offset_ = 0;
    }
  }
}

std::string MessageReader::read_string(const Field& field, size_t max_size) {
  if (field.type != Field::kBytes || field.size > max_size) fail();
  std::string text(field.size, '\0');
  read(reinterpret_cast<std::byte*>(text.data()), text.size());
  return text;
}

void MessageReader::skip(const Field& field) {
  if (field.type != Field::kVarint) skip(field.size);
}

void MessageReader::skip(size_t size) {
  if (size > left_) fail();
  left_ -= size;
  while (size > 0) {
    const size_t part = std::min(size, pieces_[piece_].size() - offset_);
    size -= part;
    offset_ += part;
    if (offset_ == pieces_[piece_].size()) {
      ++piece_;
      offset_ = 0;
    }
  }
}

size_t MessageReader::enter(const Field& field) {
  if (field.type != Field::kBytes || field.size > left_) fail();
  const size_t outer = left_ - field.size;
  left_ = field.size;
  return outer;
}

void MessageReader::leave(size_t outer) {
  if (left_ != 0) fail();
  left_ = outer;
}

}  // namespace beast
