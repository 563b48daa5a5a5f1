// What Python sees of forwards and tapes: they are added to the module of module.cpp.
#include "forward_module.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "exchange.h"
#include "observer.h"
#include "replay.h"
#include "saved_type.h"

namespace py = pybind11;

namespace memplug {
namespace {

using Tapes = std::vector<std::shared_ptr<const Tape>>;

// The same memory and version counter, without the graph.
at::Tensor alias_of(const at::Tensor& tensor) {
  auto* const original = tensor.unsafeGetTensorImpl();
  auto alias = original->shallow_copy_and_detach(original->version_counter(), false);
  alias->set_allow_tensor_metadata_change(true);
  return at::Tensor(std::move(alias));
}

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

// A forward with its observer, and what Python is told: methods of `frame`, which is alive while the forward runs.
struct Running final : Listener {
  Running(Tapes known, py::handle frame, bool regathers, std::shared_ptr<Ledger> ledger)
      : frame(frame),
        forward(std::make_shared<Forward>(
            std::move(known), this, regathers ? is_parameter : nullptr, std::move(ledger))) {}

  void time(size_t index, bool over) override {
    const py::gil_scoped_acquire locked;
    frame.attr("time")(index, over);
  }
  void before_write(int32_t storage, const at::Tensor& tensor) override {
    const py::gil_scoped_acquire locked;
    frame.attr("before_write")(storage, wrapped(tensor));
  }
  void capture(size_t index, c10::ArrayRef<c10::IValue> results) override {
    const py::gil_scoped_acquire locked;
    py::list tensors;
    each_use(results, [&](const ArgumentPath&, const at::Tensor& tensor) { tensors.append(wrapped(tensor)); });
    frame.attr("capture")(index, tensors);
  }

  bool is_transparent(const at::Tensor& tensor) override {
    const py::gil_scoped_acquire locked;
    return frame.attr("is_transparent")(wrapped(tensor)).cast<bool>();
  }

  void begin() {
    observer.emplace(*forward);
  }
  // The forward is over, or has raised.
  void end() {
    observer.reset();
  }
  std::shared_ptr<const Tape> close() {
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
    tape = forward->close();
    return tape;
  }

  // Reads of each captured storage, and whether anything has to be recomputed.
  std::pair<std::map<int32_t, int>, bool> sort(bool direct) {
    forward->sort(direct);
    std::map<int32_t, int> views;
    bool recomputes = false;
    for (const Forward::Saved& saved : forward->saved) {
      if (saved.alive && saved.way == Forward::Way::VIEW) {
        ++views[saved.use.storage];
      }
      recomputes = recomputes || (saved.alive && saved.way == Forward::Way::RECOMPUTED);
    }
    return {views, recomputes};
  }

  std::vector<Action> actions_for(
      const std::map<size_t, bool>& captured, const std::vector<size_t>& launches, bool every_saved) const {
    std::vector<Captured> all;
    for (const auto& [index, whole] : captured) {
      all.push_back({index, whole});
    }
    std::vector<int32_t> storages;
    for (const Forward::Saved& saved : forward->saved) {
      if (saved.use.storage >= 0 && (every_saved || (saved.alive && saved.way == Forward::Way::RECOMPUTED))) {
        storages.push_back(saved.use.storage);
      }
    }
    return actions_of(*tape, all, launches, storages);
  }

  static std::vector<size_t> substituted(const std::vector<Action>& actions) {
    std::vector<size_t> indices;
    for (size_t i = 0; i < actions.size(); ++i) {
      if (actions[i] == Action::SUBSTITUTE) {
        indices.push_back(i);
      }
    }
    return indices;
  }

  // Which captured results a recompute pass would ask for that restores all that was saved.
  std::vector<size_t> asked(const std::map<size_t, bool>& captured, const std::vector<size_t>& launches) const {
    return substituted(actions_for(captured, launches, true));
  }

  // What the recompute pass does; which captured results it asks for, and whether other ranks take part.
  std::pair<std::vector<size_t>, bool> decide(
      const std::map<size_t, bool>& captured, const std::vector<size_t>& launches) {
    actions = actions_for(captured, launches, false);
    return {substituted(actions), communicates(*tape, actions)};
  }

