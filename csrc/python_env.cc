// SPDX-License-Identifier: Apache-2.0
#include "python_env.h"

#include <pybind11/numpy.h>

#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <vector>

#include "log.h"
#include "python_gil.h"
#include "python_nest.h"

namespace py = pybind11;

namespace beast {
namespace {

// A thread that often takes the GIL keeps its Python thread state in between: making
// one for each step would cost more than the step.
class ThreadState {
 public:
  static void keep() {
    static thread_local ThreadState state;
    static_cast<void>(state);
  }
  ~ThreadState() {
    if (interpreter_ends() || !Py_IsInitialized()) return;
    PyEval_RestoreThread(saved_);
    PyGILState_Release(gil_);
  }

 private:
  ThreadState() : gil_(PyGILState_Ensure()), saved_(PyEval_SaveThread()) {}
  PyGILState_STATE gil_;
  PyThreadState* saved_;
};

// Runs fn with the GIL; what Python raises becomes std::runtime_error with its
// traceback.
template <class Fn>
auto with_gil(Fn fn) {
  ThreadState::keep();
  WithGil gil;
  try {
    return fn();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(format_error(error));
  }
}

void add_leaf(py::handle space, const std::string& where, Space& out) {
  const std::string text = py::str(space).cast<std::string>();
  py::object dtype = py::getattr(space, "dtype", py::none());
  py::object shape = py::getattr(space, "shape", py::none());
  std::optional<DType> known;
  if (!dtype.is_none() && !shape.is_none()) {
    known = dtype_from_numpy(py::dtype::from_args(dtype));
  }
  if (!known) {
    throw std::invalid_argument(
        where + " is the space " + text +
        "; served are Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of "
        "them. Wrap the environment, e.g. with "
        "gymnasium.wrappers.TransformObservation");
  }
  LeafSpace leaf;
  leaf.dtype = *known;
  std::vector<int64_t> dims;
  for (py::handle dim : shape) dims.push_back(dim.cast<int64_t>());
  if (dims.size() > Space::kMaxRank) {
    throw std::invalid_argument(where + " has " + std::to_string(dims.size()) +
                                " dimensions; at most " +
                                std::to_string(Space::kMaxRank) + " are served");
  }
  leaf.shape = Shape(dims);
  if (py::hasattr(space, "n") && py::hasattr(space, "start") && dims.empty()) {
    leaf.dtype = DType::kInt64;
    leaf.num_values = space.attr("n").cast<int64_t>();
    leaf.start = space.attr("start").cast<int64_t>();
  } else if (py::hasattr(space, "low") && py::hasattr(space, "high")) {
    auto bytes = [&](const char* name) {
      return space.attr(name)
          .attr("astype")(dtype_to_numpy(leaf.dtype))
          .attr("tobytes")()
          .cast<std::string>();
    };
    // Bounds of images are no news, and the handshake would carry a frame of them.
    if (leaf.dtype != DType::kUInt8) {
      leaf.low = bytes("low");
      leaf.high = bytes("high");
    }
  }
  if (out.leaves.size() == Space::kMaxLeaves) {
    throw std::invalid_argument("the space has more than " +
                                std::to_string(Space::kMaxLeaves) + " arrays");
  }
  out.leaves.push_back(std::move(leaf));
}

// What a Dict calls its parts in Python, in the order of its Structure, whose keys are
// these as strings: a key may be a number. Destroyed with the GIL held.
struct Keys {
  std::vector<py::object> keys;  // Empty in a Tuple.
  std::vector<Keys> children;
};

// Whether type or a base of it has that name; gymnasium need not be installed here.
bool has_base(py::handle type, const std::string& name) {
  for (py::handle base : type.attr("__mro__")) {
    if (base.attr("__module__").cast<std::string>() + "." +
            base.attr("__name__").cast<std::string>() ==
        name) {
      return true;
    }
  }
  return false;
}

// A sample of gymnasium's OneOf is (index, sample of that space), no tuple of them all.
bool is_one_of(py::handle space) {
  return has_base(py::type::of(space), "gymnasium.spaces.oneof.OneOf");
}

Structure::Ptr add_space(py::handle space, const std::string& where, int depth,
                         Space& out, Keys& keys) {
  if (depth > Structure::kMaxDepth) throw std::invalid_argument(where + " is too deep");
  py::object spaces = py::getattr(space, "spaces", py::none());
  if (spaces.is_none() || is_one_of(space)) {
    add_leaf(space, where, out);
    return Structure::leaf();
  }
  if (PyTuple_Check(spaces.ptr()) || PyList_Check(spaces.ptr())) {
    std::vector<Structure::Ptr> children;
    for (py::handle child : spaces) {
      const std::string index = "[" + std::to_string(children.size()) + "]";
      children.push_back(add_space(child, where + index, depth + 1, out,
                                   keys.children.emplace_back()));
    }
    return Structure::tuple(std::move(children));
  }
  std::map<std::string, py::object> by_name;
  for (py::handle key : spaces) {
    const auto name = py::str(key).cast<std::string>();
    if (!by_name.emplace(name, py::reinterpret_borrow<py::object>(key)).second) {
      throw std::invalid_argument(where + " has two keys that read \"" + name +
                                  "\"; rename one of them");
    }
  }
  std::vector<std::pair<std::string, Structure::Ptr>> children;
  for (const auto& [name, key] : by_name) {
    keys.keys.push_back(key);
    children.emplace_back(name, add_space(spaces[key], where + "." + name, depth + 1,
                                          out, keys.children.emplace_back()));
  }
  return Structure::dict(std::move(children));
}

struct PythonSpace {
  Space space;
  Keys keys;
};

PythonSpace make_space(py::handle space, const std::string& where) {
  PythonSpace out;
  out.space.structure = add_space(space, where, 0, out.space, out.keys);
  if (out.space.leaves.empty()) throw std::invalid_argument(where + " is empty");
  return out;
}

// Puts observations into messages, leaf by leaf.
class ObservationWriter {
 public:
  explicit ObservationWriter(PythonSpace from)
      : space_(std::move(from.space)), keys_(std::move(from.keys)) {
    const Space& space = space_;
    for (size_t i = 0; i < space.leaves.size(); ++i) {
      dtypes_.push_back(dtype_to_numpy(space.leaves[i].dtype));
      const std::string path = space.structure->path(i);
      names_.push_back(space.leaves.size() == 1 ? "the observation"
                                                : "observation " + path);
    }
  }

