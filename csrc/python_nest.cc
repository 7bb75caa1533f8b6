// SPDX-License-Identifier: Apache-2.0
#include "python_nest.h"

#include <algorithm>
#include <string>
#include <vector>

#include "buffer_pool.h"
#include "python_gil.h"

namespace py = pybind11;

namespace beast {
namespace {

// The stable part of DLPack's ABI (version 0.x capsules, named "dltensor").
struct DLTensor {
  void* data;
  struct {
    int32_t device_type, device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;  // In elements; null if contiguous.
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
constexpr int32_t kCpu = 1, kCudaHost = 3;
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6 };

constexpr char kCapsule[] = "dltensor", kUsedCapsule[] = "used_dltensor";

Code dl_code(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return kBool;
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return kUInt;
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
      return kInt;
    case DType::kBFloat16:
      return kBFloat;
    case DType::kFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return kFloat;
  }
  return kFloat;
}

std::optional<DType> dtype_from_dl(uint8_t code, uint8_t bits, uint16_t lanes) {
  if (lanes != 1) return std::nullopt;
  for (int64_t number = 1; auto dtype = dtype_from_number(number); ++number) {
    if (dl_code(*dtype) == code && itemsize(*dtype) * 8 == bits) return dtype;
  }
  return std::nullopt;
}

// Where in a nest we are; made into text only where something is wrong.
struct Path {
  const Path* parent = nullptr;
  const char* key = nullptr;  // Of a dict, else
  size_t index = 0;

