// What Python sees of forwards and tapes: they are added to the module of module.cpp.
#include "forward_module.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "exchange.h"
#include "frame.h"
#include "observer.h"
#include "replay.h"
#include "saved_type.h"

namespace py = pybind11;

namespace memplug {
namespace {

using Tapes = std::vector<std::shared_ptr<const Tape>>;

std::vector<int32_t> storages_of(const std::vector<Use>& uses) {
  std::vector<int32_t> numbers;
  for (const Use& use : uses) {
    numbers.push_back(use.storage);
  }
  return numbers;
}

// Of the first tensor that it returned; 0 where that has no dimension, or there is none.
int64_t rows_of(const Record& record) {
  const bool none = record.outputs.empty() || record.outputs.front().geometry.size.empty();
  return none ? 0 : record.outputs.front().geometry.size.front();
}

py::tuple described(const Record& record) {
  std::vector<size_t> dimensions;
  for (const Use& use : record.inputs) {
    dimensions.push_back(use.geometry.size.size());
  }
  return py::make_tuple(
      record.op->schema_name,
      record.op->overload,
      static_cast<int>(record.form),
      record.root,
      record.draws,
      rows_of(record),
      storages_of(record.inputs),
      record.made,
      record.written,
      storages_of(record.outputs),
      dimensions);
}

// A frame with its observer, and what Python is told: methods of `python`, which is alive while the forward runs.
struct Running final : Frame {
  Running(
      Tapes known,
      py::handle python,
      std::shared_ptr<Flow> flow,
      std::shared_ptr<Region> region,
      bool regathers)
      : Frame(std::move(known), std::move(flow), std::move(region), regathers ? is_parameter : nullptr),
        python(python) {}

  void time(size_t index, bool over) override {
    const py::gil_scoped_acquire locked;
    python.attr("time")(index, over);
  }
  void before_write(int32_t storage, const at::Tensor& tensor) override {
    const py::gil_scoped_acquire locked;
    Frame::before_write(storage, tensor);
  }
  void before_foreign_write(int32_t storage, const at::Tensor& tensor) override {
    python.attr("before_foreign_write")(storage, wrapped(tensor));
  }
  void capture(size_t index, c10::ArrayRef<c10::IValue> results) override {
    const py::gil_scoped_acquire locked;
    Frame::capture(index, results);
  }
  bool is_transparent(const at::Tensor& tensor) override {
    const py::gil_scoped_acquire locked;
    return python.attr("is_transparent")(wrapped(tensor)).cast<bool>();
  }

  void begin() {
    observer.emplace(forward);
  }
  // The forward has run, or raised.
  void end() {
    observer.reset();
  }
  // It is over; returns its tape.
  std::shared_ptr<const Tape> finish() {
    if (observer.has_value()) {
      auto& running = *observer;
      struct End {
        std::optional<Observer>& observer;
        ~End() {
          observer.reset();
        }
      } const end{observer};
      running.rethrow();
    }
    tape = forward.close();
    return tape;
  }

  // `substitute`: gives captured results instead of this frame's captures, in tests.
  void replay_again(
      const std::map<int32_t, py::object>& elsewhere,
      const std::vector<int32_t>& changing,
      const std::optional<py::function>& substitute) {
    std::map<int32_t, at::Tensor> memory;
    for (const auto& [storage, tensor] : elsewhere) {
      memory[storage] = tensor_of(tensor);
    }
    Pass pass = begin_pass(memory, changing);
    std::vector<at::Tensor> found;
    {
      const py::gil_scoped_release unlocked;
      found = memplug::replay(*tape, actions, std::move(pass.bases), forward.drawn, pass.wanted, [&](size_t index) {
        const py::gil_scoped_acquire locked;
        return substitute ? substitute_of((*substitute)(index)) : Frame::substitute(index);
      });
    }
    end_pass(pass, found);
  }

  static Substitute substitute_of(const py::tuple& parts) {
    Substitute all;
    all.rows = parts[1].cast<int64_t>();
    for (const py::handle& part : parts[0]) {
      all.tensors.push_back(tensor_of(part));
    }
    return all;
  }

