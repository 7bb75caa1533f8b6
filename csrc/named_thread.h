// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <string>
#include <thread>
#include <utility>

namespace beast {

// What top, gdb and py-spy show; at most 15 characters of it.
inline void name_this_thread(const std::string& name) {
#ifdef __APPLE__
  pthread_setname_np(name.substr(0, 15).c_str());
#else
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
#endif
}

// A thread with a name that is joined when it goes out of scope. fn must end by itself;
// exceptions must not leave it.
class NamedThread {
 public:
  template <class Fn>
  NamedThread(std::string name, Fn fn)
      : thread_([name = std::move(name), fn = std::move(fn)]() mutable {
          name_this_thread(name);
          fn();
        }) {}
  NamedThread(NamedThread&&) = default;
  ~NamedThread() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace beast