  const Space& space() const { return space_; }

  // Row k of observation, a nest like the space: of one environment.
  void write_one(py::handle observation, int64_t k, const EnvOutput& output) const {
    size_t leaf = 0;
    walk(*space_.structure, keys_, observation, leaf, [&](size_t i, py::handle value) {
      const LeafSpace& space = space_.leaves[i];
      put(i, value, space.shape, output.observation[i] + k * space.num_bytes());
    });
  }

  // All rows, from a nest of arrays [K, ...].
  void write_all(py::handle observation, int64_t num_envs,
                 const EnvOutput& output) const {
    size_t leaf = 0;
    walk(*space_.structure, keys_, observation, leaf, [&](size_t i, py::handle value) {
      Shape shape = space_.leaves[i].shape;
      shape.insert(0, num_envs);
      put(i, value, shape, output.observation[i]);
    });
  }

  // Row k from a nest of arrays [K, ...], or of K objects as final_obs may be.
  void write_row(py::handle observations, int64_t k, const EnvOutput& output) const {
    const bool is_nest =
        PyDict_Check(observations.ptr()) || PyTuple_Check(observations.ptr());
    if (!is_nest) return write_one(observations[py::int_(k)], k, output);
    size_t leaf = 0;
    walk(*space_.structure, keys_, observations, leaf, [&](size_t i, py::handle value) {
      const LeafSpace& space = space_.leaves[i];
      put(i, py::object(value[py::int_(k)]), space.shape,
          output.observation[i] + k * space.num_bytes());
    });
  }

