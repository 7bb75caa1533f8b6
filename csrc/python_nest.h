// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "nest.h"

namespace beast {

// Nests between Python and C++, without a copy of any array. All need the GIL.

// dicts with string keys, tuples, lists, and as leaves: what has __dlpack__ (torch,
// numpy, jax, ...) or the buffer protocol, and numbers. The arrays keep their Python
// objects alive, and take the GIL to let them go. Raises TypeError or ValueError that
// names the leaf.
Nest nest_from_python(pybind11::handle object);

// Tensors where torch is loaded, otherwise numpy arrays; lists come back as tuples.
pybind11::object nest_to_python(const Nest& nest);
pybind11::array array_to_numpy(const Array& array);

std::optional<DType> dtype_from_numpy(const pybind11::dtype& dtype);
pybind11::dtype dtype_to_numpy(DType dtype);

// Keeps a Python object until the last owner, of any thread, lets go.
std::shared_ptr<void> keep_alive(pybind11::object object);

}  // namespace beast
