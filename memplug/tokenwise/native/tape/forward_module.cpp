// Python bindings of forwards and tapes.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>

#include "arguments.h"
#include "as_written.h"
#include "calls.h"
#include "clock.h"
#include "exchange.h"
#include "observer.h"
#include "registry.h"
#include "running.h"
#include "saved_type.h"
#include "torch_private_csrc.h"

namespace py = pybind11;

namespace memplug {
namespace {

std::vector<int32_t> storages_of(const std::vector<Use>& uses) {
  std::vector<int32_t> numbers;
  for (const Use& use : uses) {
    numbers.push_back(use.storage);
  }
  return numbers;
}

py::tuple described(const Tape& tape, size_t index) {
  const Record& record = tape.records.at(index);
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
      pieces_of(tape, index).value_or(record.rows()),
      storages_of(record.inputs),
      record.made,
      record.written,
      storages_of(record.outputs),
      dimensions);
}

void add_flow(py::module_& module) {
  using Plan = std::map<size_t, std::tuple<std::string, double, bool>>;
  py::class_<Region, std::shared_ptr<Region>>(module, "Region")
      .def(py::init<std::string>())
      .def("copy", &Region::copy)
      .def("plan", [](Region& region, const std::optional<Plan>& plan) {
        region.change([&](Setting& changed) {
          changed.unneeded.clear(); // under the new plan backward may ask for other captures
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
        const Decision decision = region.setting->decide(index, *operator_named(name, overload));
        return std::make_pair(decision.fraction, decision.keep);
      })
      .def_property_readonly("unneeded", [](const Region& region) {
        std::map<size_t, std::string> found;
        for (const auto& [index, op] : region.setting->unneeded) {
          found[index] = op->name;
        }
        return found;
      })
      .def("leave_out", [](Region& region, size_t index, const std::string& name) {
        const size_t dot = name.find('.');
        const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
        // null if the operator's library is not loaded
        if (const Operator* const op = operator_named(name.substr(0, dot), overload)) {
          region.leave_out(index, op);
        }
      })
      .def_property(
          "rows",
          [](const Region& region) { return region.setting->rows; },
          [](Region& region, double rows) { region.change([&](Setting& changed) { changed.rows = rows; }); })
      .def_readwrite("planned_from", &Region::planned_from)
      .def_property_readonly("last", [](const Region& region) { return std::const_pointer_cast<Tape>(region.last); })
      .def_readwrite("forward_bytes", &Region::forward_bytes)
      .def_readonly("sent_bytes", &Region::sent_bytes)
      .def_readwrite("swaps_input", &Region::swaps_input)
      .def_readwrite("opaque", &Region::opaque)
      .def_readwrite("shares", &Region::shares)
      .def_property(
          "is_agreed",
          [](const Region& region) { return region.setting->is_agreed; },
          [](Region& region, bool agreed) { region.change([&](Setting& changed) { changed.is_agreed = agreed; }); })
      .def_readwrite("seen", &Region::seen)
      .def_readwrite("repeats", &Region::repeats)
      .def_property_readonly("may_talk", [](const Region& region) { return region.talks.value_or(true); })
      .def_property(
          "asks",
          [](const Region& region) { return region.asks.value_or(false); },
          [](Region& region, bool asks) { region.asks = asks; })
      .def_readwrite("communicates", &Region::communicates)
      .def_readwrite("offloads_late", &Region::offloads_late)
      .def("note_given", [](Region& region, int64_t bytes) { region.given_bytes.push_back(bytes); })
      .def_readonly("live", &Region::live)
      .def_readwrite("peak", &Region::peak);
  py::class_<Flow, std::shared_ptr<Flow>>(module, "Flow")
      .def(
          py::init([](std::shared_ptr<Transfer> transfer, const std::string& device, int64_t min_offload_bytes,
                      size_t buffers, bool regathers) {
            return std::make_shared<Flow>(
                std::move(transfer), c10::Device(device), min_offload_bytes, buffers, regathers);
          }),
          py::arg("transfer"),
          py::arg("device"),
          py::arg("min_offload_bytes"),
          py::arg("buffers"),
          py::arg("regathers") = false)
      .def("is_large", &Flow::is_large)
      .def("reserve", &Flow::reserve)
      .def_readwrite("largest_frame_bytes", &Flow::largest_frame_bytes)
      .def_readwrite("peak_held_bytes", &Flow::peak_held_bytes)
      .def_readwrite("most_held_bytes", &Flow::most_held_bytes)
      .def_readwrite("granted_bytes", &Flow::granted_bytes)
      .def("run", &Running::run)
      .def(
          "end_step",
          [](Flow& flow, const std::vector<std::shared_ptr<Region>>& regions) {
            flow.transfer->copies.drain();
            py::tuple given_bytes(regions.size());
            for (size_t i = 0; i < regions.size(); ++i) {
              given_bytes[i] = py::tuple(py::cast(regions[i]->end_step()));
            }
            return given_bytes;
          })
      .def("begin_micro_batch", [](Flow&) { Flow::begin_micro_batch(); })
      .def_readwrite("share", &Flow::share)
      .def_readonly("forwards", &Flow::forwards)
      .def_property_readonly("live", [](const Flow& flow) { return flow.live.size(); })
      .def_readonly("input_bytes", &Flow::input_bytes)
      .def_readonly("expected_bytes", &Flow::expected_bytes)
      .def_readonly("unplanned", &Flow::unplanned)
      .def_readonly("strayed", &Flow::strayed)
      .def_property_readonly("recomputed_bytes", [](const Flow& flow) { return flow.ledger->recomputed_bytes; })
      .def_property_readonly("tapes", &Flow::tapes)
      .def_property_readonly("waiting", [](const Flow& flow) { return flow.ledger->waiting; });
}

void add_tape(py::module_& module) {
  py::class_<Tape, std::shared_ptr<Tape>>(module, "Tape", py::dynamic_attr())
      .def("__len__", [](const Tape& tape) { return tape.records.size(); })
      .def("record", [](const Tape& tape, size_t index) { return described(tape, index); })
      .def("always_runs", [](const Tape& tape, size_t index) { return tape.records.at(index).always_runs(); })
      .def(
          "capture",
          [](const Tape& tape, size_t index) {
            return !tape.records.at(index).is_planned() ? "never" : pieces_of(tape, index) ? "rows" : "whole";
          })
      .def_readonly("given", &Tape::given)
      .def_readonly("nbytes", &Tape::nbytes)
      .def_readonly("opaque", &Tape::opaque)
      .def_property_readonly("fingerprint", &Tape::fingerprint);
}

void add_forwards(py::module_& module) {
  py::register_exception<Diverged>(module, "Diverged");
  py::register_exception<GroupGone>(module, "GroupGone");
  module.def("describe_operators", [](py::object describe) {
    // never destroyed: threads that outlive Python look up operators
    auto* kept = new py::object(std::move(describe));
    describe_operators([kept](const std::string& name, const std::string& overload) {
      const py::gil_scoped_acquire locked;
      return (*kept)(name, overload).cast<uint32_t>();
    });
  });
  module.def("bind_calls", &bind_calls);
  module.def("stand_before_exchanges", [] { stand_before_exchanges(&Observer::is_active); });
  module.def("leave_exchanges", &leave_exchanges);
  module.def("has_transform_stack", &has_transform_stack);
  module.def("pause", &Pause::begin);
  module.def("resume", &Pause::end);
  module.def("paused", &Pause::depth);
  module.def("address_taken", [](py::handle tensor) { Observer::address_taken(tensor_of(tensor)); });
  module.def("read", [](py::handle tensor) { Observer::read(tensor_of(tensor)); });
  module.def("given_bytes", &given_bytes);
  module.def("tensors_in", [](py::handle returned) {
    py::list found;
    for (const at::Tensor& tensor : tensors_in(returned)) {
      found.append(wrapped(tensor));
    }
    return found;
  });
  // The state before a custom function runs: the forward's progress, and the function's tensor arguments.
  struct Since {
    Forward::Progress progress;
    std::vector<at::Tensor> given;
    std::vector<uint32_t> versions;
    // copies of the arguments' bytes; undefined for parameters, and for tensors whose bytes memplug cannot read
    std::vector<at::Tensor> before;
  };
  py::class_<Since>(module, "Since").def(py::init([](py::handle arguments) {
    Forward& forward = Running::observed()->forward;
    auto given = tensors_in(arguments);
    auto versions = versions_of(given);
    const Pause unseen;
    const Suspension own;
    std::vector<at::Tensor> others, before(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      forward.read(given[i]);
      if (!is_parameter(given[i])) {
        others.push_back(given[i]);
        // tensors of the virtual device have no values
        const bool has_values = !given[i].is_privateuseone() && !given[i].is_meta();
        const bool has_bytes = has_values && !given[i].is_conj() && !given[i].is_neg() && !forward.may_be_unfinished(given[i]);
        before[i] = has_bytes ? Forward::bytes_of(given[i]).clone() : at::Tensor();
      }
    }
    forward.protect(others);
    return Since{forward.progress(), std::move(given), std::move(versions), std::move(before)};
  }));
  module.def("communicates", [](const Since& since) {
    return Running::observed()->forward.communicates(since.progress.begun);
  });
  using Written = std::vector<size_t>; // indices of tensors in `Since::given`
  // Returns none if the function launched no hidden kernels. Otherwise returns two lists of its arguments. First: those
  // that it may have written to without an operator. Second: all that it wrote to or returned; later calls may write to
  // these without an operator.
  module.def("hidden_writes", [](const Since& since, py::handle returned) -> std::optional<std::pair<Written, Written>> {
    Forward& forward = Running::observed()->forward;
    const Pause unseen;
    const Suspension own;
    const auto tensors = tensors_in(returned);
    const auto written = [&](size_t begun, const std::vector<at::Tensor>& given_back) {
      return forward.written_unseen(begun, since.given, since.versions, since.before, given_back);
    };
    const size_t begun = since.progress.begun;
    if (written(begun, {}).empty() && !forward.hides(since.progress, since.given, tensors)) {
      return std::nullopt;
    }
    const Written hidden = written(begun, tensors);
    forward.blind_to_writes(since.given, hidden);
    return std::pair(hidden, written(forward.begun(), tensors));
  });
  // Returns whether the function's operators wrote to a parameter, or to given memory that was not among its arguments.
  module.def("writes_elsewhere", [](const Since& since) {
    std::vector<at::Tensor> others;
    std::copy_if(since.given.begin(), since.given.end(), std::back_inserter(others), [](const at::Tensor& each) {
      return !is_parameter(each);
    });
    return Running::observed()->forward.writes_elsewhere(since.progress.begun, others);
  });
  // Notes the arguments of a function that are tensor subclasses with their own `__torch_dispatch__`.
  module.def("meet_wrappers", [](const py::args& arguments) {
    Running* const running = Running::observed();
    for (const py::handle each : arguments) {
      if (running != nullptr && THPVariable_Check(each.ptr()) && tensor_of(each).key_set().has(c10::DispatchKey::Python)) {
        running->forward.meet_wrapper(tensor_of(each));
      }
    }
  });
  module.def("is_undecided", [] { Running::observed()->region->is_undecided = true; });
  module.def("observes", [] { return Running::observed() != nullptr; });
  module.def("observing_executor", [] {
    const Running* const observed = Running::observed();
    return observed != nullptr ? observed->executor() : py::object(py::none());
  });
  module.def(
      "run_unit",
      [](py::object unit, const std::string& overload, const std::string& name, py::object state,
         py::object surroundings, const py::object& call, const py::tuple& arguments, const py::dict& keywords) {
        return Running::observed()->run_unit(
            std::move(unit), overload, name, std::move(state), std::move(surroundings), call, arguments, keywords);
      });
  struct Stance {};
  py::class_<Stance>(module, "AsWritten")
      .def(py::init<>())
      .def("__enter__", [](Stance&) { AsWritten::enter(); })
      .def("__exit__", [](Stance&, const py::args&) { AsWritten::leave(); });
  module.def("stance_before", &AsWritten::before);
  module.add_object("unpack", unpack_hook());
  add_tape(module);
  add_flow(module);
  py::class_<Running, std::shared_ptr<Running>>(module, "Frame")
      .def(py::init([](const std::vector<std::shared_ptr<Tape>>& known, std::shared_ptr<Flow> flow, std::shared_ptr<Region> region, py::object executor) {
        return std::make_shared<Running>(
            std::vector<std::shared_ptr<const Tape>>(known.begin(), known.end()),
            std::move(flow),
            std::move(region),
            std::move(executor),
            py::none(),
            py::none());
      }))
      // for tests: the steps of `run`, one by one
      .def("pack", [](const std::shared_ptr<Running>& r) { return pack_hook(r); })
      .def("begin", &Running::begin)
      .def("end", &Running::end)
      .def("finish", &Running::finish)
      .def("close", &Running::close)
      .def("restored", [](const Running& r) {
        py::dict found;
        for (size_t i = 0; i < r.forward.saved.size(); ++i) {
          if (r.forward.saved[i].restored.defined()) {
            found[py::int_(i)] = wrapped(r.forward.saved[i].restored);
          }
        }
        return found;
      })
      .def_property_readonly("actions", [](const Running& r) {
        std::vector<int> all;
        for (const Action action : r.decisions->actions) {
          all.push_back(static_cast<int>(action));
        }
        return all;
      })
      .def("replay_with", [](Running& r, const py::function& substitute) {
        r.replay_with([&](size_t index) {
          const py::gil_scoped_acquire locked;
          const py::tuple parts = substitute(index);
          Substitute all;
          all.rows = parts[1].cast<int64_t>();
          for (const py::handle part : parts[0]) {
            all.tensors.push_back(tensor_of(part));
          }
          return all;
        });
      })
      // for a recompute pass that Python runs
      .def("decide", [](Running& r, const std::map<size_t, bool>& whole, const std::vector<size_t>& launches) {
        std::vector<CapturedOperator> captured;
        for (const auto& [index, is_whole] : whole) {
          captured.push_back({index, is_whole});
        }
        return r.decide(captured, launches);
      })
      .def("replay", &Running::replay)
      .def("forget", &Running::forget)
      .def("arguments", &Running::arguments)
      .def("consume_inputs", &Running::consume_inputs)
      .def_property_readonly("unit_states", &Running::unit_states)
      .def_property_readonly("leaves", &Running::leaves)
      .def("has_to_restore", [](const Running& r, size_t index) {
        const Forward::Saved& saved = r.forward.saved.at(index);
        return saved.alive && saved.way == Forward::Way::RECOMPUTED && !saved.stale;
      })
      .def("restore", [](Running& r, size_t index, py::handle tensor) { r.forward.restore(index, tensor_of(tensor)); })
      .def("saved_as", [](const Running& r, size_t index) {
        const Geometry& geometry = r.forward.saved.at(index).use.geometry;
        return std::make_pair(py::tuple(py::cast(std::vector<int64_t>(geometry.size.begin(), geometry.size.end()))), geometry.dtype);
      })
      .def_readwrite("is_restored", &Running::is_restored)
      .def_property_readonly("has_launches", &Running::has_launches)
      .def_readonly("communicates", &Running::communicates)
      // read-only attributes, for tests and the planner
      .def_property_readonly("tape", [](const Running& r) { return std::const_pointer_cast<Tape>(r.tape); })
      .def_property_readonly(
          "followed", [](const Running& r) { return std::const_pointer_cast<Tape>(r.forward.followed()); })
      .def_property_readonly("ambient", [](const Running& r) { return r.ambient->described(); })
      .def_property_readonly("saved", [](const Running& r) { return r.forward.saved.size(); })
      .def("storage_of", [](const Running& r, size_t index) { return r.forward.saved.at(index).use.storage; })
      .def_property_readonly("saved_bytes", [](const Running& r) { return r.forward.saved_bytes; })
      .def_readonly("given_bytes", &Running::given_bytes)
      .def_property_readonly("opaque", [](const Running& r) { return r.forward.opaque(); })
      .def_readonly("is_opaque", &Running::is_opaque)
      .def_readonly("keeps", &Running::keeps)
      .def_property_readonly("talks", [](const Running& r) { return r.forward.communicates(); })
      .def_readonly("offered", &Running::offered)
      .def_readonly("offered_bytes", &Running::offered_bytes)
      .def_readonly("spared", &Running::spared)
      .def_readonly("received", &Running::received)
      .def_readonly("call", &Running::call)
      .def_readonly("surroundings", &Running::surroundings)
      .def_readonly("times", &Running::times)
      .def_readonly("state", &Running::state)
      .def_readonly("buffers", &Running::buffers);
}

const Registered forward_part({Level::ASKING, &add_forwards, nullptr, nullptr, &Observer::end_in_child});

} // namespace
} // namespace memplug
