// The part of a frame that calls Python: runs a region's module in forward, and restores its tensors in backward.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ambient.h"
#include "arguments.h"
#include "frame.h"
#include "modes.h"
#include "observer.h"
#include "unit.h"

namespace memplug {

// Holds Python's lock while it lives. Sets aside a pending Python error, which the user's dispatch mode may have
// raised, and makes it pending again at the end.
struct __attribute__((visibility("hidden"))) Locked {
  pybind11::gil_scoped_acquire lock;
  pybind11::error_scope raised;
};

// A frame that runs a region's module. `executor`: a memplug.tokenwise.engine.executor.Executor; all calls to it are in
// calls.h. Guarded by Python's lock.
class __attribute__((visibility("hidden"))) Running final : public Frame {
 public:
  // `region_object`: the Python `Region`. `times`: a memplug.tokenwise.engine.times.Times for a timed forward, else
  // None.
  Running(
      std::vector<std::shared_ptr<const Tape>> known,
      std::shared_ptr<Flow> flow,
      std::shared_ptr<Region> region,
      pybind11::object executor,
      pybind11::object region_object,
      pybind11::object times);

  // Runs the module's own forward, `call`, in a new frame, and returns its result. `surroundings`: functions that
  // restore the framework's state, passed to `restored` in memplug/tokenwise/engine/ambient.py. `state`: the call's
  // Python state, a memplug.tokenwise.engine.state.CallState, if the forward may be opaque; else None.
  static pybind11::object run(
      const std::shared_ptr<Flow>& flow,
      const std::shared_ptr<Region>& region,
      pybind11::object executor,
      pybind11::object region_object,
      pybind11::object times,
      pybind11::object surroundings,
      pybind11::object state,
      pybind11::object call,
      const pybind11::tuple& arguments,
      const pybind11::dict& keywords);

  // -- an observed forward

  // Starts observing this thread's operators.
  void begin();
  // Stops observing, once the forward has run or raised.
  void end();

  // Returns the forward that this thread observes; null if there is none, or while it notes no operators.
  static Running* observed();

  // Returns the forward that this thread observes, also while it notes no operators; null if there is none.
  static Running* current();

  const pybind11::object& executor() const {
    return executor_;
  }

  // Runs a unit (unit.h) of the forward, and returns its result. `overload`: the kind of the unit's parts, such as
  // "rows" (`part_operator`). `name`: the unit's name. The other arguments are as in `UnitCall`.
  pybind11::object run_unit(
      pybind11::object unit,
      const std::string& overload,
      const std::string& name,
      pybind11::object state,
      pybind11::object surroundings,
      const pybind11::object& call,
      const pybind11::tuple& arguments,
      const pybind11::dict& keywords);
  // Stops observing, and sets `tape`. Throws the first error that occurred while operators were noted.
  void finish();

  void note_reads(const Record& record) override;
  void time(size_t index, bool over) override;
  void before_write(int32_t storage, const at::Tensor& tensor) override;
  void capture(size_t index, c10::ArrayRef<c10::IValue> results) override;
  bool is_transparent(const at::Tensor& tensor) override;
  void before_write_elsewhere(const at::Tensor& tensor) override;

  // -- its recompute pass

  void begin_backward() override;
  void restore() override;
  void explain() override;

  // Runs the tape's operators, with this frame's captures.
  void replay();

  // Runs the tape's operators with captured results from `substitute`, which is called without Python's lock.
  void replay_with(const std::function<Substitute(size_t)>& substitute);

  // -- its recompute pass, if it runs the module again

  // Returns (positional arguments, keyword arguments) for the pass. Their tensors are outside of the forward's graph.
  pybind11::tuple arguments();

  // Returns (unit, its Python state) for each unit, in the order of the forward.
  pybind11::list unit_states() const;

  // Returns (leaf, whether it had a gradient) for each leaf of autograd's graph that the forward met.
  pybind11::list leaves() const;

  // Counts the pass's reads of swapped inputs.
  void consume_inputs();

  std::optional<Ambient> ambient;
  std::optional<ModesAround> modes;
  pybind11::object call, surroundings;
  pybind11::object times; // see the constructor
  int64_t given_bytes = 0; // bytes of all tensors among the arguments
  pybind11::object state = pybind11::none(); // see `run`; None once the module need not run again
  // a memplug.tokenwise.engine.buffers.Buffers with the former values of given memory that the forward wrote to; None
  // if it wrote to none
  pybind11::object buffers;

 protected:
  void before_foreign_write(int32_t storage, const at::Tensor& tensor) override;
  void before_accumulating(const at::Tensor& gradient) override;
  std::vector<at::Tensor> run_again(
      const PassActions& decisions, Bases bases, const std::vector<const Use*>& wanted) override;

 private:
  // An argument of the call: a swapped tensor, a held tensor, or another value.
  struct Item {
    pybind11::object value; // null for a tensor
    std::shared_ptr<Swapped> swapped;
    std::shared_ptr<Held> held;
    int32_t storage = -1; // number of a tensor's storage
    std::optional<Geometry> geometry = {}; // a swapped tensor's layout
    bool requires_grad = false; // whether a swapped tensor requires a gradient
    pybind11::object type = {}; // a tensor's class, from `type_of`
  };

  void enter(const pybind11::tuple& arguments, const pybind11::dict& keywords);
  std::vector<at::Tensor> run_unit_again(
      size_t index, const std::vector<at::Tensor>& given, const std::vector<bool>& needed);
  std::vector<at::Tensor> run_tape(
      const Tape& own_tape,
      const std::vector<Action>& actions,
      Bases bases,
      const std::vector<const Use*>& wanted,
      const std::function<Substitute(size_t)>& captured);
  Item item_of(pybind11::handle value);
  void remember(const at::Tensor& tensor);
  void note(const at::Tensor& tensor);
  void over();
  std::string why_it_keeps() const; // the reason why `keeps` is set; empty if it is not

  std::exception_ptr failed_; // the error of a failed pass, until `replay_with` throws it again
  pybind11::object executor_, region_object_;
  std::optional<Observer> observer_;
  Running* outer_ = nullptr; // the forward that this one is nested in; it notes no operators meanwhile
  std::map<size_t, UnitCall> units_; // units that have run, by index of their operator
  std::vector<Item> items_;
  Containers arguments_, keywords_;
};

} // namespace memplug
