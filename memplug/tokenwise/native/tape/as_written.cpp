#include "as_written.h"

#include <utility>

#include "torch_private.h"

namespace py = pybind11;

namespace memplug {
namespace {

// torch's compiler module, and the stance "force_eager", made once. `torch.compiler.set_stance` makes a new stance in
// each call, which takes longer than many operators, and then sets one variable of this module.
// `torch_private.check_compiler` verifies that it does no more than that.
struct Compiler {
  py::object module, eager;
};

Compiler* compiler = nullptr; // never destroyed
int inside = 0;
py::object* former = nullptr; // the stance that was replaced

} // namespace

void AsWritten::enter() {
  if (compiler == nullptr) {
    py::object module = py::module_::import(COMPILER);
    py::object eager = module.attr(STANCE_CLASS)("force_eager");
    compiler = new Compiler{std::move(module), std::move(eager)};
  }
  if (inside == 0) { // from here on, no other thread and no signal handler can run Python
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
