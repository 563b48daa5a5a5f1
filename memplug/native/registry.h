// Each folder of the native core adds its part of the Python module by itself, so that the core is made of those folders
// that are there.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace memplug {

// Which folders a folder may include: those of lower levels. Around a fork the locks of higher levels are taken first: who
// holds one asks for memory, or notes what it does.
enum class Level { DEVICE, PROFILE, SERVING, ASKING };

struct CorePart {
  Level level;
  void (*bind)(pybind11::module_& module);
  void (*lock)() = nullptr; // before a fork: the child must not inherit a lock that another thread held
  void (*unlock)(bool in_child) = nullptr;
  void (*end_in_child)() = nullptr; // the child of a fork is not recorded, served or swapped
};

std::vector<CorePart>& parts();

// As a constant of a source file: registers a part when the library is loaded.
struct Registered {
  explicit Registered(CorePart part) {
    parts().push_back(part);
  }
};

} // namespace memplug
