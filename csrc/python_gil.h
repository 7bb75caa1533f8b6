// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>

namespace beast {

// Taking and giving back the GIL, also by threads that outlive the interpreter. Python
// ends a thread that wants the GIL after its own end by tearing it out of its
// functions, which C++ answers with abort(): a daemon thread would turn every exit into
// a crash. Here such a thread sleeps until the process is gone.

// The thread in which the interpreter ends, once it does: set by our atexit handler.
inline std::atomic<unsigned long> ending_thread{0};

inline bool interpreter_ends() { return ending_thread != 0; }

inline void sleep_if_interpreter_ends() {
  while (interpreter_ends() && ending_thread != PyThread_get_thread_ident()) pause();
}

// Not PyGILState_Check(), which says yes to every thread once the interpreter is gone.
inline bool has_gil() {
  const PyThreadState* mine = PyGILState_GetThisThreadState();
  return mine != nullptr && mine == pybind11::detail::get_thread_state_unchecked();
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    sleep_if_interpreter_ends();
    PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

class WithGil {
 public:
  WithGil() {
    // Who sleeps with the GIL keeps the interpreter from ending.
    if (!has_gil()) sleep_if_interpreter_ends();
    state_ = PyGILState_Ensure();
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace beast
