// All calls from the core to Python while regions run. memplug/tokenwise/engine/calls.py declares the same classes, and
// documents each method. `bind_calls` compares the names in the two files.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace memplug {

class Running;

// names of methods and attributes, by name of the class
using CalledNames = std::map<std::string, std::set<std::string>>;

// The methods and attributes of one Python class that the core uses.
class CalledClass {
 public:
  explicit CalledClass(std::string name) : name_(std::move(name)) {}

  // Adds a name and returns it as an interned Python string, which is never freed.
  PyObject* add(const char* name);

  // Throws AttributeError unless the names that `declared` has for this class are exactly the added ones.
  void check(const CalledNames& declared) const;

 private:
  std::string name_;
  std::set<std::string> names_;
};

template <typename Value>
pybind11::object as_object(Value value) {
  if constexpr (std::is_base_of_v<pybind11::object, Value>) {
    return value;
  } else {
    return pybind11::cast(std::move(value));
  }
}

template <typename Value>
Value value_of(PyObject* found) { // `found`: a new reference, or null if Python raised an error
  if (found == nullptr) {
    throw pybind11::error_already_set();
  }
  const auto object = pybind11::reinterpret_steal<pybind11::object>(found);
  if constexpr (!std::is_void_v<Value>) {
    return object.cast<Value>();
  }
}

template <typename Value>
class Attribute {
 public:
  Attribute(CalledClass& of, const char* name) : name_(of.add(name)) {}

  Value operator()(pybind11::handle object) const {
    return value_of<Value>(PyObject_GetAttr(object.ptr(), name_));
  }

 private:
  PyObject* name_;
};

template <typename Signature>
class Method;

// A Python method, called with its object as the first argument. It is not bound: a bound method in C++ would form a
// reference cycle with its object that Python's collector does not see.
template <typename Result, typename... Arguments>
class Method<Result(Arguments...)> {
 public:
  Method(CalledClass& of, const char* name) : name_(of.add(name)) {}

  Result operator()(pybind11::handle object, Arguments... arguments) const {
    const std::array<pybind11::object, sizeof...(Arguments)> values{as_object(std::move(arguments))...};
    std::array<PyObject*, sizeof...(Arguments) + 1> all{object.ptr()};
    for (size_t i = 0; i < values.size(); ++i) {
      all[i + 1] = values[i].ptr();
    }
    return value_of<Result>(PyObject_VectorcallMethod(name_, all.data(), all.size(), nullptr));
  }

 private:
  PyObject* name_;
};

struct __attribute__((visibility("hidden"))) ExecutorCalls final : CalledClass {
  using object = pybind11::object;

  ExecutorCalls() : CalledClass("ExecutorCalls") {}

  const Attribute<bool> stands_around{*this, "stands_around"};
  const Method<bool()> is_alone{*this, "is_alone"};
  const Method<bool(object tensor)> is_scratch{*this, "is_scratch"};
  const Method<object()> written_buffers{*this, "written_buffers"};
  const Method<void(object region, uint32_t why, std::string why_it_keeps)> note_opaque{*this, "note_opaque"};
  const Method<void(object region, std::shared_ptr<Running> frame)> note_timed{*this, "note_timed"};
  const Method<void(std::shared_ptr<Running> frame, object region)> restore{*this, "restore"};
  const Method<void(const char* phase, object region, object error)> explain{*this, "explain"};
  const Method<object(object region, object error)> with_region{*this, "with_region"};
  const Method<pybind11::list(
      object unit,
      object region,
      object call,
      object arguments,
      object keywords,
      object state,
      object surroundings,
      object ambient,
      object sources,
      size_t saved)>
      run_unit_again{*this, "run_unit_again"};
};

struct __attribute__((visibility("hidden"))) UnitCalls final : CalledClass {
  UnitCalls() : CalledClass("UnitCalls") {}

  const Attribute<std::set<size_t>> writes{*this, "writes"};
  const Attribute<bool> writes_unsaid{*this, "writes_unsaid"};
  const Attribute<bool> puts_back{*this, "puts_back"};
  const Method<pybind11::object()> reads{*this, "reads"};
  const Method<pybind11::object()> lasting{*this, "lasting"};
  const Method<void(std::vector<size_t> written)> note_writes{*this, "note_writes"};
};

struct __attribute__((visibility("hidden"))) BuffersCalls final : CalledClass {
  BuffersCalls() : CalledClass("BuffersCalls") {}

  const Method<void(pybind11::object tensor)> note{*this, "note"};
  const Method<pybind11::object()> as_before{*this, "as_before"};
};

struct __attribute__((visibility("hidden"))) TimesCalls final : CalledClass {
  TimesCalls() : CalledClass("TimesCalls") {}

  const Method<void()> begin{*this, "begin"};
  const Method<void(size_t index, bool over)> time{*this, "time"};
  const Method<void()> begin_backward{*this, "begin_backward"};
};

struct __attribute__((visibility("hidden"))) StateCalls final : CalledClass {
  StateCalls() : CalledClass("StateCalls") {}

  const Attribute<std::string> unknown{*this, "unknown"};
};

struct __attribute__((visibility("hidden"))) Calls {
  const ExecutorCalls executor;
  const UnitCalls unit;
  const BuffersCalls buffers;
  const TimesCalls times;
  const StateCalls state;
};

// Returns the only instance. Guarded by Python's lock.
const Calls& calls();

struct __attribute__((visibility("hidden"))) Functions {
  pybind11::object default_device, tree_flatten, tree_unflatten;
};

// Returns the functions that `bind_calls` has stored. Throws if `bind_calls` has not run. Guarded by Python's lock.
const Functions& functions();

// Stores the three Python functions. Compares the names that the core uses with `declared`, the methods and attributes
// of the classes in calls.py. Throws AttributeError if the core uses an undeclared name, or does not use a declared
// one.
void bind_calls(
    const CalledNames& declared,
    pybind11::object default_device,
    pybind11::object tree_flatten,
    pybind11::object tree_unflatten);

} // namespace memplug