 private:
  template <class Fn>
  void walk(const Structure& structure, const Keys& keys, py::handle value,
            size_t& leaf, Fn fn) const {
    switch (structure.kind()) {
      case Structure::Kind::kLeaf:
        fn(leaf, value);
        ++leaf;
        return;
      case Structure::Kind::kTuple:
        for (size_t i = 0; i < structure.children().size(); ++i) {
          walk(*structure.children()[i], keys.children[i],
               part(value, py::int_(i), leaf), leaf, fn);
        }
        return;
      case Structure::Kind::kDict:
        for (size_t i = 0; i < structure.keys().size(); ++i) {
          walk(*structure.children()[i], keys.children[i],
               part(value, keys.keys[i], leaf), leaf, fn);
        }
        return;
    }
  }

  // value[key], where the leaf is found.
  py::object part(py::handle value, const py::object& key, size_t leaf) const {
    PyObject* found = PyObject_GetItem(value.ptr(), key.ptr());
    if (found != nullptr) return py::reinterpret_steal<py::object>(found);
    const py::error_already_set error;
    throw std::invalid_argument(names_[leaf] + " is missing: no " +
                                py::repr(key).cast<std::string>() + " in " +
                                shortened(py::repr(value).cast<std::string>()));
  }

  static std::string shortened(std::string text) {
    constexpr size_t kMost = 300;
    return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
  }

  void put(size_t leaf, py::handle value, const Shape& shape, std::byte* target) const {
    const LeafSpace& space = space_.leaves[leaf];
    py::array array = py::reinterpret_borrow<py::array>(
        py::isinstance<py::array>(value) ? value : py::handle());
    // Python floats, lists, lazy frames, float64 for float32: made what was announced.
    const bool as_it_should = array && array.dtype().is(dtypes_[leaf]) &&
                              (array.flags() & py::array::c_style) != 0;
    if (!as_it_should) {
      array = py::array::ensure(value, py::array::c_style);
      if (!array) throw py::error_already_set();
      if (!array.dtype().equal(dtypes_[leaf]))
        array = array.attr("astype")(dtypes_[leaf]);
      if ((array.flags() & py::array::c_style) == 0) {
        array = py::module_::import("numpy").attr("ascontiguousarray")(array);
      }
    }
    const auto ndim = static_cast<size_t>(array.ndim());
    bool same = ndim == shape.rank();
    for (size_t i = 0; same && i < ndim; ++i) same = array.shape(i) == shape[i];
    if (!same) {
      throw std::invalid_argument(
          names_[leaf] + ": expected shape " + shape.str() +
          " by the environment's space, got " +
          py::str(py::tuple(array.attr("shape"))).cast<std::string>());
    }
    std::memcpy(target, array.data(), shape.num_elements() * itemsize(space.dtype));
  }

  const Space space_;
  const Keys keys_;
  std::vector<py::dtype> dtypes_;
  std::vector<std::string> names_;
};

// Makes actions for Python from the bytes of [K, *shape].
class ActionReader {
 public:
  explicit ActionReader(PythonSpace from)
      : space_(std::move(from.space)), keys_(std::move(from.keys)) {}

  const Space& space() const { return space_; }

  py::object one(const std::vector<const std::byte*>& actions, int64_t k) const {
    return build(*space_.structure, [&](size_t leaf) -> py::object {
      const LeafSpace& space = space_.leaves[leaf];
      const std::byte* data = actions[leaf] + k * space.num_bytes();
      if (space.num_values > 0) {
        int64_t value;
        std::memcpy(&value, data, sizeof(value));
        return py::int_(value);
      }
      return array(space.dtype, space.shape, data);
    });
  }

  py::object all(const std::vector<const std::byte*>& actions, int64_t num_envs) const {
    return build(*space_.structure, [&](size_t leaf) -> py::object {
      Shape shape = space_.leaves[leaf].shape;
      shape.insert(0, num_envs);
      return array(space_.leaves[leaf].dtype, shape, actions[leaf]);
    });
  }