  std::vector<Use> wanted() const {
    std::vector<Use> uses;
    for (size_t i = 0; i < forward->saved.size(); ++i) {
      const Forward::Saved& saved = forward->saved[i];
      if (saved.alive && saved.way == Forward::Way::RECOMPUTED) {
        uses.push_back(saved.use);
      }
    }
    return uses;
  }

  // Storages that were given and that the pass reads.
  std::vector<int32_t> reads() const {
    return read_by(*tape, actions, wanted());
  }

  // Restores all saved tensors that have to be recomputed.
  void replay(const std::map<int32_t, py::object>& inputs, const std::vector<int32_t>& changing, const py::function& substitute) {
    std::vector<size_t> indices;
    for (size_t i = 0; i < forward->saved.size(); ++i) {
      if (forward->saved[i].alive && forward->saved[i].way == Forward::Way::RECOMPUTED) {
        indices.push_back(i);
      }
    }
    const std::vector<Use> uses = wanted();
    Bases bases(tape->nbytes.size());
    for (const int32_t storage : read_by(*tape, actions, uses)) {
      if (const auto found = inputs.find(storage); found != inputs.end()) {
        bases[storage] = tensor_of(found->second);
        continue;
      }
      const Given& given = forward->given[storage];
      TORCH_CHECK(given.tensor.defined(), "memplug: a region input is not there in the recompute pass");
      const bool changes = std::find(changing.begin(), changing.end(), storage) != changing.end();
      TORCH_CHECK(
          changes || given.tensor.is_inference() || given.tensor._version() == given.version,
          "one of the variables needed for gradient computation has been modified by an inplace operation: a ",
          given.tensor.sizes(),
          " tensor that its region reads is at version ",
          given.tensor._version(),
          "; expected version ",
          given.version);
      TORCH_CHECK(
          static_cast<int64_t>(tape->regathered[storage] ? given.tensor.nbytes() : given.tensor.storage().nbytes()) >=
              forward->storages.nbytes[storage],
          "memplug: the memory of a ",
          given.tensor.sizes(),
          " tensor that a region reads was taken away between its forward and its backward");
      bases[storage] = given.tensor;
    }
    std::vector<at::Tensor> found;
    {
      const py::gil_scoped_release unlocked;
      found = memplug::replay(*tape, actions, std::move(bases), forward->drawn, uses, [&](size_t index) {
        const py::gil_scoped_acquire locked;
        const py::tuple parts = substitute(index);
        Substitute all;
        all.rows = parts[1].cast<int64_t>();
        for (const py::handle& part : parts[0]) {
          all.tensors.push_back(tensor_of(part));
        }
        return all;
      });
    }
    for (size_t i = 0; i < found.size(); ++i) {
      forward->restore(indices[i], found[i]);
    }
  }

