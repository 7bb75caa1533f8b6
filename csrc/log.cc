// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <cstdio>
#include <memory>
#include <mutex>

namespace beast {
namespace {

using Sink = std::function<void(LogLevel, const std::string&)>;

std::mutex mu;
std::shared_ptr<Sink> the_sink;  // Guarded by mu.

}  // namespace

void set_log_sink(Sink sink) {
  std::lock_guard lock(mu);
  the_sink = sink ? std::make_shared<Sink>(std::move(sink)) : nullptr;
}

void log(LogLevel level, const std::string& message) {
  std::shared_ptr<Sink> sink;
  {
    std::lock_guard lock(mu);
    sink = the_sink;
  }
  if (sink) {
    (*sink)(level, message);
  } else {
    std::fprintf(stderr, "libbeast: %s\n", message.c_str());
  }
}

}  // namespace beast