 private:
  static py::array array(DType dtype, const Shape& shape, const std::byte* data) {
    return py::array(dtype_to_numpy(dtype), shape.dims(), data);  // A copy.
  }

  template <class Fn>
  py::object build(const Structure& structure, Fn make_leaf) const {
    size_t leaf = 0;
    return build(structure, keys_, leaf, make_leaf);
  }

  template <class Fn>
  py::object build(const Structure& structure, const Keys& keys, size_t& leaf,
                   Fn make_leaf) const {
    if (structure.kind() == Structure::Kind::kLeaf) return make_leaf(leaf++);
    if (structure.kind() == Structure::Kind::kTuple) {
      py::tuple tuple(structure.children().size());
      for (size_t i = 0; i < structure.children().size(); ++i) {
        tuple[i] = build(*structure.children()[i], keys.children[i], leaf, make_leaf);
      }
      return tuple;
    }
    py::dict dict;
    for (size_t i = 0; i < structure.keys().size(); ++i) {
      dict[keys.keys[i]] =
          build(*structure.children()[i], keys.children[i], leaf, make_leaf);
    }
    return dict;
  }

  const Space space_;
  const Keys keys_;
};

py::tuple check_tuple(py::object result, size_t size, const char* method) {
  if (PyTuple_Check(result.ptr()) &&
      PyTuple_GET_SIZE(result.ptr()) == Py_ssize_t(size)) {
    return py::reinterpret_steal<py::tuple>(result.release());
  }
  throw std::invalid_argument(
      std::string(method) + "() of the environment: expected a tuple of " +
      std::to_string(size) +
      " as in gymnasium, got something else; make environments of the old gym by "
      "gymnasium.make(\"GymV26Environment-v0\", env=...) of shimmy");
}

// Whether the game ended with the episode. The name is ours alone, as environments have
// keys of their own; atari_wrappers.GAME_OVER is the same. A vector environment's mask
// tells who said it: gymnasium fills in False for the others.
constexpr char kGameOver[] = "chimera/game_over";
constexpr char kGameOverMask[] = "_chimera/game_over";

// The value of a key in an info dict, or null.
py::handle info_get(py::handle info, const char* key) {
  return PyDict_Check(info.ptr()) ? PyDict_GetItemString(info.ptr(), key) : nullptr;
}

// Its id where it was made by one: a whole spec is a long line.
std::string describe(py::handle env) {
  const py::object spec = py::getattr(env, "spec", py::none());
  const py::object id = py::getattr(spec, "id", spec);
  return py::str(id.is_none() ? py::reinterpret_borrow<py::object>(env) : id);
}

void close_quietly(py::handle env) {
  try {
    if (py::hasattr(env, "close")) env.attr("close")();
  } catch (py::error_already_set& error) {
    log(LogLevel::kWarning, "close() of an environment raised: " + format_error(error));
  }
}

// K environments of one each.
class PlainEnvironments : public Environment {
 public:
  PlainEnvironments(py::object first, py::handle env_class, int64_t num_envs,
                    uint64_t seed) {
    envs_.push_back(std::move(first));
    for (int64_t k = 1; k < num_envs; ++k) envs_.push_back(env_class());
    for (int64_t k = 0; k < num_envs; ++k) {
      steps_.push_back(envs_[k].attr("step"));
      seeds_.push_back(derive_seed(seed, 0, k));
    }
    ended_.resize(num_envs);
    spec_.num_envs = num_envs;
    observations_.emplace(
        make_space(envs_[0].attr("observation_space"), "observation"));
    actions_.emplace(make_space(envs_[0].attr("action_space"), "action"));
    spec_.observation = observations_->space();
    spec_.action = actions_->space();
    spec_.description = describe(envs_[0]);
  }

  ~PlainEnvironments() override {
    WithGil gil;
    for (const py::object& env : envs_) close_quietly(env);
    envs_.clear();
    steps_.clear();
    observations_.reset();
    actions_.reset();
  }

