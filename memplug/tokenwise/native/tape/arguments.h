// The arguments of a call as a flat list of values, and the containers that held the values.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <vector>

namespace memplug {

// The structure of nested containers, without their values: dictionaries, tuples, lists, and other containers that
// torch's pytree knows. Guarded by Python's lock.
class Containers {
 public:
  using Leaf = std::function<void(pybind11::handle)>;
  using NextLeaf = std::function<pybind11::object()>;

  // Calls `leaf` with each value in `value` that is not a container, in order. Returns the structure around them.
  static Containers of(pybind11::handle value, const Leaf& leaf);

  // Returns new containers of this structure, with a value from `next` at each place, in the same order.
  pybind11::object around(const NextLeaf& next) const;

 private:
  enum class ContainerKind : uint8_t { LEAF, DICTIONARY, TUPLE, LIST, TREE };

  ContainerKind kind_ = ContainerKind::LEAF;
  pybind11::object keys_; // a DICTIONARY's keys, or a TREE's `TreeSpec` from torch's pytree
  size_t leaves_ = 0; // number of values in a TREE
  std::vector<Containers> parts_;
};

// Returns the bytes of all tensors among a call's arguments, including those in containers.
int64_t given_bytes(pybind11::handle arguments, pybind11::handle keywords);

} // namespace memplug
