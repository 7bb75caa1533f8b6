// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "environment.h"

namespace beast {

// Environments of Python's gymnasium API, as a server needs them. env_class() makes
// either one environment, of which num_envs are made, or one gymnasium VectorEnv.
//
// Vector environments say in metadata["autoreset_mode"] when they reset. NextStep is
// what a stream wants. SameStep and Disabled ones step all their environments together
// and cannot leave out those that begin an episode: their first step of an episode is
// made with the action that was to be ignored, and the stream shows what follows it.
// Returns and lengths count that step. Any other mode is refused.
//
// May be called and destroyed without the GIL. Throws std::runtime_error with the
// traceback of what Python raised.
std::unique_ptr<Environment> make_python_environment(pybind11::handle env_class,
                                                     int64_t num_envs, uint64_t seed);

// A seed in [0, 2^31) for the k-th environment of a stream of a server.
uint32_t derive_seed(uint64_t seed, uint64_t stream, uint64_t k = 0);

// What Python printed if the error were not caught. Needs the GIL.
std::string format_error(const pybind11::error_already_set& error);

}  // namespace beast
