// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "array.h"

namespace beast {

// The shape of a nest without its leaves: a leaf, a tuple or a dict with sorted string
// keys. Immutable once built, so that nests of one kind share it.
class Structure {
 public:
  enum class Kind : uint8_t { kLeaf, kTuple, kDict };
  static constexpr int kMaxDepth = 16;  // Deeper nests are mistakes or attacks.
  using Ptr = std::shared_ptr<const Structure>;

  static Ptr leaf();
  static Ptr tuple(std::vector<Ptr> children);
  // Sorted by key; throws std::invalid_argument for a key that is given twice.
  static Ptr dict(std::vector<std::pair<std::string, Ptr>> children);

  Kind kind() const { return kind_; }
  const std::vector<std::string>& keys() const { return keys_; }  // Of a dict.
  const std::vector<Ptr>& children() const { return children_; }
  size_t num_leaves() const { return num_leaves_; }
  // What to call leaf i in an error: row.observation.image, or [1][0].
  std::string path(size_t leaf) const;
  std::string str() const;  // {a: *, b: (*, *)}
  bool equals(const Structure& other) const;

  // The child of a dict and where its leaves begin; throws std::out_of_range.
  struct Part {
    Ptr structure;
    size_t first_leaf;
  };
  Part at(const std::string& key) const;
  Part at(size_t index) const;

 private:
  Kind kind_ = Kind::kLeaf;
  std::vector<std::string> keys_;
  std::vector<Ptr> children_;
  size_t num_leaves_ = 1;
};

// Arrays in a structure, in the order in which a walk through it meets them.
struct Nest {
  Structure::Ptr structure = Structure::leaf();
  std::vector<Array> leaves;

  static Nest leaf(Array array) { return {Structure::leaf(), {std::move(array)}}; }
  static Nest tuple(std::vector<Nest> parts);
  static Nest dict(std::vector<std::pair<std::string, Nest>> parts);

  Nest at(const std::string& key) const;
  Nest at(size_t index) const;
  Nest narrow(size_t dim, int64_t begin, int64_t end) const;  // Of every leaf.
};

}  // namespace beast
