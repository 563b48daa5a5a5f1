// Each folder of the native core registers its own part of the Python module, so that any folder may be absent.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace memplug {

// Level of a folder, which may include only folders of lower levels. Before a fork, locks of higher levels are taken
// first, because a thread that holds one may request memory or run operators.
enum class Level { DEVICE, PROFILE, SERVING, ASKING };

struct CorePart {
  Level level;
  void (*bind)(pybind11::module_& module);
  void (*lock)() = nullptr; // before a fork: the child must not inherit a lock that another thread held
  void (*unlock)(bool in_child) = nullptr;
  void (*end_in_child)() = nullptr; // in the child of a fork: ends recording, serving and swapping
};

std::vector<CorePart>& parts();

// Registers a part. Each folder has a constant of this type, which is made when the library is loaded.
struct Registered {
  explicit Registered(CorePart part) {
    parts().push_back(part);
  }
};

} // namespace memplug
