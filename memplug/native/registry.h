// Each folder of the native core registers its own part of the Python module, so that the core consists of the folders
// that are there.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace memplug {

// Order of the folders: a folder may include only folders of lower levels. Before a fork, locks of higher levels are
// taken first, because their holders request memory or record operators.
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
