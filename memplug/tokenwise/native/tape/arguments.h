// Arguments of a call as a flat list, and back.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <vector>

namespace memplug {

// The containers that flat values came out of: dictionaries, tuples and lists, nested, and those that torch's pytree
// knows. Guarded by Python's lock.
class Containers {
 public:
  using Leaf = std::function<void(pybind11::handle)>;
  using NextLeaf = std::function<pybind11::object()>;

  // Calls `leaf` with each value that is no such container, in order.
  static Containers of(pybind11::handle value, const Leaf& leaf);

  // The same containers, with other values.
  pybind11::object around(const NextLeaf& next) const;

 private:
  enum class Kind : uint8_t { LEAF, DICTIONARY, TUPLE, LIST, TREE };

  Kind kind_ = Kind::LEAF;
  pybind11::object keys_; // of a dictionary; of a tree, how torch describes it
  size_t leaves_ = 0; // of a tree
  std::vector<Containers> parts_;
};

// Of all tensors among the arguments of a call, tensors in containers included.
int64_t given_bytes(pybind11::handle arguments, pybind11::handle keywords);

} // namespace memplug
