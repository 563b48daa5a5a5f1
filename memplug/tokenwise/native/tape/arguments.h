// The arguments of a call as a flat list, and the containers that they came from.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <vector>

namespace memplug {

// The containers of flat values: nested dictionaries, tuples and lists, and those that torch's pytree knows. Guarded by
// Python's lock.
class Containers {
 public:
  using Leaf = std::function<void(pybind11::handle)>;
  using NextLeaf = std::function<pybind11::object()>;

  // Calls `leaf` with each value that is no such container, in order. Returns the containers.
  static Containers of(pybind11::handle value, const Leaf& leaf);

  // Returns the same containers with other values, taken from `next` in order.
  pybind11::object around(const NextLeaf& next) const;

 private:
  enum class ContainerKind : uint8_t { LEAF, DICTIONARY, TUPLE, LIST, TREE };

  ContainerKind kind_ = ContainerKind::LEAF;
  pybind11::object keys_; // a dictionary's keys, or torch's description of a tree
  size_t leaves_ = 0; // number of values in a tree
  std::vector<Containers> parts_;
};

// Returns the bytes of all tensors among the arguments of a call, including tensors in containers.
int64_t given_bytes(pybind11::handle arguments, pybind11::handle keywords);

} // namespace memplug
