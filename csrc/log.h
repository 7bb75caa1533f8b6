// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

namespace beast {

enum class LogLevel { kInfo, kWarning, kError };

// Where messages go; stderr unless set. Called from any thread, with no lock held that
// the sink could want: Python's sink takes the GIL.
void set_log_sink(std::function<void(LogLevel, const std::string&)> sink);
void log(LogLevel level, const std::string& message);

}  // namespace beast
