// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include "env_spec.h"
#include "errors.h"
#include "security.h"

namespace beast {

// What the server at the address serves; tries until it answers. Throws TimeoutError
// with the last reason, ConnectionError where trying again would not help, and
// std::runtime_error with the traceback where the environment cannot be built.
EnvSpec probe(const std::string& address, const Security& security,
              std::chrono::milliseconds timeout, size_t max_message_bytes,
              const Tick& tick = {});

}  // namespace beast
