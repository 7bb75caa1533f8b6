// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "batching.h"
#include "nest.h"

namespace beast {

// What one array of a space looks like, for one environment.
struct LeafSpace {
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t num_values = 0;  // Of a discrete space, else 0.
  int64_t start = 0;       // Its smallest value.
  std::string low, high;   // Bounds, laid out like the array; empty if there are none.

  size_t num_bytes() const { return shape.num_elements() * itemsize(dtype); }
};

// A space: leaves in a structure, in the order in which a walk through it meets them.
struct Space {
  static constexpr size_t kMaxRank = 6;  // Time and batch come before.
  static constexpr size_t kMaxLeaves = 256;

  Structure::Ptr structure = Structure::leaf();
  std::vector<LeafSpace> leaves;

  // Throws std::invalid_argument that names the leaf and `what`, expected and got, if
  // the other space is not of the same structure, dtypes, shapes and numbers of values.
  void check_same(const Space& other, const std::string& what) const;
};

// What a server serves on a stream.
struct EnvSpec {
  static constexpr int64_t kMaxEnvs = 65536;

  int64_t num_envs = 1;  // K
  Space observation;
  Space action;
  std::string description;
};

}  // namespace beast
