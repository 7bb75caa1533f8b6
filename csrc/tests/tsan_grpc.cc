// SPDX-License-Identifier: Apache-2.0
// Tells the thread sanitizer what gRPC promises: what was done before an operation
// began is seen by whoever is told of its end, what was done before a slice was made by
// whoever destroys it, and what was done with a slice by whoever lets go of it last:
// messages of two streams may lie in one. gRPC keeps these promises with atomics and
// mutexes of its own, which the sanitizer does not see as the system's gRPC is not
// instrumented; without this, every object that goes from one thread to another through
// gRPC is reported. These functions take the place of gRPC's and call them. Linked into
// the tests only, and only under the thread sanitizer.
#include <dlfcn.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <sanitizer/tsan_interface.h>

namespace {

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

struct SliceOwner {
  void (*destroy)(void*);
  void* user_data;
};

void destroy_slice(void* data) {
  __tsan_acquire(data);
  auto* owner = static_cast<SliceOwner*>(data);
  owner->destroy(owner->user_data);
  delete owner;
}

}  // namespace

#pragma GCC visibility push(default)

// Not in a public header: all operations of all kinds begin here.
bool grpc_cq_begin_op(grpc_completion_queue* cq, void* tag);

bool grpc_cq_begin_op(grpc_completion_queue* cq, void* tag) {
  static auto* const begin = real<decltype(grpc_cq_begin_op)>(
      "_Z16grpc_cq_begin_opP21grpc_completion_queuePv");
  __tsan_release(tag);
  return begin(cq, tag);
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* cq, gpr_timespec deadline,
                                      void* reserved) {
  static auto* const next =
      real<decltype(grpc_completion_queue_next)>("grpc_completion_queue_next");
  const grpc_event event = next(cq, deadline, reserved);
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

grpc_slice grpc_slice_new_with_user_data(void* data, size_t size,
                                         void (*destroy)(void*), void* user_data) {
  static auto* const make =
      real<decltype(grpc_slice_new_with_user_data)>("grpc_slice_new_with_user_data");
  auto* owner = new SliceOwner{destroy, user_data};
  __tsan_release(owner);
  return make(data, size, destroy_slice, owner);
}

void grpc_slice_unref(grpc_slice slice) {
  static auto* const unref = real<decltype(grpc_slice_unref)>("grpc_slice_unref");
  __tsan_release(slice.refcount);
  __tsan_acquire(slice.refcount);
  unref(slice);
}

#pragma GCC visibility pop
