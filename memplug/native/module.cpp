// The native core as a Python module, made of the registered parts.
#include <pthread.h>

#include <algorithm>

#include "registry.h"

namespace memplug {
namespace {

void before_fork() {
  std::for_each(parts().rbegin(), parts().rend(), [](const CorePart& part) {
    if (part.lock != nullptr) {
      part.lock();
    }
  });
}

void after_fork(bool in_child) {
  for (const CorePart& part : parts()) {
    if (part.unlock != nullptr) {
      part.unlock(in_child);
    }
  }
}

void after_fork_in_child() {
  after_fork(true);
  for (const CorePart& part : parts()) {
    if (part.end_in_child != nullptr) {
      part.end_in_child();
    }
  }
}

} // namespace

std::vector<CorePart>& parts() {
  static auto* instance = new std::vector<CorePart>(); // never destroyed: a process may fork as it exits
  return *instance;
}

} // namespace memplug

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace memplug;
  std::stable_sort(parts().begin(), parts().end(), [](const CorePart& one, const CorePart& other) { return one.level < other.level; });
  for (const CorePart& part : parts()) {
    part.bind(module);
  }
  pthread_atfork(before_fork, [] { after_fork(false); }, after_fork_in_child);
}