  std::string str() const {
    if (parent == nullptr) return "";
    const std::string before = parent->str();
    if (key == nullptr) return before + "[" + std::to_string(index) + "]";
    return before.empty() ? key : before + "." + key;
  }
  std::string leaf_str() const { return parent == nullptr ? "the array" : str(); }
};

void check_rank(size_t rank, const Path& path) {
  if (rank <= Shape::kMaxRank) return;
  throw py::value_error(path.leaf_str() + ": expected at most " +
                        std::to_string(Shape::kMaxRank) + " dimensions, got " +
                        std::to_string(rank));
}

// What we call of torch, if it is loaded (whole), else nulls. Never freed: it stays.
struct Torch {
  py::handle tensor, to_dlpack, from_dlpack;
};
const Torch& torch() {
  static Torch found;
  if (found.tensor) return found;
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* module = PyDict_GetItemString(modules, "torch.utils.dlpack");
  PyObject* whole = PyDict_GetItemString(modules, "torch");
  if (module == nullptr || whole == nullptr) return found;
  py::object tensor = py::getattr(whole, "Tensor", py::none());
  py::object to = py::getattr(module, "to_dlpack", py::none());
  py::object from = py::getattr(module, "from_dlpack", py::none());
  if (tensor.is_none() || to.is_none() || from.is_none()) return found;
  // What from_dlpack calls after looking at what kind of object it was given.
  from = py::getattr(py::getattr(whole, "_C", py::none()), "_from_dlpack", from);
  found = {tensor.release(), to.release(), from.release()};
  return found;
}

py::object dlpack_of(py::handle object) {
  const Torch& t = torch();
  // Others, with gradients or sparse, are for its __dlpack__ to refuse.
  const bool is_plain = t.tensor && py::type::handle_of(object).is(t.tensor) &&
                        !object.attr("requires_grad").cast<bool>() &&
                        !object.attr("is_sparse").cast<bool>();
  if (!is_plain) return object.attr("__dlpack__")();
  // Its __dlpack__ is Python and takes 5 us, this 0.3.
  if (!object.attr("is_neg")().cast<bool>()) return t.to_dlpack(object);
  return t.to_dlpack(object.attr("resolve_neg")());  // Its memory has the other sign.
}

Array array_from_dlpack(py::handle object, const Path& path) {
  py::object capsule;
  try {
    capsule = dlpack_of(object);
  } catch (const py::error_already_set& error) {  // Needs a gradient, is sparse, ...
    throw py::value_error(path.leaf_str() + ": " +
                          py::str(error.value()).cast<std::string>());
  }
  auto* managed =
      static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  if (managed == nullptr) throw py::error_already_set();
  const DLTensor& tensor = managed->tensor;
  if (tensor.device.device_type != kCpu && tensor.device.device_type != kCudaHost) {
    throw py::value_error(path.leaf_str() +
                          ": expected an array in the CPU's memory, got one on " +
                          py::str(py::getattr(object, "device", py::str("a device")))
                              .cast<std::string>() +
                          "; call .cpu() first");
  }
  const auto dtype =
      dtype_from_dl(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
  if (!dtype) {
    throw py::type_error(path.leaf_str() +
                         ": expected bool, integers or floats, got dtype " +
                         py::str(object.attr("dtype")).cast<std::string>());
  }
  const std::span<const int64_t> dims(tensor.shape, tensor.ndim);
  check_rank(dims.size(), path);
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  Array array = Array::contiguous(*dtype, Shape(dims), data, nullptr);
  if (tensor.strides != nullptr) {
    for (int32_t i = 0; i < tensor.ndim; ++i) {
      array.strides[i] = tensor.strides[i] * static_cast<int64_t>(itemsize(*dtype));
    }
  }
  // From here on the array has the tensor, and the capsule no longer.
  PyCapsule_SetName(capsule.ptr(), kUsedCapsule);
  array.owner = std::shared_ptr<void>(managed, [](void* pointer) {
    WithGil gil;
    auto* managed = static_cast<DLManagedTensor*>(pointer);
    if (managed->deleter != nullptr) managed->deleter(managed);
  });
  return array;
}

Array array_from_numpy(const py::array& array, const Path& path) {
  const auto dtype = dtype_from_numpy(array.dtype());
  if (!dtype) {
    throw py::type_error(path.leaf_str() +
                         ": expected bool, integers or floats, got dtype " +
                         py::str(array.dtype()).cast<std::string>());
  }
  Array result;
  result.dtype = *dtype;
  const auto ndim = static_cast<size_t>(array.ndim());
  check_rank(ndim, path);
  result.shape = Shape(std::span<const int64_t>(array.shape(), ndim));
  result.strides = Shape(std::span<const int64_t>(array.strides(), ndim));
  result.data = static_cast<std::byte*>(const_cast<void*>(array.data()));
  result.owner = keep_alive(array);
  return result;
}

Array leaf_from_python(py::handle object, const Path& path) {
  if (py::isinstance<py::array>(object)) {
    return array_from_numpy(py::reinterpret_borrow<py::array>(object), path);
  }
  if (py::hasattr(object, "__dlpack__")) return array_from_dlpack(object, path);
  const bool is_number = PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr()) ||
                         PyObject_CheckBuffer(object.ptr());
  if (!is_number || PyBytes_Check(object.ptr())) {
    throw py::type_error(
        path.leaf_str() +
        ": expected an array (torch, numpy, anything with __dlpack__ or the buffer "
        "protocol), a dict, a tuple or a list, got " +
        py::str(py::type::of(object)).cast<std::string>());
  }
  return array_from_numpy(py::module_::import("numpy").attr("asarray")(object), path);
}

Structure::Ptr walk(py::handle object, const Path& path, int depth,
                    std::vector<Array>& leaves) {
  if (depth > Structure::kMaxDepth) {
    throw py::value_error(path.str() + ": nested more than " +
                          std::to_string(Structure::kMaxDepth) + " deep");
  }
  if (PyDict_Check(object.ptr())) {
    // Leaves go in the order of the sorted keys, as in the structure.
    std::vector<std::pair<std::string, py::handle>> items;
    for (auto [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      if (!PyUnicode_Check(key.ptr())) {
        const std::string where = path.str();
        throw py::type_error((where.empty() ? "the nest" : where) +
                             ": expected string keys, got " +
                             py::repr(key).cast<std::string>());
      }
      items.emplace_back(key.cast<std::string>(), value);
    }
    std::sort(items.begin(), items.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::pair<std::string, Structure::Ptr>> children;
    for (auto& [key, value] : items) {
      children.emplace_back(key, walk(value, {&path, key.c_str()}, depth + 1, leaves));
    }
    return Structure::dict(std::move(children));
  }
  if (PyTuple_Check(object.ptr()) || PyList_Check(object.ptr())) {
    std::vector<Structure::Ptr> children;
    for (py::handle item : py::reinterpret_borrow<py::sequence>(object)) {
      const Path inner{&path, nullptr, children.size()};
      children.push_back(walk(item, inner, depth + 1, leaves));
    }
    return Structure::tuple(std::move(children));
  }
  leaves.push_back(leaf_from_python(object, path));
  return Structure::leaf();
}

// Collects the leaves of an object with that very structure; false if it has another.
bool walk_alike(py::handle object, const Structure& structure, const Path& path,
                std::vector<Array>& leaves) {
  const auto& children = structure.children();
  switch (structure.kind()) {
    case Structure::Kind::kLeaf:
      if (PyDict_Check(object.ptr()) || PyTuple_Check(object.ptr()) ||
          PyList_Check(object.ptr())) {
        return false;
      }
      leaves.push_back(leaf_from_python(object, path));
      return true;
    case Structure::Kind::kTuple: {
      if (!PyTuple_Check(object.ptr())) return false;
      if (PyTuple_GET_SIZE(object.ptr()) != static_cast<Py_ssize_t>(children.size())) {
        return false;
      }
      for (size_t i = 0; i < children.size(); ++i) {
        const py::handle item =
            PyTuple_GET_ITEM(object.ptr(), static_cast<Py_ssize_t>(i));
        if (!walk_alike(item, *children[i], {&path, nullptr, i}, leaves)) return false;
      }
      return true;
    }
    case Structure::Kind::kDict: {
      if (!PyDict_Check(object.ptr())) return false;
      if (PyDict_GET_SIZE(object.ptr()) != static_cast<Py_ssize_t>(children.size())) {
        return false;
      }
      for (size_t i = 0; i < children.size(); ++i) {
        const std::string& key = structure.keys()[i];
        const py::str name(key);
        const py::handle item = PyDict_GetItemWithError(object.ptr(), name.ptr());
        if (!item || !walk_alike(item, *children[i], {&path, key.c_str()}, leaves)) {
          return false;
        }
      }
      return true;
    }
  }
  return false;
}

struct Export {  // A tensor on its way to torch, with what it points to.
  DLManagedTensor managed{};
  Array array;
  Shape strides;
};

// Torch has neither negative strides nor such that are no whole number of elements.
bool has_torch_strides(const Array& array) {
  for (size_t i = 0; i < array.shape.rank(); ++i) {
    const int64_t stride = array.strides[i];
    if (stride < 0 || stride % static_cast<int64_t>(itemsize(array.dtype)) != 0) {
      return false;
    }
  }
  return true;
}

py::object array_to_torch(const Array& given, py::handle from_dlpack) {
  Array array = given;
  if (!has_torch_strides(given)) {
    array = BufferPool().allocate({{given.dtype, given.shape}})[0];
    copy(given, array);
  }
  auto* out = new Export;
  out->array = array;
  out->strides = array.strides;
  const auto size = static_cast<int64_t>(itemsize(array.dtype));
  for (size_t i = 0; i < array.shape.rank(); ++i) out->strides[i] /= size;
  DLTensor& tensor = out->managed.tensor;
  tensor.data = array.data;
  tensor.device = {kCpu, 0};
  tensor.ndim = static_cast<int32_t>(array.shape.rank());
  tensor.dtype = {dl_code(array.dtype), static_cast<uint8_t>(size * 8), 1};
  tensor.shape = const_cast<int64_t*>(out->array.shape.data());
  tensor.strides = const_cast<int64_t*>(out->strides.data());
  out->managed.context = out;
  out->managed.deleter = [](DLManagedTensor* managed) {
    delete static_cast<Export*>(managed->context);
  };
  py::capsule capsule(&out->managed, kCapsule, [](PyObject* self) {
    if (!PyCapsule_IsValid(self, kCapsule)) return;  // Torch has it.
    auto* unused = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(self, kCapsule));
    unused->deleter(unused);
  });
  return from_dlpack(capsule);
}

py::object build(const Structure& structure, const std::vector<Array>& leaves,
                 size_t& next, py::handle from_dlpack) {
  switch (structure.kind()) {
    case Structure::Kind::kLeaf: {
      const Array& array = leaves[next++];
      return from_dlpack ? array_to_torch(array, from_dlpack) : array_to_numpy(array);
    }
    case Structure::Kind::kTuple: {
      py::tuple tuple(structure.children().size());
      for (size_t i = 0; i < structure.children().size(); ++i) {
        tuple[i] = build(*structure.children()[i], leaves, next, from_dlpack);
      }
      return tuple;
    }
    case Structure::Kind::kDict: {
      py::dict dict;
      for (size_t i = 0; i < structure.keys().size(); ++i) {
        dict[py::str(structure.keys()[i])] =
            build(*structure.children()[i], leaves, next, from_dlpack);
      }
      return dict;
    }
  }
  return py::none();
}

}  // namespace

std::shared_ptr<void> keep_alive(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* pointer) {
    WithGil gil;
    Py_DECREF(static_cast<PyObject*>(pointer));
  });
}