  const EnvSpec& spec() const override { return spec_; }

  void reset(EnvOutput& output) override {
    with_gil([&] {
      for (size_t k = 0; k < envs_.size(); ++k) {
        reset_one(k, output, py::dict(py::arg("seed") = seeds_[k]));
      }
    });
  }

  void step(const std::vector<const std::byte*>& actions, EnvOutput& output) override {
    with_gil([&] {
      for (size_t k = 0; k < envs_.size(); ++k) {
        if (ended_[k]) {
          reset_one(k, output, py::dict());
        } else {
          step_one(k, actions, output);
        }
      }
    });
  }

 private:
  void reset_one(size_t k, EnvOutput& output, const py::dict& arguments) {
    const py::tuple result =
        check_tuple(envs_[k].attr("reset")(**arguments), 2, "reset");
    observations_->write_one(PyTuple_GET_ITEM(result.ptr(), 0), k, output);
    output.reward[k] = 0;
    output.terminated[k] = output.truncated[k] = 0;
    ended_[k] = false;
  }

  void step_one(size_t k, const std::vector<const std::byte*>& actions,
                EnvOutput& output) {
    const py::object action = actions_->one(actions, k);
    const py::tuple result = check_tuple(
        py::reinterpret_steal<py::object>(call(steps_[k], action)), 5, "step");
    auto item = [&](int i) { return PyTuple_GET_ITEM(result.ptr(), i); };
    observations_->write_one(item(0), k, output);
    const double reward = PyFloat_AsDouble(item(1));
    if (reward == -1 && PyErr_Occurred()) {
      const py::error_already_set error;
      throw std::invalid_argument("step() of the environment gave the reward " +
                                  py::repr(item(1)).cast<std::string>() +
                                  ": expected a number");
    }
    output.reward[k] = static_cast<float>(reward);
    output.terminated[k] = is_true(item(2));
    output.truncated[k] = is_true(item(3));
    ended_[k] = output.terminated[k] || output.truncated[k];
    if (!ended_[k]) return;
    const py::handle game_over = info_get(item(4), kGameOver);
    output.game_over[k] = !game_over || is_true(game_over);
  }

  static PyObject* call(const py::object& function, const py::object& argument) {
    PyObject* result = PyObject_CallOneArg(function.ptr(), argument.ptr());
    if (result == nullptr) throw py::error_already_set();
    return result;
  }

  static bool is_true(py::handle value) {
    const int truth = PyObject_IsTrue(value.ptr());
    if (truth < 0) throw py::error_already_set();
    return truth == 1;
  }

  EnvSpec spec_;
  std::vector<py::object> envs_, steps_;
  std::vector<uint32_t> seeds_;
  std::vector<uint8_t> ended_;
  std::optional<ObservationWriter> observations_;
  std::optional<ActionReader> actions_;
};

// One VectorEnv.
class VectorEnvironment : public Environment {
 public:
  VectorEnvironment(py::object env, uint64_t seed)
      : env_(std::move(env)), seed_(derive_seed(seed, 0)) {
    spec_.num_envs = env_.attr("num_envs").cast<int64_t>();
    if (spec_.num_envs < 1 || spec_.num_envs > EnvSpec::kMaxEnvs) {
      throw std::invalid_argument("the vector environment has num_envs=" +
                                  std::to_string(spec_.num_envs));
    }
    mode_ = read_mode();
    observations_.emplace(
        make_space(env_.attr("single_observation_space"), "observation"));
    actions_.emplace(make_space(env_.attr("single_action_space"), "action"));
    spec_.observation = observations_->space();
    spec_.action = actions_->space();
    spec_.description = describe(env_);
    ended_.resize(spec_.num_envs);
  }

  ~VectorEnvironment() override {
    WithGil gil;
    close_quietly(env_);
    env_ = {};
    observations_.reset();
    actions_.reset();
  }

  const EnvSpec& spec() const override { return spec_; }

