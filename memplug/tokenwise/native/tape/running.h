// A region's forward from its call to its last backward, with all that Python has to do with it.
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

// Python's lock. An error on its way stays as it is, such as that of an operator which a dispatch mode of the user's runs.
struct __attribute__((visibility("hidden"))) Locked {
  pybind11::gil_scoped_acquire lock;
  pybind11::error_scope raised;
};

// What it calls of `executor`, a memplug.tokenwise.engine.executor.Executor, is in calls.h. Guarded by Python's lock.
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

  // Runs the region's own forward and returns what it returns. `surroundings`: of the framework, for Python's `Ambient`.
  // `state`: a memplug.tokenwise.engine.state.State, or None: taken where the forward may be opaque.
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

  void begin();
  // It has run, or raised.
  void end();

  // The forward that this thread is told of, for its units; null: none, or what runs now is no part of it.
  static Running* observed();

  // The same where operators are not noted at the moment.
  static Running* current();

  // That runs it.
  const pybind11::object& executor() const {
    return executor_;
  }

  // Runs a unit (unit.h) of the forward, and returns what it returns. `overload`: of its operators. The other arguments are
  // as in `UnitCall`.
  pybind11::object run_unit(
      pybind11::object unit,
      const std::string& overload,
      const std::string& name,
      pybind11::object state,
      pybind11::object surroundings,
      const pybind11::object& call,
      const pybind11::tuple& arguments,
      const pybind11::dict& keywords);
  // It is over. Throws what went wrong while it was observed.
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

  // The same with captured results that `substitute` gives; called without Python's lock.
  void replay_with(const std::function<Substitute(size_t)>& substitute);

  // For a pass that runs the module: its arguments and keywords, leaves of another graph.
  pybind11::tuple arguments();

  // For such a pass: what each unit needs to run again as it ran, in order.
  pybind11::list unit_states() const; // (unit, what it needs to run again), in order

  // For such a pass: leaves of autograd's graph that the forward met, and whether each had a gradient then.
  pybind11::list leaves() const;

  // Such a pass has read them.
  void consume_inputs();

  std::optional<Ambient> ambient;
  std::optional<ModesAround> modes;
  pybind11::object call, surroundings;
  pybind11::object times; // or None
  int64_t given_bytes = 0; // of all tensors among the arguments
  pybind11::object state = pybind11::none(); // see `run`; None of a forward that is not opaque
  pybind11::object buffers; // a memplug.tokenwise.engine.buffers.Buffers, or None: what the forward wrote to in place

 protected:
  void before_foreign_write(int32_t storage, const at::Tensor& tensor) override;
  void before_accumulating(const at::Tensor& gradient) override;
  std::vector<at::Tensor> run_again(
      const Decisions& decisions, Bases bases, const std::vector<const Use*>& wanted) override;

 private:
  // Of the arguments: a tensor that was swapped or is held, or another value.
  struct Item {
    pybind11::object value;
    std::shared_ptr<Swapped> swapped;
    std::shared_ptr<Held> held;
    int32_t storage = -1; // of either
    std::optional<Geometry> geometry = {}; // of one that was swapped
    bool requires_grad = false; // likewise
    pybind11::object type = {}; // of a tensor, where it is a subclass that does not dispatch for itself
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
  std::string why_it_keeps() const; // empty: it does not

  std::exception_ptr failed_; // of a pass that was begun, until `replay` throws it
  pybind11::object executor_, region_object_;
  std::optional<Observer> observer_;
  Running* outer_ = nullptr; // that the thread was told of before, and whose operators are not noted meanwhile
  std::map<size_t, UnitCall> units_; // by operator
  std::vector<Item> items_;
  Containers arguments_, keywords_;
};

} // namespace memplug
