// A region's forward from its call to its last backward, with everything that involves Python.
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

// Python's lock. A pending Python error is kept, such as that of an operator run by the user's dispatch mode.
struct __attribute__((visibility("hidden"))) Locked {
  pybind11::gil_scoped_acquire lock;
  pybind11::error_scope raised;
};

// A frame that runs a region. Its calls to `executor`, a memplug.tokenwise.engine.executor.Executor, are in calls.h.
// Guarded by Python's lock.
class __attribute__((visibility("hidden"))) Running final : public Frame {
 public:
  // `region_object`: the Python `Region`. `times`: a memplug.tokenwise.engine.times.Times, or None.
  Running(
      std::vector<std::shared_ptr<const Tape>> known,
      std::shared_ptr<Flow> flow,
      std::shared_ptr<Region> region,
      pybind11::object executor,
      pybind11::object region_object,
      pybind11::object times);

  // Runs the region's own forward and returns its result. `surroundings`: the framework's, for Python's `Ambient`.
  // `state`: a memplug.tokenwise.engine.state.CallState, or None; it is taken if the forward may be opaque.
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

  // Starts observing.
  void begin();
  // Stops observing, once the forward has run or raised.
  void end();

  // Returns the forward that this thread observes, for its units; null if there is none, or if the running code is not
  // part of it.
  static Running* observed();

  // Returns the forward that this thread observes, even while operators are not noted.
  static Running* current();

  // Returns the executor that runs the region.
  const pybind11::object& executor() const {
    return executor_;
  }

  // Runs a unit (unit.h) of the forward, and returns its result. `overload`: of the operators that represent it. The
  // other arguments are as in `UnitCall`.
  pybind11::object run_unit(
      pybind11::object unit,
      const std::string& overload,
      const std::string& name,
      pybind11::object state,
      pybind11::object surroundings,
      const pybind11::object& call,
      const pybind11::tuple& arguments,
      const pybind11::dict& keywords);
  // Ends the forward and takes its tape. Throws the error that occurred while it was observed.
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

  // Returns the arguments and keywords for a pass that runs the module, as leaves of another graph.
  pybind11::tuple arguments();

  // Returns (unit, the state that it needs to run again) for each unit in order, for such a pass.
  pybind11::list unit_states() const;

  // Returns (leaf, whether it had a gradient) for each leaf of autograd's graph that the forward met, for such a pass.
  pybind11::list leaves() const;

  // Counts the reads of swapped inputs by such a pass.
  void consume_inputs();

  std::optional<Ambient> ambient;
  std::optional<ModesAround> modes;
  pybind11::object call, surroundings;
  pybind11::object times; // or None
  int64_t given_bytes = 0; // of all tensors among the arguments
  pybind11::object state = pybind11::none(); // see `run`; None unless the forward is opaque
  pybind11::object buffers; // a memplug.tokenwise.engine.buffers.Buffers with all in-place writes, or None

 protected:
  void before_foreign_write(int32_t storage, const at::Tensor& tensor) override;
  void before_accumulating(const at::Tensor& gradient) override;
  std::vector<at::Tensor> run_again(
      const PassActions& decisions, Bases bases, const std::vector<const Use*>& wanted) override;

 private:
  // An argument: a tensor that was swapped or is held, or another value.
  struct Item {
    pybind11::object value;
    std::shared_ptr<Swapped> swapped;
    std::shared_ptr<Held> held;
    int32_t storage = -1; // of a tensor
    std::optional<Geometry> geometry = {}; // of a swapped tensor
    bool requires_grad = false; // likewise
    pybind11::object type = {}; // of a tensor whose class is a subclass without a dispatch of its own
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
  std::string why_it_keeps() const; // empty if it does not

  std::exception_ptr failed_; // error of a pass, until `replay` throws it
  pybind11::object executor_, region_object_;
  std::optional<Observer> observer_;
  Running* outer_ = nullptr; // the forward that this thread observed before, and whose operators are not noted now
  std::map<size_t, UnitCall> units_; // by operator
  std::vector<Item> items_;
  Containers arguments_, keywords_;
};

} // namespace memplug
