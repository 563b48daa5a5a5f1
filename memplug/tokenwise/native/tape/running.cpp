#include "running.h"

#include <algorithm>
#include <string_view>

#include "as_written.h"
#include "calls.h"
#include "clock.h"
#include "layouts.h"
#include "saved_type.h"
#include "torch_private_csrc.h"

namespace py = pybind11;

namespace memplug {
namespace {

using Tapes = std::vector<std::shared_ptr<const Tape>>;

// While an instance lives, autograd passes each tensor that it saves to the frame's pack hook.
class SavedTensorHooks {
 public:
  explicit SavedTensorHooks(const std::shared_ptr<Frame>& frame) {
    autograd().attr(PUSH_HOOKS)(pack_hook(frame), unpack_hook());
  }
  ~SavedTensorHooks() {
    autograd().attr(POP_HOOKS)();
  }
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  static py::handle autograd() {
    static PyObject* const module = py::module_::import(AUTOGRAD).release().ptr();
    return module;
  }
};

// Returns whether the `__torch_dispatch__` of the tensor subclass `name` only calls other operators, which the observer
// sees.
bool is_transparent_type(const char* name) {
  const std::string_view type = name;
  return type == "AsyncCollectiveTensor" || type == "DTensor";
}

} // namespace

Running::Running(
    Tapes known,
    std::shared_ptr<Flow> flow,
    std::shared_ptr<Region> region,
    py::object executor,
    py::object region_object,
    py::object times)
    : Frame(std::move(known), flow, std::move(region), flow->regathers ? is_parameter : nullptr),
      times(std::move(times)),
      buffers(py::none()),
      executor_(std::move(executor)),
      region_object_(std::move(region_object)) {
  is_timed = !this->times.is_none();
}

// -- forward ----------------------------------------------------------------------------------------------------------

py::object Running::run(
    const std::shared_ptr<Flow>& flow,
    const std::shared_ptr<Region>& region,
    py::object executor,
    py::object region_object,
    py::object times,
    py::object surroundings,
    py::object state,
    py::object call,
    const py::tuple& arguments,
    const py::dict& keywords) {
  std::shared_ptr<Running> frame;
  {
    const Suspension own;
    flow->make_room();
    frame = std::make_shared<Running>(
        region->opaque ? Tapes() : flow->known(*region),
        flow,
        region,
        std::move(executor),
        std::move(region_object),
        std::move(times));
    frame->is_unrepeatable = !state.is_none() && !calls().state.unknown(state).empty();
    frame->forward.holds =
        frame->is_unrepeatable || Modes::around() || (region->may_stray() && !calls().executor.is_alone(frame->executor_));
    // an opaque region's tensors cannot be recomputed while its forward runs. Holding them does not raise the peak:
    // backward runs the module again, and then holds as many tensors
    frame->forward.holds_meanwhile = region->asks.value_or(true) || region->opaque;
    region->is_undecided = false;
    frame->ambient.emplace(flow->device);
    frame->modes.emplace();
    frame->surroundings = std::move(surroundings);
    frame->state = std::move(state);
    frame->call = std::move(call);
    frame->enter(arguments, keywords);
    flow->begin(frame);
    if (frame->is_timed) {
      calls().times.begin(frame->times);
    }
  }
  py::object out;
  {
    const AsWritten as_written;
    const WithoutAutocastCache casts(frame->ambient->casts());
    const SavedTensorHooks hooks(frame);
    struct Ends {
      Running& frame;
      ~Ends() {
        frame.end();
      }
    } const ends{*frame};
    frame->begin();
    out = py::reinterpret_steal<py::object>(PyObject_Call(frame->call.ptr(), arguments.ptr(), keywords.ptr()));
    if (!out) {
      ++flow->strayed;
      throw py::error_already_set();
    }
    frame->finish();
  }
  const Suspension own;
  frame->over();
  return out;
}

void Running::enter(const py::tuple& arguments, const py::dict& keywords) {
  const auto item = [&](py::handle value) { items_.push_back(item_of(value)); };
  arguments_ = Containers::of(arguments, item);
  keywords_ = Containers::of(keywords, item);
}

// Swaps an argument whole if it is a tensor through which gradients flow; holds any other tensor.
Running::Item Running::item_of(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    return {py::reinterpret_borrow<py::object>(object), nullptr, nullptr};
  }
  const at::Tensor& value = tensor_of(object);
  given_bytes += memory_bytes(value);
  const bool swaps = region->swaps_input && value.requires_grad() && !value.is_leaf();
  auto swapped = Frame::enter(value, swaps);
  const int32_t storage = is_wrapped(value) ? -1 : forward.storages.find(value);
  const bool is_subclass = !THPVariable_CheckExact(object.ptr()), parameter = is_subclass && is_parameter(value);
  py::object type = parameter ? py::object() : type_of(object);
  if (swapped != nullptr) {
    return {{}, std::move(swapped), nullptr, storage, Geometry::of(value), value.requires_grad(), std::move(type)};
  }
  return {{}, nullptr, std::make_shared<Held>(value, parameter), storage, {}, false, std::move(type)};
}