  py::handle frame;
  std::shared_ptr<Forward> forward;
  std::shared_ptr<const Tape> tape;
  std::optional<Observer> observer;
  std::vector<Action> actions;
};

void mark(std::vector<bool>& marks, const std::vector<size_t>& indices, size_t size) {
  marks.resize(std::max(marks.size(), size));
  for (const size_t index : indices) {
    marks.resize(std::max(marks.size(), index + 1));
    marks[index] = true;
  }
}

void add_ledger(py::module_& module) {
  py::class_<Ledger, std::shared_ptr<Ledger>>(module, "Ledger")
      .def(py::init<>())
      .def_readwrite("recomputed_bytes", &Ledger::recomputed_bytes)
      .def_readwrite("waiting", &Ledger::waiting)
      .def("lend", [](Ledger& ledger, py::handle tensor) { ledger.lent.add(tensor_of(tensor)); })
      .def("lent_bytes", [](Ledger& ledger) { return ledger.lent.nbytes(); });
  module.def("alias", [](py::handle tensor) { return wrapped(alias_of(tensor_of(tensor))); });
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
  add_ledger(module);
  py::class_<Running>(module, "Forward")
      .def(py::init([](const std::vector<std::shared_ptr<Tape>>& known, py::handle frame, bool regathers,
                       std::shared_ptr<Ledger> ledger) {
        return std::make_unique<Running>(Tapes(known.begin(), known.end()), frame, regathers, std::move(ledger));
      }))
      .def_property(
          "timed", [](const Running& r) { return r.is_timed; }, [](Running& r, bool on) { r.is_timed = on; })
      .def("plan", [](Running& r, const std::vector<size_t>& indices) { mark(r.planned, indices, 0); })
      .def("name", [](Running& r, const std::vector<size_t>& indices, size_t records) { mark(r.named, indices, records); })
      .def("restore", [](Running& r, size_t index, py::handle tensor) { r.forward->restore(index, tensor_of(tensor)); })
      .def("take", [](Running& r, size_t index) { return wrapped(r.forward->take(index)); })
      .def("restored", [](const Running& r) {
        py::dict found;
        for (size_t i = 0; i < r.forward->saved.size(); ++i) {
          if (r.forward->saved[i].restored.defined()) {
            found[py::int_(i)] = wrapped(r.forward->saved[i].restored);
          }
        }
        return found;
      })
      .def("forget", [](Running& r) {
        for (size_t i = 0; i < r.forward->saved.size(); ++i) {
          r.forward->forget(i);
        }
      })
      .def("pack", [](const Running& r) { return pack_hook(r.forward, r.frame); })
      .def("enter", [](Running& r, py::handle tensor, bool captured) { return r.forward->enter(tensor_of(tensor), captured); })
      .def("begin", &Running::begin)
      .def("end", &Running::end)
      .def("close", [](Running& r) { return std::const_pointer_cast<Tape>(r.close()); })
      .def("blind", [](Running& r, uint32_t reasons) { r.forward->blind(reasons); })
      .def("set_captured", [](Running& r, py::handle tensor, bool whole) {
        const at::Tensor& unpacked = tensor_of(tensor);
        const int32_t storage = r.forward->storages.find(unpacked);
        r.forward->set_captured(storage, whole, unpacked.scalar_type());
        return storage;
      })
      .def("record", [](const Running& r, size_t index) { return described(r.forward->tape().records.at(index)); })
      .def("maker_of", [](const Running& r, int32_t storage, size_t before) { return r.forward->tape().maker_of(storage, before); })
      .def("sole_maker_of", [](const Running& r, size_t index) { return r.forward->tape().sole_maker_of(index); })
      .def("sort", &Running::sort)
      .def("asked", &Running::asked)
      .def("decide", &Running::decide)
      .def("reads", &Running::reads)
      .def("actions", [](const Running& r) {
        std::vector<int> all;
        for (const Action action : r.actions) {
          all.push_back(static_cast<int>(action));
        }
        return all;
      })
      .def("replay", &Running::replay)
      .def("is_alive", [](const Running& r, size_t index) { return r.forward->saved.at(index).alive; })
      .def("way", [](const Running& r, size_t index) { return static_cast<int>(r.forward->saved.at(index).way); })
      .def("storage_of", [](const Running& r, size_t index) { return r.forward->saved.at(index).use.storage; })
      .def("view", [](const Running& r, size_t index, py::handle base) {
        return wrapped(tensor_at(tensor_of(base), r.forward->saved.at(index).use.geometry));
      })
      .def_property_readonly("saved", [](const Running& r) { return r.forward->saved.size(); })
      .def_property_readonly("followed", [](const Running& r) { return std::const_pointer_cast<Tape>(r.forward->followed()); })
      .def_property_readonly("opaque", [](const Running& r) { return r.forward->opaque(); })
      .def_property_readonly("saved_bytes", [](const Running& r) { return r.forward->saved_bytes; })
      .def_property_readonly("pending_bytes", [](const Running& r) { return r.forward->pending_bytes; })
      .def_property_readonly("largest_saved_bytes", [](const Running& r) { return r.forward->largest_saved_bytes; });
}

} // namespace memplug
