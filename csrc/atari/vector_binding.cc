// SPDX-License-Identifier: Apache-2.0
// libatari.Vector, and the preprocessing by itself for tests.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "atari/vector.h"

namespace py = pybind11;

namespace beast::atari {
namespace {

ResizeSimd simd_named(const std::string& name) {
  const ResizeSimd best = best_resize_simd();
  const std::vector<std::pair<std::string, ResizeSimd>> names = {
      {"plain", ResizeSimd::kPlain},
      {"avx2", ResizeSimd::kAvx2},
      {"avx512", ResizeSimd::kAvx512}};
  for (const auto& [known, simd] : names) {
    if (name == known && simd <= best) return simd;
  }
  if (name == "auto") return best;
  throw std::invalid_argument("simd: this machine has no \"" + name + "\"");
}

// The data of an array that is written in place, or ValueError.
template <class T>
T* data_of(const py::object& object, const char* name, size_t size) {
  if (!py::isinstance<py::array_t<T>>(object)) {
    throw std::invalid_argument(std::string(name) + ": expected an array of " +
                                std::string(py::str(py::dtype::of<T>())) + ", got " +
                                std::string(py::str(py::type::of(object))));
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (!(array.flags() & py::array::c_style) || !array.writeable() ||
      static_cast<size_t>(array.size()) != size) {
    throw std::invalid_argument(std::string(name) +
                                ": expected a writable C-contiguous array of " +
                                std::to_string(size) + " elements");
  }
  return static_cast<T*>(array.mutable_data());
}

using ActionNumbers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

class PyVector {
 public:
  PyVector(const std::vector<std::pair<std::string, py::bytes>>& games,
           std::vector<int> game_of, const VectorOptions& options) {
    std::vector<Vector::NamedGame> loaded;
    for (const auto& [name, rom] : games) {
      const std::string_view bytes = rom;
      loaded.push_back({name, load_game({reinterpret_cast<const uint8_t*>(bytes.data()),
                                         bytes.size()},
                                        name)});
    }
    vector_ = std::make_unique<Vector>(std::move(loaded), std::move(game_of), options);
  }

  void reset(const std::vector<bool>& mask,
             const std::vector<std::optional<uint32_t>>& seeds, const py::tuple& out) {
    const auto count = static_cast<size_t>(vector_->num_envs());
    if (mask.size() != count || seeds.size() != count) {
      throw std::invalid_argument("reset: expected a mask and a seed per environment");
    }
    const VectorOutputs outputs = outputs_of(out);
    const py::gil_scoped_release release;
    vector_->reset(mask, seeds, outputs);
  }
  void step(const ActionNumbers& actions, const py::tuple& out) {
    const int64_t* data = actions_of(actions);
    const VectorOutputs outputs = outputs_of(out);
    const py::gil_scoped_release release;
    vector_->step(data, outputs);
  }
  void send(const ActionNumbers& actions, const py::tuple& out) {
    vector_->send(actions_of(actions), outputs_of(out));
    sent_ = out;  // Keeps the arrays alive until they are written.
  }
  py::tuple recv() {
    {
      const py::gil_scoped_release release;
      vector_->receive();
    }
    return std::exchange(sent_, py::tuple());
  }
  void observe(const py::tuple& out) { vector_->observe(outputs_of(out)); }

  py::array_t<uint8_t> render(int i) {
    vector_->actions_of(i);  // Throws where there is no environment i.
    py::array_t<uint8_t> rgb({vector_->picture_height(i), kWidth, 3});
    vector_->render(i, rgb.mutable_data());
    return rgb;
  }
  py::array_t<uint8_t> ram(int i) {
    return py::array_t<uint8_t>(128, vector_->ram_of(i));
  }
  void use_translation(const std::string& name, const std::string& path) {
    vector_->use_translation(name, path);
  }
  py::bytes get_state(int i) { return vector_->get_state(i); }
  void set_state(int i, const py::bytes& state) {
    vector_->set_state(i, std::string_view(state));
  }
  Vector& vector() const { return *vector_; }

 private:
  const int64_t* actions_of(const ActionNumbers& actions) const {
    if (actions.ndim() != 1 || actions.size() != vector_->num_envs()) {
      throw std::invalid_argument("actions: expected [" +
                                  std::to_string(vector_->num_envs()) + "]");
    }
    return actions.data();
  }

  VectorOutputs outputs_of(const py::tuple& out) const {
    const size_t same_step = vector_->options().same_step_reset ? 1 : 0;
    if (out.size() != 7 + same_step) {
      throw std::invalid_argument("out: expected " + std::to_string(7 + same_step) +
                                  " arrays, got " + std::to_string(out.size()));
    }
    const size_t n = static_cast<size_t>(vector_->num_envs());
    const size_t bytes = n * vector_->observation_size();
    return {data_of<uint8_t>(out[0], "observations", bytes),
            data_of<int32_t>(out[1], "rewards", n),
            data_of<bool>(out[2], "terminated", n),
            data_of<bool>(out[3], "truncated", n),
            data_of<int32_t>(out[4], "lives", n),
            data_of<int32_t>(out[5], "frame_number", n),
            data_of<int32_t>(out[6], "episode_frame_number", n),
            same_step ? data_of<uint8_t>(out[7], "final_obs", bytes) : nullptr};
  }

  py::tuple sent_;
  std::unique_ptr<Vector> vector_;  // After sent_: destroyed first, which waits.
};

std::unique_ptr<PyVector> make_vector(
    const std::vector<std::pair<std::string, py::bytes>>& games,
    std::vector<int> game_of, int num_threads, int frame_skip, int stack, int height,
    int width, bool grey, bool max_pool, bool rgb_max, bool pad_with_first,
    int noop_max, bool fire_reset, bool episodic_life, bool life_loss_info,
    bool clip_rewards, int max_frames, double sticky_probability, bool full_action_set,
    bool same_step_reset, const std::string& simd) {
  const VectorOptions options{
      .num_threads = num_threads,
      .frame_skip = frame_skip,
      .stack = stack,
      .height = height,
      .width = width,
      .grey = grey,
      .max_pool = max_pool,
      .rgb_max = rgb_max,
      .pad_with_first = pad_with_first,
      .noop_max = noop_max,
      .fire_reset = fire_reset,
      .episodic_life = episodic_life,
      .life_loss_info = life_loss_info,
      .clip_rewards = clip_rewards,
      .max_frames = max_frames,
      .sticky_probability = sticky_probability,
      .full_action_set = full_action_set,
      .same_step_reset = same_step_reset,
      .simd = simd_named(simd),
  };
  return std::make_unique<PyVector>(games, std::move(game_of), options);
}

using Screen = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

// One plane from two screens, as often as repeats says (for measuring).
py::array_t<uint8_t> preprocess(const std::optional<Screen>& older,
                                const Screen& latest, int height, int width,
                                const std::string& channel, bool rgb_max,
                                const std::string& simd, int repeats, bool pal) {
  using Channel = Preprocessor::Channel;
  if (latest.ndim() != 2 || latest.shape(1) != kWidth || latest.shape(0) > kMaxHeight ||
      (older && (older->ndim() != 2 || older->size() != latest.size()))) {
    throw std::invalid_argument("screens: expected two of [up to 256, 160]");
  }
  const std::vector<std::string> names = {"grey", "red", "green", "blue"};
  const auto found = std::find(names.begin(), names.end(), channel);
  if (found == names.end()) throw std::invalid_argument("no channel " + channel);
  const int source_height = static_cast<int>(latest.shape(0));
  const Preprocessor preprocessor(
      source_height, pal, height, width, static_cast<Channel>(found - names.begin()),
      rgb_max ? Preprocessor::Maximum::kOfRgb : Preprocessor::Maximum::kOfGrey,
      simd_named(simd));
  auto scratch = preprocessor.make_scratch();
  std::vector<uint8_t> pooled(latest.size());
  py::array_t<uint8_t> plane({height, width});
  for (int i = 0; i < repeats; ++i) {
    preprocessor.run(older ? older->data() : nullptr, latest.data(), pooled.data(),
                     plane.mutable_data(), scratch);
  }
  return plane;
}

}  // namespace

void bind_vector(py::module_& module) {
  module.def("preprocess", &preprocess, py::arg("older"), py::arg("latest"),
             py::arg("height") = 84, py::arg("width") = 84, py::arg("channel") = "grey",
             py::arg("rgb_max") = false, py::arg("simd") = "auto",
             py::arg("repeats") = 1, py::arg("pal") = false);
  module.def(
      "palette",
      [](bool pal) {
        std::vector<uint32_t> colors;
        for (int i = 0; i < 256; ++i) colors.push_back(color_of(i, pal));
        return colors;
      },
      py::arg("pal") = false);
  const VectorOptions o;
  py::class_<PyVector>(module, "Vector")
      .def(py::init(&make_vector), py::arg("games"), py::arg("game_of"), py::kw_only(),
           py::arg("num_threads") = o.num_threads, py::arg("frame_skip") = o.frame_skip,
           py::arg("stack") = o.stack, py::arg("height") = o.height,
           py::arg("width") = o.width, py::arg("grey") = o.grey,
           py::arg("max_pool") = o.max_pool, py::arg("rgb_max") = o.rgb_max,
           py::arg("pad_with_first") = o.pad_with_first,
           py::arg("noop_max") = o.noop_max, py::arg("fire_reset") = o.fire_reset,
           py::arg("episodic_life") = o.episodic_life,
           py::arg("life_loss_info") = o.life_loss_info,
           py::arg("clip_rewards") = o.clip_rewards,
           py::arg("max_frames") = o.max_frames,
           py::arg("sticky_probability") = o.sticky_probability,
           py::arg("full_action_set") = o.full_action_set,
           py::arg("same_step_reset") = o.same_step_reset, py::arg("simd") = "auto")
      .def("reset", &PyVector::reset, py::arg("mask"), py::arg("seeds"), py::arg("out"))
      .def("step", &PyVector::step, py::arg("actions"), py::arg("out"))
      .def("send", &PyVector::send, py::arg("actions"), py::arg("out"))
      .def("recv", &PyVector::recv)
      .def("observe", &PyVector::observe, py::arg("out"))
      .def("render", &PyVector::render, py::arg("index"))
      .def("ram", &PyVector::ram, py::arg("index"))
      .def("use_translation", &PyVector::use_translation, py::arg("game"),
           py::arg("path"))
      .def("get_state", &PyVector::get_state, py::arg("index"))
      .def("set_state", &PyVector::set_state, py::arg("index"), py::arg("state"))
      .def(
          "actions_of",
          [](const PyVector& v, int i) { return v.vector().actions_of(i); },
          py::arg("index"))
      .def_property_readonly("num_envs",
                             [](const PyVector& v) { return v.vector().num_envs(); })
      .def_property_readonly("num_threads",
                             [](const PyVector& v) { return v.vector().num_threads(); })
      .def_property_readonly("bytes_per_env", [](const PyVector& v) {
        return v.vector().bytes_per_env();
      });
}

}  // namespace beast::atari