void Running::finish() {
  if (observer_.has_value()) {
    struct End {
      Running& running;
      ~End() {
        running.end();
      }
    } const end{*this};
    observer_->rethrow();
  }
  tape = forward.close();
}

// Ends the forward: closes the frame, and updates the region by what the forward has shown.
void Running::over() {
  // Backward reads captured tensors directly, unless a recompute pass may launch collectives: then all ranks must run
  // the pass, even if they swapped different rows. After a region's first forward memplug knows whether the pass
  // launches any; in the first forward it assumes so if there are other ranks.
  const bool direct = !flow->regathers && !region->communicates &&
      (region->seen || calls().executor.is_alone(executor_));
  close(direct);
  flow->transfer->streams().spend_forward(static_cast<int64_t>(tape->records.size()));
  // the region's first forward does not count: it may follow another region's tape only because both had no tokens
  region->repeats = region->seen && forward.followed() != nullptr;
  if (!region->repeats || !region->talks) {
    region->talks = region->talks.value_or(false) || forward.communicates();
  }
  const std::optional<uint64_t> followed = is_opaque ? std::nullopt : std::optional(tape->fingerprint());
  flow->strayed += followed != region->planned_from ? 1 : 0;
  if (!is_opaque) {
    flow->keep(*region, tape);
  } else if (!(region->opaque && region->seen)) {
    calls().executor.note_opaque(executor_, region_object_, forward.opaque(), why_it_keeps());
  }
  if (!is_opaque || keeps) {
    state = py::none();
  }
  // a forward does not count if it was opaque only because of functions that are units from the next forward on: then
  // `note_opaque` has not marked the region as opaque
  region->seen = region->seen || !is_opaque || region->opaque;
  region->asks = region->asks.value_or(false);
  ++region->forwards;
  region->communicates = region->communicates || communicates;
  region->given_bytes.push_back(given_bytes);
  if (is_timed) {
    calls().executor.note_timed(executor_, region_object_, std::static_pointer_cast<Running>(shared_from_this()));
  }
}

std::string Running::why_it_keeps() const {
  if (!keeps) {
    return "";
  }
  if (is_unrepeatable) {
    return calls().state.unknown(state);
  }
  return (forward.opaque() & CHANGED) != 0 ? "a dispatch mode changes its operators" : "it communicates";
}

void Running::note_reads(const Record& record) {
  if (has_unread()) {
    const Locked locked;
    Frame::note_reads(record);
  }
}

void Running::time(size_t index, bool over) {
  const Locked locked;
  calls().times.time(times, index, over);
}

void Running::capture(size_t index, c10::ArrayRef<c10::IValue> results) {
  const Locked locked;
  Frame::capture(index, results);
}

bool Running::is_transparent(const at::Tensor& tensor) {
  const Locked locked;
  return is_transparent_type(Py_TYPE(wrapped(tensor).ptr())->tp_name);
}

// -- backward ---------------------------------------------------------------------------------------------------------

void Running::begin_backward() {
  calls().times.begin_backward(times);
}

void Running::restore() {
  const ModesAround::Again as_in_forward(*modes);
  flow->transfer->streams().spend_backward();
  if (keeps && !flow->regathers) {
    replay();
    is_restored = true;
    return;
  }
  if (!is_opaque && !is_timed && buffers.is_none() && !calls().executor.stands_around(executor_)) {
    try {
      forget();
      replay();
      is_restored = true;
      return;
    } catch (const Diverged&) {
      // below, `executor.restore` calls `replay`, which throws this error again; `executor.restore` then handles it
      failed_ = std::current_exception();
    } catch (const GroupGone&) {
      failed_ = std::current_exception();
    }
  }
  calls().executor.restore(executor_, std::static_pointer_cast<Running>(shared_from_this()), region_object_);
}

