// SPDX-License-Identifier: Apache-2.0
#include "env_spec.h"

#include <stdexcept>

namespace beast {

void Space::check_same(const Space& other, const std::string& what) const {
  if (!structure->equals(*other.structure)) {
    throw std::invalid_argument(what + ": expected " + structure->str() + ", got " +
                                other.structure->str());
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    const LeafSpace &mine = leaves[i], &theirs = other.leaves[i];
    if (mine.dtype == theirs.dtype && mine.shape == theirs.shape &&
        mine.num_values == theirs.num_values && mine.start == theirs.start) {
      continue;
    }
    auto text = [](const LeafSpace& leaf) {
      std::string text = std::string(name(leaf.dtype)) + leaf.shape.str();
      if (leaf.num_values > 0) {
        text += " with values from " + std::to_string(leaf.start) + " to " +
                std::to_string(leaf.start + leaf.num_values - 1);
      }
      return text;
    };
    const std::string path =
        structure->kind() == Structure::Kind::kLeaf ? "" : " " + structure->path(i);
    throw std::invalid_argument(what + path + ": expected " + text(mine) + ", got " +
                                text(theirs));
  }
}

}  // namespace beast