  py::handle python;
  std::optional<Observer> observer;
};

void add_flow(py::module_& module) {
  using Plan = std::map<size_t, std::tuple<std::string, double, bool>>;
  py::class_<Region, std::shared_ptr<Region>>(module, "Region")
      .def(py::init<>())
      .def("plan", [](Region& region, const std::optional<Plan>& plan) {
        region.change([&](Policy& changed) {
          changed.unneeded.clear(); // learnt under the former plan
          changed.plan.reset();
          if (plan) {
            changed.plan.emplace();
            for (const auto& [index, planned] : *plan) {
              const auto& [name, fraction, keep] = planned;
              (*changed.plan)[index] = {name, {fraction, keep}};
            }
          }
        });
      })
      .def("decide", [](const Region& region, size_t index, const std::string& name, const std::string& overload) {
        const Decision decision = region.policy->decide(index, *operator_named(name, overload));
        return std::make_pair(decision.fraction, decision.keep);
      })
      .def_property_readonly("unneeded", [](const Region& region) {
        std::map<size_t, std::string> found;
        for (const auto& [index, op] : region.policy->unneeded) {
          found[index] = op->name;
        }
        return found;
      })
      .def("leave_out", [](Region& region, size_t index, const std::string& name, const std::string& overload) {
        region.leave_out(index, operator_named(name, overload));
      })
      .def_property(
          "rows",
          [](const Region& region) { return region.policy->rows; },
          [](Region& region, double rows) { region.change([&](Policy& changed) { changed.rows = rows; }); })
      .def_readwrite("forward_bytes", &Region::forward_bytes)
      .def_readwrite("opaque", &Region::opaque)
      .def_readwrite("lingers", &Region::lingers)
      .def_readwrite("released", &Region::released)
      .def_readonly("live", &Region::live)
      .def_readwrite("peak", &Region::peak);
  py::class_<Flow, std::shared_ptr<Flow>>(module, "Flow")
      .def(py::init([](std::shared_ptr<Transfer> transfer, const std::string& device, int64_t min_offload_bytes) {
        return std::make_shared<Flow>(std::move(transfer), c10::Device(device).type(), min_offload_bytes);
      }))
      .def("make_room", &Flow::make_room)
      .def("begin", [](Flow& flow, const std::shared_ptr<Running>& frame) { flow.begin(frame); })
      .def("pump", [](Flow& flow, Running& frame) { flow.pump(frame); })
      .def_readwrite("share", &Flow::share)
      .def_readonly("forwards", &Flow::forwards)
      .def_readonly("live", &Flow::live)
      .def_readonly("input_bytes", &Flow::input_bytes)
      .def_readonly("expected_bytes", &Flow::expected_bytes)
      .def_readonly("unplanned", &Flow::unplanned)
      .def_property_readonly("recomputed_bytes", [](const Flow& flow) { return flow.ledger->recomputed_bytes; })
      .def_property_readonly("waiting", [](const Flow& flow) { return flow.ledger->waiting; });
}

void add_tape(py::module_& module) {
  py::class_<Tape, std::shared_ptr<Tape>>(module, "Tape", py::dynamic_attr())
      .def("__len__", [](const Tape& tape) { return tape.records.size(); })
      .def("record", [](const Tape& tape, size_t index) { return described(tape.records.at(index)); })
      .def_readonly("given", &Tape::given)
      .def_readonly("nbytes", &Tape::nbytes)
      .def_readonly("opaque", &Tape::opaque);
}

} // namespace

void add_forwards(py::module_& module) {
  py::register_exception<Diverged>(module, "Diverged");
  module.def("describe_operators", [](py::object describe) {
    // never destroyed: operators are looked up by threads that outlive Python
    auto* kept = new py::object(std::move(describe));
    describe_operators([kept](const std::string& name, const std::string& overload) {
      const py::gil_scoped_acquire locked;
      return (*kept)(name, overload).cast<uint32_t>();
    });
    stand_before_exchanges(&Observer::is_active);
  });
  module.def("pause", &Observer::pause);
  module.def("resume", &Observer::resume);
  module.def("paused", &Observer::paused);
  module.attr("unpack") = unpack_hook();
  add_tape(module);
  add_flow(module);
  py::class_<Running, std::shared_ptr<Running>>(module, "Frame")
      .def(py::init([](const std::vector<std::shared_ptr<Tape>>& known, py::handle frame, std::shared_ptr<Flow> flow,
                       std::shared_ptr<Region> region, bool regathers) {
        return std::make_shared<Running>(
            Tapes(known.begin(), known.end()), frame, std::move(flow), std::move(region), regathers);
      }))
      .def_property(
          "timed", [](const Running& r) { return r.is_timed; }, [](Running& r, bool on) { r.is_timed = on; })
      .def("follow", [](Running& r, const std::shared_ptr<Running>& previous) { r.previous = previous; })
      .def("enter", [](Running& r, py::handle tensor, bool swaps) { return r.enter(tensor_of(tensor), swaps); })
      .def("pack", [](const std::shared_ptr<Running>& r) { return pack_hook(r, r->python); })
      .def("begin", &Running::begin)
      .def("end", &Running::end)
      .def("finish", [](Running& r) { return std::const_pointer_cast<Tape>(r.finish()); })
      .def("close", &Running::close)
      .def("blind", [](Running& r, uint32_t reasons) { r.forward.blind(reasons); })
      .def("decide", py::overload_cast<const std::map<size_t, bool>&, const std::vector<size_t>&>(&Running::decide))
      .def("reads", &Running::reads)
      .def("replay", &Running::replay_again, py::arg("elsewhere"), py::arg("changing"), py::arg("substitute") = py::none())
      .def("acquire", [](Running& r, Swapped& part) { return wrapped(r.flow->transfer->acquire(part).first); })
      .def("consume", &Running::consume)
      .def("restore", [](Running& r, size_t index, py::handle tensor) { r.forward.restore(index, tensor_of(tensor)); })
      .def("take", [](Running& r, size_t index) { return wrapped(r.forward.take(index)); })
      .def("forget", [](Running& r) {
        for (size_t i = 0; i < r.forward.saved.size(); ++i) {
          r.forward.forget(i);
        }
      })
      .def("restored", [](const Running& r) {
        py::dict found;
        for (size_t i = 0; i < r.forward.saved.size(); ++i) {
          if (r.forward.saved[i].restored.defined()) {
            found[py::int_(i)] = wrapped(r.forward.saved[i].restored);
          }
        }
        return found;
      })
      .def("has_to_restore", [](const Running& r, size_t index) {
        const Forward::Saved& saved = r.forward.saved.at(index);
        return saved.alive && saved.way == Forward::Way::RECOMPUTED;
      })
      .def("storage_of", [](const Running& r, size_t index) { return r.forward.saved.at(index).use.storage; })
      .def_property_readonly("actions", [](const Running& r) {
        std::vector<int> all;
        for (const Action action : r.actions) {
          all.push_back(static_cast<int>(action));
        }
        return all;
      })
      .def_property_readonly("saved", [](const Running& r) { return r.forward.saved.size(); })
      .def_property_readonly(
          "followed", [](const Running& r) { return std::const_pointer_cast<Tape>(r.forward.followed()); })
      .def_property_readonly("saved_bytes", [](const Running& r) { return r.forward.saved_bytes; })
      .def_property_readonly("opaque", [](const Running& r) { return r.forward.opaque(); })
      .def_property_readonly("has_launches", &Running::has_launches)
      .def_readwrite("is_restored", &Running::is_restored)
      .def_readonly("is_opaque", &Running::is_opaque)
      .def_readonly("recomputes", &Running::recomputes)
      .def_readonly("communicates", &Running::communicates)
      .def_readonly("writes_input", &Running::writes_input)
      .def_readonly("offered", &Running::offered)
      .def_readonly("offered_bytes", &Running::offered_bytes)
      .def_readonly("spared", &Running::spared)
      .def_readonly("fetched", &Running::fetched);
}

} // namespace memplug