void Running::explain() {
  py::error_already_set error; // takes the pending error, since the calls below run Python
  if (error.matches(py::module_::import("torch").attr("OutOfMemoryError"))) {
    calls().executor.explain(executor_, "recompute", region_object_, error.value());
  }
  if (error.matches(PyExc_RuntimeError)) {
    const py::object raised = calls().executor.with_region(executor_, region_object_, error.value());
    PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
    return;
  }
  error.restore();
}

void Running::replay() {
  replay_with([this](size_t index) {
    const py::gil_scoped_acquire locked;
    return Frame::substitute(index);
  });
}

void Running::replay_with(const std::function<Substitute(size_t)>& substitute) {
  if (keeps) {
    for (const size_t index : recomputed()) {
      forward.restore(index, forward.saved[index].kept);
    }
    return;
  }
  if (failed_ != nullptr) { // a failed pass cannot run again: captured tensors that it has read may be gone
    std::rethrow_exception(std::exchange(failed_, nullptr));
  }
  Restoration pass = begin_pass();
  end_pass(pass, run_tape(*tape, decisions->actions, std::move(pass.bases), pass.wanted, substitute));
}

std::vector<at::Tensor> Running::run_tape(
    const Tape& own_tape,
    const std::vector<Action>& actions,
    Bases bases,
    const std::vector<const Use*>& wanted,
    const std::function<Substitute(size_t)>& captured) {
  const Helpers helpers{captured, [&](size_t index, const auto& given, const auto& needed) {
                          const py::gil_scoped_acquire locked;
                          return run_unit_again(index, given, needed);
                        }};
  std::optional<AsWritten> as_written; // set once for all units
  if (std::any_of(units_.begin(), units_.end(), [&](const auto& unit) {
        return unit.first < actions.size() && actions[unit.first] == Action::RUN;
      })) {
    as_written.emplace();
  }
  const py::gil_scoped_release unlocked;
  return memplug::replay(own_tape, actions, std::move(bases), forward.drawn, wanted, helpers);
}

std::vector<at::Tensor> Running::run_again(
    const PassActions& its, Bases bases, const std::vector<const Use*>& wanted) {
  const ModesAround::Again as_in_forward(*modes);
  const auto captured = [](size_t) -> Substitute { throw Diverged("a capture is needed"); };
  const auto run = [&] { return run_tape(*its.tape, its.actions, std::move(bases), wanted, captured); };
  if (buffers.is_none()) {
    return run();
  }
  // while the operators run, put the former values back into memory that the forward wrote to
  const py::object before = calls().buffers.as_before(buffers);
  before.attr("__enter__")();
  std::vector<at::Tensor> found;
  std::exception_ptr failed; // `__exit__` may raise, so it runs in no destructor
  try {
    found = run();
  } catch (...) {
    failed = std::current_exception();
  }
  before.attr("__exit__")(py::none(), py::none(), py::none());
  if (failed != nullptr) {
    std::rethrow_exception(failed);
  }
  return found;
}

py::tuple Running::arguments() {
  // the pass may write through any argument. So if the forward wrote to a storage, all arguments in it share one copy
  // of it.
  std::map<int32_t, at::Tensor> copies;
  const auto written = [&](int32_t storage, const at::Tensor& former, const Geometry& geometry, bool requires_grad) {
    const auto copy = copies.try_emplace(storage).first;
    if (!copy->second.defined()) {
      copy->second = copy_of(former);
    }
    const at::Tensor memory = alias_at(copy->second, geometry);
    return requires_grad ? no_leaf_at(memory) : memory;
  };
  auto item = items_.begin();
  const auto next = [&] {
    const Item& each = *item++;
    if (each.swapped != nullptr) {
      const at::Tensor former = flow->transfer->acquire(*each.swapped).first;
      return wrapped_as(
          each.type,
          writes_input ? written(each.storage, former, *each.geometry, each.requires_grad)
                       : tensor_at(former, *each.geometry).detach().set_requires_grad(each.requires_grad));
    }
    if (each.held == nullptr) {
      return each.value;
    }
    const at::Tensor& former = ordered(each.held->get());
    return wrapped_as(
        each.type,
        each.held->written ? written(each.storage, former, Geometry::of(former), each.held->requires_grad)
                           : former.detach().set_requires_grad(each.held->requires_grad));
  };
  py::object arguments = arguments_.around(next);
  return py::make_tuple(std::move(arguments), keywords_.around(next));
}

void Running::consume_inputs() {
  for (const auto& [storage, input] : inputs) {
    consume(input);
  }
}

} // namespace memplug