  void reset(EnvOutput& output) override {
    with_gil([&] {
      const py::tuple result =
          check_tuple(env_.attr("reset")(py::arg("seed") = seed_), 2, "reset");
      observations_->write_all(result[0], spec_.num_envs, output);
      std::fill(output.terminated.begin(), output.terminated.end(), 0);
      std::fill(output.truncated.begin(), output.truncated.end(), 0);
    });
  }

  void step(const std::vector<const std::byte*>& actions, EnvOutput& output) override {
    with_gil([&] {
      const std::vector<uint8_t> was_ended = ended_;
      if (mode_ == Mode::kDisabled) reset_where(was_ended);
      const py::tuple result = check_tuple(
          env_.attr("step")(actions_->all(actions, spec_.num_envs)), 5, "step");
      observations_->write_all(result[0], spec_.num_envs, output);
      read(result[1], output.reward, "reward");
      read(result[2], output.terminated, "terminated");
      read(result[3], output.truncated, "truncated");
      read_game_over(result[4], output);
      for (int64_t k = 0; k < spec_.num_envs; ++k) {
        ended_[k] = output.terminated[k] || output.truncated[k];
      }
      if (mode_ == Mode::kNextStep) return;
      if (mode_ == Mode::kSameStep)
        show_last_observations(was_ended, result[4], output);
      hide_first_steps(was_ended, output);
    });
  }

 private:
  enum class Mode { kNextStep, kSameStep, kDisabled };

  Mode read_mode() const {
    py::object metadata = py::getattr(env_, "metadata", py::dict());
    py::object mode = metadata.attr("get")("autoreset_mode");
    py::object value = py::getattr(mode, "value", mode);
    const std::string name = py::str(value).cast<std::string>();
    if (name == "NextStep") return Mode::kNextStep;
    if (name != "SameStep" && name != "Disabled") {
      throw std::invalid_argument(
          "the vector environment has metadata[\"autoreset_mode\"]=" + name +
          "; known are NextStep (best), SameStep and Disabled of "
          "gymnasium.vector.AutoresetMode");
    }
    log(LogLevel::kWarning,
        "a vector environment with autoreset_mode=" + name +
            " takes the first step of each later episode unseen; prefer NextStep");
    return name == "SameStep" ? Mode::kSameStep : Mode::kDisabled;
  }

  template <class T>
  void read(py::handle values, std::vector<T>& out, const char* what) const {
    const auto array =
        py::array_t<T, py::array::c_style | py::array::forcecast>::ensure(values);
    if (!array) throw py::error_already_set();
    if (array.ndim() != 1 || array.shape(0) != spec_.num_envs) {
      throw std::invalid_argument(
          std::string(what) + ": expected shape (" + std::to_string(spec_.num_envs) +
          ",), got " +
          py::str(py::tuple(array.attr("shape"))).template cast<std::string>());
    }
    std::copy_n(array.data(), out.size(), out.begin());
  }

  void read_game_over(py::handle info, EnvOutput& output) const {
    std::fill(output.game_over.begin(), output.game_over.end(), 1);
    const py::handle game_over = info_get(info, kGameOver);
    if (!game_over) return;
    std::vector<uint8_t> said(spec_.num_envs), known(spec_.num_envs, 1);
    read(game_over, said, kGameOver);
    if (const py::handle mask = info_get(info, kGameOverMask)) {
      read(mask, known, kGameOverMask);
    }
    for (int64_t k = 0; k < spec_.num_envs; ++k) {
      output.game_over[k] = said[k] || !known[k];
    }
  }

  py::object reset_where(const std::vector<uint8_t>& mask) {
    if (std::find(mask.begin(), mask.end(), 1) == mask.end()) return {};
    py::array_t<bool> array(spec_.num_envs);
    std::copy(mask.begin(), mask.end(), array.mutable_data());
    py::dict options;
    options["reset_mask"] = array;
    return check_tuple(env_.attr("reset")(py::arg("options") = options), 2, "reset")[0];
  }

