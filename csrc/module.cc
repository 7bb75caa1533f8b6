// SPDX-License-Identifier: Apache-2.0
// libbeast's Python face. Only translation: every method that may wait or take a lock
// is bound with the GIL released; the arguments and results are made while it is held.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "actor_pool.h"
#include "batching_queue.h"
#include "dynamic_batcher.h"
#include "env_server.h"
#include "log.h"
#include "probe.h"
#include "python_env.h"
#include "python_gil.h"
#include "python_nest.h"

namespace py = pybind11;

namespace beast {
namespace {

using ReleaseGil = py::call_guard<WithoutGil>;
using OptionalString = std::optional<std::string>;

// Lets Ctrl-C end a wait of the main thread; others have no signals to look for.
void check_signals() {
#ifdef __linux__
  if (gettid() != getpid()) return;
#else
  if (pthread_main_np() == 0) return;
#endif
  WithGil gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::chrono::milliseconds seconds(double value, const char* name) {
  if (!(value >= 0 && value < 1e9)) {
    throw std::invalid_argument(std::string(name) + ": expected seconds, got " +
                                std::to_string(value));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(value * 1000));
}

BatchSizes batch_sizes(int64_t batch_dim, int64_t minimum, int64_t maximum,
                       std::optional<double> timeout_ms) {
  BatchSizes sizes{batch_dim, minimum, maximum, {}};
  if (timeout_ms) {
    if (!(*timeout_ms >= 0)) {
      throw std::invalid_argument("timeout_ms: expected at least 0, or None, got " +
                                  std::to_string(*timeout_ms));
    }
    sizes.timeout = std::chrono::milliseconds(static_cast<int64_t>(*timeout_ms));
  }
  return sizes;
}

// Page-locked memory for asynchronous copies to a GPU, by torch's CUDA runtime.
BufferPool::Hooks pinning(bool pin_memory) {
  if (!pin_memory) return {};
  const auto cudart = [] {
    return py::module_::import("torch").attr("cuda").attr("cudart")();
  };
  if (!py::module_::import("torch").attr("cuda").attr("is_available")().cast<bool>()) {
    throw std::invalid_argument(
        "pin_memory=True needs a GPU and a CUDA build of torch");
  }
  BufferPool::Hooks hooks;
  hooks.allocated = [cudart](void* data, size_t size) {
    WithGil gil;
    const py::object error =
        cudart().attr("cudaHostRegister")(reinterpret_cast<uintptr_t>(data), size, 0);
    if (py::int_(error).cast<int>() != 0) {
      throw std::runtime_error("cannot pin " + std::to_string(size) +
                               " bytes: " + py::str(error).cast<std::string>());
    }
  };
  hooks.freed = [cudart](void* data) {
    WithGil gil;
    cudart().attr("cudaHostUnregister")(reinterpret_cast<uintptr_t>(data));
  };
  return hooks;
}

Security security(const OptionalString& token, const OptionalString& tls_cert,
                  const OptionalString& tls_key, const OptionalString& tls_ca) {
  Security result;
  result.token = token.value_or("");
  result.certificate_file = tls_cert.value_or("");
  result.key_file = tls_key.value_or("");
  result.authority_file = tls_ca.value_or("");
  return result;
}

using Batch = DynamicBatcher::Batch;

// Never throws: what it tells of may be unable to show itself.
std::string describe_exception(py::handle type, py::handle value) {
  try {
    return py::str("inference raised {!r}")
        .format(value)
        .attr("encode")("utf-8", "backslashreplace")
        .cast<std::string>();
  } catch (const std::exception&) {
    return std::string("inference raised ") +
           reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name;
  }
}

// Iterates over batches. A class of Python's own, not pybind11's, because its end tells
// why a loop was left: an exception that leaves `for batch in batcher` takes the
// iterator off the stack while it is still set. Whoever waits for the batch is told
// then, though the traceback may keep the batch itself alive for long.
struct BatchIterator {
  PyObject_HEAD std::shared_ptr<DynamicBatcher>* batcher;
  std::weak_ptr<Batch>* last;

  static PyObject* next(PyObject* self) {
    auto* me = reinterpret_cast<BatchIterator*>(self);
    try {
      std::shared_ptr<Batch> batch;
      try {
        WithoutGil no_gil;
        batch = (*me->batcher)->next_batch(check_signals);
      } catch (const ClosedBatchingQueue&) {
        return nullptr;  // With no exception set: the end.
      }
      *me->last = batch;
      return py::cast(std::move(batch)).release().ptr();
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }

  static void dealloc(PyObject* self) {
    auto* me = reinterpret_cast<BatchIterator*>(self);
    if (PyErr_Occurred() != nullptr) {
      py::error_scope keep;
      if (auto batch = me->last->lock()) {
        const std::string reason = describe_exception(
            keep.type, keep.value != nullptr ? keep.value : keep.type);
        WithoutGil no_gil;
        batch->fail(reason);
      }
    }
    delete me->last;
    {
      WithoutGil no_gil;  // The last owner closes the batcher.
      delete me->batcher;
    }
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
  }

  static PyObject* type() {
    static PyType_Slot slots[] = {
        {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
        {Py_tp_iternext, reinterpret_cast<void*>(&BatchIterator::next)},
        {Py_tp_dealloc, reinterpret_cast<void*>(&BatchIterator::dealloc)},
        {0, nullptr},
    };
    static PyType_Spec spec = {"libbeast.BatchIterator", sizeof(BatchIterator), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               slots};
    static PyObject* the_type = PyType_FromSpec(&spec);
    return the_type;
  }

  static py::object make(std::shared_ptr<DynamicBatcher> batcher) {
    PyObject* type_object = type();
    if (type_object == nullptr) throw py::error_already_set();
    auto* type = reinterpret_cast<PyTypeObject*>(type_object);
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) throw py::error_already_set();
    auto* me = reinterpret_cast<BatchIterator*>(self);
    me->batcher = new std::shared_ptr<DynamicBatcher>(std::move(batcher));
    me->last = new std::weak_ptr<Batch>;
    return py::reinterpret_steal<py::object>(self);
  }
};

void raise_if_closed_before(bool closed_now, const char* what) {
  if (closed_now) return;
  throw std::runtime_error(std::string(what) + " was closed already");
}

void bind_queues(py::module_& m) {
  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>>(m, "BatchingQueue")
      .def(py::init([](int64_t batch_dim, int64_t minimum, int64_t maximum,
                       std::optional<double> timeout_ms, bool check_inputs,
                       std::optional<int64_t> maximum_queue_size, bool pin_memory) {
             return std::make_shared<BatchingQueue>(BatchingQueue::Options{
                 batch_sizes(batch_dim, minimum, maximum, timeout_ms), check_inputs,
                 maximum_queue_size, pinning(pin_memory)});
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_inputs") = true, py::arg("maximum_queue_size") = py::none(),
           py::arg("pin_memory") = false)
      .def(
          "enqueue",
          [](BatchingQueue& self, py::object item) {
            Nest nest = nest_from_python(item);
            WithoutGil no_gil;
            self.enqueue(std::move(nest), check_signals);
          },
          py::arg("item"))
      .def("size", &BatchingQueue::size, ReleaseGil())
      .def(
          "close",
          [](BatchingQueue& self, bool discard) {
            raise_if_closed_before(self.close(discard), "the batching queue");
          },
          py::arg("discard") = false, ReleaseGil())
      .def("is_closed", &BatchingQueue::is_closed, ReleaseGil())
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", [](BatchingQueue& self) {
        Nest batch;
        try {
          WithoutGil no_gil;
          batch = self.dequeue(check_signals);
        } catch (const ClosedBatchingQueue&) {
          throw py::stop_iteration();
        }
        return nest_to_python(batch);
      });

  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def("get_inputs",
           [](const Batch& self) { return nest_to_python(self.inputs()); })
      .def(
          "set_outputs",
          [](Batch& self, py::object outputs) {
            const Nest nest = nest_from_python(outputs);
            WithoutGil no_gil;
            self.set_outputs(nest);
          },
          py::arg("outputs"))
      .def("fail", py::overload_cast<const std::string&>(&Batch::fail),
           py::arg("reason"), ReleaseGil())
      .def("__len__", &Batch::num_rows)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](Batch& self, py::handle type, py::handle value, py::handle) {
        const std::string reason = type.is_none() ? "the batch was left without outputs"
                                                  : describe_exception(type, value);
        WithoutGil no_gil;
        self.fail(reason);
      });

  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>>(m, "DynamicBatcher")
      .def(py::init([](int64_t batch_dim, int64_t minimum, int64_t maximum,
                       std::optional<double> timeout_ms, bool check_outputs,
                       bool pin_memory) {
             return std::make_shared<DynamicBatcher>(DynamicBatcher::Options{
                 batch_sizes(batch_dim, minimum, maximum, timeout_ms), check_outputs,
                 pinning(pin_memory)});
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true, py::arg("pin_memory") = false)
      .def(
          "compute",
          [](DynamicBatcher& self, py::object inputs) {
            Nest nest = nest_from_python(inputs);
            Nest outputs;
            {
              WithoutGil no_gil;
              outputs = self.compute(std::move(nest), check_signals);
            }
            return nest_to_python(outputs);
          },
          py::arg("inputs"))
      .def("size", &DynamicBatcher::size, ReleaseGil())
      .def(
          "close",
          [](DynamicBatcher& self) {
            raise_if_closed_before(self.close(), "the dynamic batcher");
          },
          ReleaseGil())
      .def("is_closed", &DynamicBatcher::is_closed, ReleaseGil())
      .def("__iter__", &BatchIterator::make);
}

py::object space_to_python(const Structure& structure, const Space& space,
                           size_t& leaf) {
  if (structure.kind() == Structure::Kind::kLeaf) return py::cast(space.leaves[leaf++]);
  if (structure.kind() == Structure::Kind::kTuple) {
    py::list items;
    for (const auto& child : structure.children()) {
      items.append(space_to_python(*child, space, leaf));
    }
    return py::tuple(items);
  }
  py::dict dict;
  for (size_t i = 0; i < structure.keys().size(); ++i) {
    dict[py::str(structure.keys()[i])] =
        space_to_python(*structure.children()[i], space, leaf);
  }
  return dict;
}

py::object space_to_python(const Space& space) {
  size_t leaf = 0;
  return space_to_python(*space.structure, space, leaf);
}

py::object bound_to_python(const LeafSpace& leaf, const std::string& bytes) {
  if (bytes.empty()) return py::none();
  return py::array(dtype_to_numpy(leaf.dtype), leaf.shape.dims(), bytes.data());
}

void bind_spec(py::module_& m) {
  py::class_<LeafSpace>(m, "LeafSpace")
      .def_property_readonly(
          "dtype", [](const LeafSpace& s) { return std::string(name(s.dtype)); })
      .def_property_readonly(
          "shape",
          [](const LeafSpace& s) {
            const auto dims = s.shape.dims();
            return py::tuple(py::cast(std::vector<int64_t>(dims.begin(), dims.end())));
          })
      .def_readonly("num_values", &LeafSpace::num_values)
      .def_readonly("start", &LeafSpace::start)
      .def_property_readonly(
          "low", [](const LeafSpace& s) { return bound_to_python(s, s.low); })
      .def_property_readonly(
          "high", [](const LeafSpace& s) { return bound_to_python(s, s.high); });
  py::class_<EnvSpec>(m, "EnvSpec")
      .def_readonly("num_envs", &EnvSpec::num_envs)
      .def_readonly("description", &EnvSpec::description)
      .def_property_readonly(
          "observation",
          [](const EnvSpec& s) { return space_to_python(s.observation); })
      .def_property_readonly(
          "action", [](const EnvSpec& s) { return space_to_python(s.action); });
  m.def(
      "probe",
      [](const std::string& address, double timeout_s, const OptionalString& token,
         const OptionalString& tls_cert, const OptionalString& tls_key,
         const OptionalString& tls_ca, const OptionalString& tls_server_name,
         size_t max_message_bytes) {
        Security secured = security(token, tls_cert, tls_key, tls_ca);
        secured.server_name = tls_server_name.value_or("");
        WithoutGil no_gil;
        return probe(address, secured, seconds(timeout_s, "timeout_s"),
                     max_message_bytes, check_signals);
      },
      py::arg("server_address"), py::arg("timeout_s") = 60.0, py::kw_only(),
      py::arg("token") = py::none(), py::arg("tls_cert") = py::none(),
      py::arg("tls_key") = py::none(), py::arg("tls_ca") = py::none(),
      py::arg("tls_server_name") = py::none(),
      py::arg("max_message_bytes") = size_t{64} << 20);
}

std::mutex servers_mu;
std::vector<std::weak_ptr<EnvServer>> servers;  // Guarded by servers_mu.

void bind_server(py::module_& m) {
  py::class_<EnvServer, std::shared_ptr<EnvServer>>(m, "Server")
      .def(
          py::init([](py::object env_class, const std::string& server_address,
                      int64_t num_envs, uint64_t seed, int num_threads, int max_streams,
                      size_t max_message_bytes, const OptionalString& token,
                      const OptionalString& tls_cert, const OptionalString& tls_key,
                      const OptionalString& tls_ca, bool insecure) {
            if (!PyCallable_Check(env_class.ptr())) {
              throw py::type_error("env_class: expected something to call, got " +
                                   py::repr(env_class).cast<std::string>());
            }
            if (num_envs < 1 || num_envs > EnvSpec::kMaxEnvs) {
              throw std::invalid_argument("num_envs: expected 1 to " +
                                          std::to_string(EnvSpec::kMaxEnvs) + ", got " +
                                          std::to_string(num_envs));
            }
            EnvServer::Options options;
            options.address = server_address;
            options.make_environment = [kept = keep_alive(env_class), num_envs,
                                        seed](uint64_t stream) {
              return make_python_environment(static_cast<PyObject*>(kept.get()),
                                             num_envs, derive_seed(seed, stream));
            };
            options.num_threads = num_threads;
            options.max_streams = max_streams;
            options.max_message_bytes = max_message_bytes;
            options.security = security(token, tls_cert, tls_key, tls_ca);
            options.security.insecure = insecure;
            WithoutGil no_gil;
            // Stopping waits for threads that need the GIL.
            std::shared_ptr<EnvServer> server(new EnvServer(std::move(options)),
                                              [](EnvServer* server) {
                                                WithoutGil no_gil;
                                                delete server;
                                              });
            std::lock_guard lock(servers_mu);
            std::erase_if(servers, [](const auto& weak) { return weak.expired(); });
            servers.push_back(server);
            return server;
          }),
          py::arg("env_class"), py::arg("server_address"), py::kw_only(),
          py::arg("num_envs") = 1, py::arg("seed") = 0, py::arg("num_threads") = 1,
          py::arg("max_streams") = 1024,
          py::arg("max_message_bytes") = size_t{64} << 20,
          py::arg("token") = py::none(), py::arg("tls_cert") = py::none(),
          py::arg("tls_key") = py::none(), py::arg("tls_ca") = py::none(),
          py::arg("insecure") = false)
      .def("start", &EnvServer::start, ReleaseGil())
      .def(
          "run",
          [](EnvServer& self) {
            self.start();
            try {
              self.wait(check_signals);
            } catch (...) {
              self.stop();
              throw;
            }
          },
          ReleaseGil())
      .def(
          "stop",
          [](EnvServer& self, double grace_s) {
            self.stop(seconds(grace_s, "grace_s"));
          },
          py::arg("grace_s") = 5.0, ReleaseGil())
      .def("address", &EnvServer::address, ReleaseGil())
      .def("num_streams", &EnvServer::num_streams, ReleaseGil());
}

py::dict stats_to_python(const ActorPool::Stats& stats) {
  py::dict dict;
  dict["steps"] = stats.num_steps;
  dict["rollouts"] = stats.num_rollouts;
  dict["restarts"] = stats.num_restarts;
  dict["environment_s"] = stats.environment_seconds;
  dict["streams"] = stats.num_streams;
  dict["connecting"] = stats.connecting;
  dict["in_environment"] = stats.in_environment;
  dict["in_inference"] = stats.in_inference;
  dict["in_learner_queue"] = stats.in_learner_queue;
  dict["retired"] = stats.retired;
  dict["last_errors"] = stats.last_errors;
  return dict;
}

void bind_pool(py::module_& m) {
  py::class_<ActorPool, std::shared_ptr<ActorPool>>(m, "ActorPool")
      .def(py::init([](int64_t unroll_length, std::shared_ptr<BatchingQueue> queue,
                       std::shared_ptr<DynamicBatcher> batcher,
                       std::vector<std::string> addresses, py::object initial_state,
                       const std::string& run_id, const OptionalString& token,
                       const OptionalString& tls_cert, const OptionalString& tls_key,
                       const OptionalString& tls_ca,
                       const OptionalString& tls_server_name, size_t max_message_bytes,
                       double connect_timeout_s, double step_timeout_s,
                       int max_failures, int num_threads, bool channels_last,
                       std::optional<EnvSpec> spec) {
             ActorPool::Options options;
             options.unroll_length = unroll_length;
             options.learner_queue = std::move(queue);
             options.inference_batcher = std::move(batcher);
             options.addresses = std::move(addresses);
             options.initial_agent_state = nest_from_python(initial_state);
             options.run_id = run_id;
             options.security = security(token, tls_cert, tls_key, tls_ca);
             options.security.server_name = tls_server_name.value_or("");
             options.max_message_bytes = max_message_bytes;
             options.connect_timeout = seconds(connect_timeout_s, "connect_timeout_s");
             options.step_timeout = seconds(step_timeout_s, "step_timeout_s");
             options.max_failures = max_failures;
             options.num_threads = num_threads;
             options.channels_last = channels_last;
             options.spec = std::move(spec);
             WithoutGil no_gil;
             return std::make_shared<ActorPool>(std::move(options));
           }),
           py::arg("unroll_length"), py::arg("learner_queue"),
           py::arg("inference_batcher"), py::arg("env_server_addresses"),
           py::arg("initial_agent_state") = py::tuple(), py::kw_only(),
           py::arg("run_id") = "", py::arg("token") = py::none(),
           py::arg("tls_cert") = py::none(), py::arg("tls_key") = py::none(),
           py::arg("tls_ca") = py::none(), py::arg("tls_server_name") = py::none(),
           py::arg("max_message_bytes") = size_t{64} << 20,
           py::arg("connect_timeout_s") = 60.0, py::arg("step_timeout_s") = 300.0,
           py::arg("max_failures") = 3, py::arg("num_threads") = 0,
           py::arg("channels_last") = false, py::arg("spec") = py::none())
      .def(
          "run", [](ActorPool& self) { self.run(check_signals); }, ReleaseGil())
      .def("stop", &ActorPool::stop, ReleaseGil())
      .def("add_address", &ActorPool::add_address, py::arg("server_address"),
           ReleaseGil())
      .def("count", &ActorPool::count, ReleaseGil())
      .def("stats", [](const ActorPool& self) {
        ActorPool::Stats stats;
        {
          WithoutGil no_gil;
          stats = self.stats();
        }
        return stats_to_python(stats);
      });
}

// Before Python ends: no server calls it any more, no thread of ours wants the GIL.
void end_with_interpreter() {
  std::vector<std::shared_ptr<EnvServer>> alive;  // Let go with the GIL, as ever.
  {
    std::lock_guard lock(servers_mu);
    for (const auto& weak : servers) {
      if (auto server = weak.lock()) alive.push_back(std::move(server));
    }
  }
  for (const auto& server : alive) {
    WithoutGil no_gil;
    try {
      server->stop(std::chrono::seconds(1));
    } catch (const TimeoutError& error) {
      log(LogLevel::kWarning, error.what());
    }
  }
  alive.clear();
  set_log_sink(nullptr);
  ending_thread = PyThread_get_thread_ident();
  // For a moment, for those who are about to get it: the flag comes too late for them.
  PyThreadState* state = PyEval_SaveThread();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  PyEval_RestoreThread(state);
}

void log_to_python(LogLevel level, const std::string& message) {
  WithGil gil;
  try {
    py::module_::import("logging")
        .attr("getLogger")("chimera.libbeast")
        .attr(level == LogLevel::kError     ? "error"
              : level == LogLevel::kWarning ? "warning"
                                            : "info")("%s", message);
  } catch (const py::error_already_set&) {  // A log line is never worth a crash.
  }
}

}  // namespace
}  // namespace beast

PYBIND11_MODULE(libbeast, m) {
  using namespace beast;
  m.doc() = "Chimera's C++ core: batching, actors and environment servers over gRPC.";
  py::register_exception<ClosedBatchingQueue>(m, "ClosedBatchingQueue",
                                              PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const ConnectionError& error) {
      PyErr_SetString(PyExc_ConnectionError, error.what());
    } catch (const TimeoutError& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
    }
  });
  bind_queues(m);
  bind_spec(m);
  bind_server(m);
  bind_pool(m);
  set_log_sink(log_to_python);
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&end_with_interpreter));
}
