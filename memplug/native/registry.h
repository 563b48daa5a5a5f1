// The list of the native core's parts. A part is one folder's share of the Python module, with its locks. Each folder
// registers its own part, so that any folder may be absent.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace memplug {

// Level of a part: its folder may include only folders of lower levels. DEVICE and PROFILE: the folders of these names.
// SERVING: the arena, which serves requests. ASKING: tokenwise and swap, which run operators and make requests. Before
// a fork, locks of higher levels are taken first, because a thread that holds one may run operators or request memory.
enum class Level { DEVICE, PROFILE, SERVING, ASKING };

struct CorePart {
  Level level;
  void (*bind)(pybind11::module_& module);
  void (*lock)() = nullptr; // called before a fork: the child must not inherit a lock that another thread holds
  void (*unlock)(bool in_child) = nullptr;
  void (*end_in_child)() = nullptr; // called in the child of a fork: ends recording, serving and swapping
};

std::vector<CorePart>& parts();

// Registers a part. Each folder has a constant of this type, which is constructed when the library is loaded.
struct Registered {
  explicit Registered(CorePart part) {
    parts().push_back(part);
  }
};

} // namespace memplug