  // SameStep gives the first observation of the next episode, and the last one aside.
  void show_last_observations(const std::vector<uint8_t>& was_ended, py::handle info,
                              EnvOutput& output) {
    for (int64_t k = 0; k < spec_.num_envs; ++k) {
      if (!ended_[k] || was_ended[k]) continue;
      const py::handle last = info_get(info, "final_obs");
      if (!last) {
        throw std::invalid_argument(
            "a vector environment with autoreset_mode=SameStep ended an episode and "
            "gave "
            "no info[\"final_obs\"]");
      }
      observations_->write_row(last, k, output);
    }
  }

  // The step after an end was made unseen: its result begins the episode.
  void hide_first_steps(const std::vector<uint8_t>& was_ended, EnvOutput& output) {
    std::vector<uint8_t> ended_unseen(spec_.num_envs);
    for (int64_t k = 0; k < spec_.num_envs; ++k) {
      output.carried_return[k] = 0;
      output.carried_steps[k] = 0;
      if (!was_ended[k]) continue;
      if (ended_[k]) {
        ended_unseen[k] = 1;  // An episode of one step: nothing of it is seen.
      } else {
        output.carried_return[k] = output.reward[k];
        output.carried_steps[k] = 1;
      }
      output.terminated[k] = output.truncated[k] = 0;
      ended_[k] = 0;
    }
    if (mode_ != Mode::kDisabled) return;
    if (const py::object observations = reset_where(ended_unseen)) {
      for (int64_t k = 0; k < spec_.num_envs; ++k) {
        if (ended_unseen[k]) observations_->write_row(observations, k, output);
      }
    }
  }

  EnvSpec spec_;
  py::object env_;
  uint32_t seed_;
  Mode mode_;
  std::vector<uint8_t> ended_;  // In the row that was sent last.
  std::optional<ObservationWriter> observations_;
  std::optional<ActionReader> actions_;
};

}  // namespace

std::string format_error(const py::error_already_set& error) {
  try {
    // What C code raised has no traceback.
    const py::object trace = error.trace() ? error.trace() : py::none();
    const py::object lines =
        py::module_::import("traceback")
            .attr("format_exception")(error.type(), error.value(), trace);
    // As bytes: a text with half a character in it (odd file names) is no UTF-8.
    return py::str("")
        .attr("join")(lines)
        .attr("encode")("utf-8", "backslashreplace")
        .cast<std::string>();
  } catch (const py::error_already_set&) {
    return error.what();
  }
}

uint32_t derive_seed(uint64_t seed, uint64_t stream, uint64_t k) {
  // Three rounds of a 64-bit mixer: neighbours in any argument share nothing.
  uint64_t state = seed;
  for (uint64_t part : {stream, k, uint64_t{0x5eed}}) {
    state += part + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
  return static_cast<uint32_t>(state >> 33);
}

// env_class(). What gymnasium itself says (no such id, a deprecated one) is for the
// user and needs no traceback.
static py::object make(py::handle env_class) {
  try {
    return env_class();
  } catch (const py::error_already_set& error) {
    if (!has_base(error.type(), "gymnasium.error.Error")) throw;
    throw std::invalid_argument(py::str(error.value()).cast<std::string>());
  }
}

std::unique_ptr<Environment> make_python_environment(py::handle env_class,
                                                     int64_t num_envs, uint64_t seed) {
  return with_gil([&]() -> std::unique_ptr<Environment> {
    py::object env = make(env_class);
    if (py::hasattr(env, "single_observation_space")) {
      const auto in_vector = env.attr("num_envs").cast<int64_t>();
      if (num_envs != 1 && num_envs != in_vector) {
        throw std::invalid_argument("num_envs=" + std::to_string(num_envs) +
                                    " contradicts the vector environment, which has " +
                                    std::to_string(in_vector));
      }
      return std::make_unique<VectorEnvironment>(std::move(env), seed);
    }
    return std::make_unique<PlainEnvironments>(std::move(env), env_class, num_envs,
                                               seed);
  });
}

}  // namespace beast
