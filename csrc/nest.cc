// SPDX-License-Identifier: Apache-2.0
#include "nest.h"

#include <algorithm>
#include <stdexcept>

namespace beast {

Structure::Ptr Structure::leaf() {
  static const Ptr the_leaf = std::make_shared<Structure>();
  return the_leaf;
}

Structure::Ptr Structure::tuple(std::vector<Ptr> children) {
  auto result = std::make_shared<Structure>();
  result->kind_ = Kind::kTuple;
  result->num_leaves_ = 0;
  for (const Ptr& child : children) result->num_leaves_ += child->num_leaves();
  result->children_ = std::move(children);
  return result;
}

Structure::Ptr Structure::dict(std::vector<std::pair<std::string, Ptr>> children) {
  std::sort(children.begin(), children.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  auto result = std::make_shared<Structure>();
  result->kind_ = Kind::kDict;
  result->num_leaves_ = 0;
  for (auto& [key, child] : children) {
    if (!result->keys_.empty() && result->keys_.back() == key) {
      throw std::invalid_argument("a dict has the key \"" + key + "\" twice");
    }
    result->num_leaves_ += child->num_leaves();
    result->keys_.push_back(std::move(key));
    result->children_.push_back(std::move(child));
  }
  return result;
}

std::string Structure::path(size_t leaf) const {
  std::string text;
  const Structure* node = this;
  while (node->kind_ != Kind::kLeaf) {
    size_t child = 0;
    while (leaf >= node->children_[child]->num_leaves_) {
      leaf -= node->children_[child++]->num_leaves_;
    }
    if (node->kind_ == Kind::kDict) {
      text += (text.empty() ? "" : ".") + node->keys_[child];
    } else {
      text += "[" + std::to_string(child) + "]";
    }
    node = node->children_[child].get();
  }
  return text.empty() ? "the array" : text;
}

std::string Structure::str() const {
  if (kind_ == Kind::kLeaf) return "*";
  const bool is_dict = kind_ == Kind::kDict;
  std::string text = is_dict ? "{" : "(";
  for (size_t i = 0; i < children_.size(); ++i) {
    if (i > 0) text += ", ";
    if (is_dict) text += keys_[i] + ": ";
    text += children_[i]->str();
  }
  if (!is_dict && children_.size() == 1) text += ",";
  return text + (is_dict ? "}" : ")");
}

bool Structure::equals(const Structure& other) const {
  if (this == &other) return true;
  if (kind_ != other.kind_ || num_leaves_ != other.num_leaves_ ||
      keys_ != other.keys_ || children_.size() != other.children_.size()) {
    return false;
  }
  for (size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i]->equals(*other.children_[i])) return false;
  }
  return true;
}

Structure::Part Structure::at(const std::string& key) const {
  auto found = std::lower_bound(keys_.begin(), keys_.end(), key);
  if (found == keys_.end() || *found != key) {
    throw std::out_of_range("no \"" + key + "\" in " + str());
  }
  return at(static_cast<size_t>(found - keys_.begin()));
}

Structure::Part Structure::at(size_t index) const {
  if (index >= children_.size()) {
    throw std::out_of_range("no part " + std::to_string(index) + " in " + str());
  }
  size_t first_leaf = 0;
  for (size_t i = 0; i < index; ++i) first_leaf += children_[i]->num_leaves_;
  return {children_[index], first_leaf};
}

Nest Nest::tuple(std::vector<Nest> parts) {
  std::vector<Structure::Ptr> structures;
  Nest result;
  for (Nest& part : parts) {
    structures.push_back(part.structure);
    std::move(part.leaves.begin(), part.leaves.end(),
              std::back_inserter(result.leaves));
  }
  result.structure = Structure::tuple(std::move(structures));
  return result;
}

Nest Nest::dict(std::vector<std::pair<std::string, Nest>> parts) {
  std::sort(parts.begin(), parts.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::pair<std::string, Structure::Ptr>> structures;
  Nest result;
  for (auto& [key, part] : parts) {
    structures.emplace_back(key, part.structure);
    std::move(part.leaves.begin(), part.leaves.end(),
              std::back_inserter(result.leaves));
  }
  result.structure = Structure::dict(std::move(structures));
  return result;
}

namespace {
Nest cut(const Nest& nest, const Structure::Part& part) {
  auto begin = nest.leaves.begin() + part.first_leaf;
  return {part.structure, {begin, begin + part.structure->num_leaves()}};
}
}  // namespace

Nest Nest::at(const std::string& key) const { return cut(*this, structure->at(key)); }

Nest Nest::at(size_t index) const { return cut(*this, structure->at(index)); }

Nest Nest::narrow(size_t dim, int64_t begin, int64_t end) const {
  Nest result{structure, {}};
  result.leaves.reserve(leaves.size());
  for (const Array& leaf : leaves)
    result.leaves.push_back(leaf.narrow(dim, begin, end));
  return result;
}

}  // namespace beast