std::optional<DType> dtype_from_numpy(const py::dtype& dtype) {
  if (dtype.byteorder() == '>') return std::nullopt;
  const size_t bits = dtype.itemsize() * 8;
  switch (dtype.kind()) {
    case 'b':
      return DType::kBool;
    case 'u':
      return dtype_from_dl(kUInt, bits, 1);
    case 'i':
      return dtype_from_dl(kInt, bits, 1);
    case 'f':
      return dtype_from_dl(kFloat, bits, 1);
    default:  // ml_dtypes' bfloat16 says 'V'.
      if (dtype.attr("name").cast<std::string>() == "bfloat16") return DType::kBFloat16;
      return std::nullopt;
  }
}

py::dtype dtype_to_numpy(DType dtype) {
  if (dtype != DType::kBFloat16) {
    static py::handle known[32];  // Never freed, as numpy does with its own.
    py::handle& found = known[static_cast<size_t>(dtype)];
    if (!found) found = py::dtype(std::string(name(dtype))).release();
    return py::reinterpret_borrow<py::dtype>(found);
  }
  try {
    return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
  } catch (const py::error_already_set&) {
    throw py::type_error(
        "numpy has no bfloat16; import torch before, or: pip install ml_dtypes");
  }
}

py::array array_to_numpy(const Array& array) {
  const py::capsule owner(new std::shared_ptr<void>(array.owner), [](void* pointer) {
    delete static_cast<std::shared_ptr<void>*>(pointer);
  });
  return py::array(dtype_to_numpy(array.dtype), array.shape.dims(),
                   array.strides.dims(), array.data, owner);
}

Nest nest_from_python(py::handle object) {
  // The last ones that were seen, guarded by the GIL: a program has a few.
  static auto& recent = *new std::vector<Structure::Ptr>;
  const auto known = recent;  // What follows may run Python, and that another thread.
  Nest nest;
  for (const Structure::Ptr& structure : known) {
    if (walk_alike(object, *structure, {}, nest.leaves)) {
      nest.structure = structure;
      return nest;
    }
    nest.leaves.clear();
  }
  nest.structure = walk(object, {}, 0, nest.leaves);
  if (recent.size() == 4) recent.erase(recent.begin());
  recent.push_back(nest.structure);
  return nest;
}

py::object nest_to_python(const Nest& nest) {
  size_t next = 0;
  return build(*nest.structure, nest.leaves, next, torch().from_dlpack);
}

}  // namespace beast
