#include "calls.h"

#include <c10/util/Exception.h>

#include <utility>

namespace py = pybind11;

namespace memplug {
namespace {

const Functions* bound_functions = nullptr; // never destroyed: graphs may outlive Python's modules

} // namespace

PyObject* CalledClass::add(const char* name) {
  names_.insert(name);
  PyObject* const interned = PyUnicode_InternFromString(name);
  if (interned == nullptr) {
    throw py::error_already_set();
  }
  return interned;
}

void CalledClass::check(const CalledNames& declared) const {
  const std::string where = "of memplug/tokenwise/engine/calls.py: ";
  const auto found = declared.find(name_);
  const std::set<std::string> has = found == declared.end() ? std::set<std::string>() : found->second;
  for (const std::string& name : names_) {
    if (has.count(name) == 0) {
      throw py::attribute_error("memplug's native core calls a name that is no part " + where + name_ + "." + name);
    }
  }
  for (const std::string& name : has) {
    if (names_.count(name) == 0) {
      throw py::attribute_error("memplug's native core does not call a name " + where + name_ + "." + name);
    }
  }
}

const Calls& calls() {
  static const auto* const all = new Calls(); // never destroyed
  return *all;
}

const Functions& functions() {
  TORCH_INTERNAL_ASSERT(bound_functions != nullptr, "memplug: call bind_calls first");
  return *bound_functions;
}

void bind_calls(
    const CalledNames& declared, py::object default_device, py::object tree_flatten, py::object tree_unflatten) {
  const Calls& all = calls();
  for (const CalledClass* const each :
       {static_cast<const CalledClass*>(&all.executor),
        static_cast<const CalledClass*>(&all.unit),
        static_cast<const CalledClass*>(&all.buffers),
        static_cast<const CalledClass*>(&all.times),
        static_cast<const CalledClass*>(&all.state)}) {
    each->check(declared);
  }
  delete std::exchange(
      bound_functions, new Functions{std::move(default_device), std::move(tree_flatten), std::move(tree_unflatten)});
}

} // namespace memplug
