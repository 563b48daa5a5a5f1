// The arguments of a call as a flat list of values, and the containers that held the values.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <vector>

namespace memplug {

// Nested containers without their values: dictionaries, tuples, lists, and other containers that torch's pytree knows.
// Guarded by Python's lock.
class Containers {
 public:
  using Leaf = std::function<void(pybind11::handle)>;
  using NextLeaf = std::function<pybind11::object()>;

  // Calls `leaf` with each value inside of `value` that is not itself a container, in order. Returns the containers.
  static Containers of(pybind11::handle value, const Leaf& leaf);

  // Returns new containers of the same structure. Calls `next` for each value, in the same order.
  pybind11::object around(const NextLeaf& next) const;

 private:
  enum class ContainerKind : uint8_t { LEAF, DICTIONARY, TUPLE, LIST, TREE };

  ContainerKind kind_ = ContainerKind::LEAF;
  pybind11::object keys_; // a dictionary's keys, or torch's description of a tree
  size_t leaves_ = 0; // number of values in a tree
  std::vector<Containers> parts_;
};

// Returns the bytes of all tensors among the arguments of a call and in their containers.
int64_t given_bytes(pybind11::handle arguments, pybind11::handle keywords);

} // namespace memplug
