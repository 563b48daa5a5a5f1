#include "as_written.h"

#include <utility>

#include "torch_private.h"

namespace py = pybind11;

namespace memplug {
namespace {

// torch's compiler module, and one object of the stance "force_eager" for all calls of `enter`.
// `torch.compiler.set_stance` would make a new object in each call, which takes longer than many operators. Apart from
// that it only sets a variable of the compiler module, as `torch_private.check_compiler` verifies.
struct Compiler {
  py::object module, eager;
};

Compiler* compiler = nullptr; // never destroyed
int inside = 0;
py::object* former = nullptr; // the stance that `compiler->eager` has replaced; null if none is

} // namespace

void AsWritten::enter() {
  if (compiler == nullptr) {
    py::object module = py::module_::import(COMPILER);
    py::object eager = module.attr(STANCE_CLASS)("force_eager");
    compiler = new Compiler{std::move(module), std::move(eager)};
  }
  if (inside == 0) { // from here to the end of `enter`, no other thread and no signal handler can run Python
    former = new py::object(compiler->module.attr(STANCE));
    compiler->module.attr(STANCE) = compiler->eager;
  }
  ++inside;
}

void AsWritten::leave() {
  if (--inside == 0) {
    compiler->module.attr(STANCE) = *former;
    delete std::exchange(former, nullptr);
  }
}

py::object AsWritten::before() {
  return former == nullptr ? py::object(py::none()) : *former;
}

} // namespace memplug
