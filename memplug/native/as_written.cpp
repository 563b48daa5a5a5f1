#include "as_written.h"

#include <mutex>

namespace py = pybind11;

namespace memplug {
namespace {

std::mutex changing; // Python runs other threads while the stance is set
int inside = 0;
py::object* stance = nullptr; // that was set, and knows the one before

// Of `changing`; the thread that has it may be waiting for Python's lock.
std::unique_lock<std::mutex> lock() {
  const py::gil_scoped_release unlocked;
  return std::unique_lock<std::mutex>(changing);
}

} // namespace

void AsWritten::enter() {
  const auto locked = lock();
  if (inside == 0) {
    py::object set = py::module_::import("torch").attr("compiler").attr("set_stance")("force_eager");
    stance = new py::object(std::move(set));
  }
  ++inside;
}

void AsWritten::leave() {
  const auto locked = lock();
  if (--inside > 0) {
    return;
  }
  bool interrupted = false;
  for (bool done = false; !done;) {
    try {
      stance->attr("__exit__")(py::none(), py::none(), py::none());
      done = true;
    } catch (py::error_already_set& error) {
      done = !error.matches(PyExc_KeyboardInterrupt);
      interrupted = interrupted || !done;
      if (done) {
        error.discard_as_unraisable("memplug: the compiler's stance");
      }
    }
  }
  delete stance;
  stance = nullptr;
  if (interrupted) {
    PyErr_SetInterrupt(); // once more
  }
}

py::object AsWritten::before() {
  return stance == nullptr ? py::object(py::none()) : py::object(stance->attr("prev"));
}

} // namespace memplug
