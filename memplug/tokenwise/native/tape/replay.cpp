#include "replay.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "exchange.h"
#include "torch_private.h"
#include "views.h"

namespace memplug {
namespace {

using torch::jit::Stack;

// While an instance lives, operators run without autograd, autocast and function transforms. The tape already has the
// forward's casts. A function transform belongs to the backward that the pass runs in, not to the pass.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard casts{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard transforms{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode,
       c10::DispatchKey::FuncTorchVmapMode,
       c10::DispatchKey::VmapMode})};
};

// Sets generators for a pass, and restores their states at its end.
class Generators {
 public:
  ~Generators() {
    for (auto& [generator, state] : before_) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }

  void set(const std::vector<GeneratorDraw>& drawn) {
    for (const GeneratorDraw& each : drawn) {
      at::Generator generator = each.generator;
      const std::lock_guard<std::mutex> lock(generator.mutex());
      const bool known = std::any_of(
          before_.begin(), before_.end(), [&](const auto& before) { return before.first == generator; });
      if (!known) {
        before_.emplace_back(generator, generator.get_state());
      }
      generator.set_state(each.state);
    }
  }

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> before_;
};

class RecomputePass {
 public:
  RecomputePass(
      const Tape& tape,
      const std::vector<Action>& actions,
      Bases bases,
      const Helpers& helpers,
      LocalKeys outside)
      : tape_(tape), actions_(actions), bases_(std::move(bases)), helpers_(helpers), outside_(outside) {}

  // Finds, for each storage, the last operator that uses it.
  void find_last_uses(const std::vector<const Use*>& wanted) {
    last_.assign(bases_.size(), -1);
    for (size_t i = 0; i < tape_.records.size(); ++i) {
      if (actions_[i] != Action::SKIP) {
        for (const Use& use : tape_.records[i].inputs) {
          last_[use.storage] = static_cast<int64_t>(i);
        }
        for (const int32_t number : tape_.records[i].made) {
          last_[number] = static_cast<int64_t>(i);
        }
      }
    }
    for (const Use* const use : wanted) {
      last_[use->storage] = static_cast<int64_t>(tape_.records.size());
    }
  }

  void run(size_t index, const std::vector<GeneratorDraw>* drawn) {
    const Record& record = tape_.records[index];
    if (drawn != nullptr) {
      generators_.set(*drawn);
    }
    Stack stack = record.op->has(UNIT) || record.op->has(PART_OF_UNIT) ? Stack() : arguments_of(record);
    if (record.op->has(UNIT)) {
      stack.emplace_back(run_unit(index));
    } else if (record.op->has(PART_OF_UNIT)) {
      stack.emplace_back(std::exchange(parts_.at(index - first_part_), {}));
    } else {
      const at::AutoGradMode as_then(record.with_gradients);
      record.op->handle.callBoxed(&stack);
    }
    if (record.op->has(EXCHANGE)) {
      wait_for(stack);
    }
    for (const Use& use : record.outputs) {
      if (record.makes(use.storage) && !bases_[use.storage].defined()) {
        bases_[use.storage] = found(stack, use.path);
        check(record, use);
      }
    }
    release(record, index);
  }

  void substitute(size_t index) {
    const Record& record = tape_.records[index];
    Substitute found = take(index);
    if (found.rows >= 0 && record.op->has(PART_OF_UNIT)) {
      at::Tensor& made = found.tensors.front();
      const at::Tensor rest = std::exchange(parts_.at(index - first_part_), {});
      if (rest.sizes().slice(1) != made.sizes().slice(1) || rest.size(0) < made.size(0) - found.rows) {
        throw Diverged("a unit returned fewer rows, or rows of another shape, than in forward");
      }
      made.slice(0, found.rows).copy_(rest.slice(0, rest.size(0) - (made.size(0) - found.rows)));
    } else if (found.rows >= 0) {
      compute_rows(record, found.tensors.front(), found.rows);
    }
    for (size_t i = 0; i < found.tensors.size(); ++i) {
      bases_[record.form == Form::EXCHANGE ? record.made[i] : record.outputs[i].storage] = std::move(found.tensors[i]);
    }
    release(record, index);
  }

  const at::Tensor& base(int32_t storage) const {
    if (!bases_[storage].defined()) {
      throw Diverged("memory that an operator reads is missing in the recompute pass");
    }
    return bases_[storage];
  }

  at::Tensor at(const Use& use) const {
    return tape_.regathered[use.storage] ? alias(use) : tensor_at(base(use.storage), use.geometry);
  }

  // Returns the tensor that `use` describes, never the tensor in `bases_` itself.
  at::Tensor alias(const Use& use) const {
    const at::Tensor& memory = base(use.storage);
    Geometry geometry = use.geometry;
    geometry.offset += tape_.regathered[use.storage] ? memory.storage_offset() : 0;
    return alias_at(memory, geometry);
  }

 private:
  // Throws if an operator's result has another shape or dtype than in the forward. Shapes may depend on values.
  void check(const Record& record, const Use& use) const {
    const at::Tensor& made = bases_[use.storage];
    const bool same = record.op->has(PART_OF_UNIT)
        ? use.geometry.is_of(made)
        : made.sizes() == c10::IntArrayRef(use.geometry.size) && made.scalar_type() == use.geometry.dtype;
    if (!same) {
      std::ostringstream text;
      text << record.op->name << " returned " << made.sizes() << " in the recompute pass, but in forward " << c10::IntArrayRef(use.geometry.size);
      throw Diverged(text.str());
    }
  }

  static const at::Tensor& found(const Stack& stack, const ArgumentPath& path) {
    const c10::IValue& value = stack[path.position];
    if (path.element < 0) {
      return value.toTensor();
    }
    const c10::IValue& element = value.toListRef()[path.element];
    return path.inner < 0 ? element.toTensor() : element.toListRef()[path.inner].toTensor();
  }

  Stack arguments_of(const Record& record) const {
    Stack stack(record.arguments.begin(), record.arguments.end());
    for (c10::IValue& argument : stack) {
      if (argument.isCapsule()) {
        argument = called_with(argument);
        if (argument.isNone()) {
          throw GroupGone(record.op->name);
        }
      }
    }
    set_tensors(record, stack);
    return stack;
  }

  void set_tensors(const Record& record, Stack& stack) const {
    ArgumentPath copied{-1}; // path of the last list that was copied, since the tape's own lists must stay unchanged
    for (const Use& use : record.inputs) {
      const ArgumentPath& path = use.path;
      if (path.element < 0) {
        stack[path.position] = at(use);
        continue;
      }
      if (copied.position != path.position) {
        stack[path.position] = stack[path.position].toList().copy();
        copied = {path.position};
      }
      auto list = stack[path.position].toList();
      if (path.inner < 0) {
        list.set(path.element, at(use));
        continue;
      }
      if (copied.element != path.element) {
        list.set(path.element, list.get(path.element).toList().copy());
        copied.element = path.element;
      }
      list.get(path.element).toList().set(path.inner, at(use));
    }
  }

  // Returns the captured results of an operator, which `missing_of` may have fetched already.
  Substitute take(size_t index) {
    const auto found = captured_.find(index);
    if (found == captured_.end()) {
      return helpers_.substitute(index);
    }
    Substitute taken = std::move(found->second);
    captured_.erase(found);
    return taken;
  }

  // The parts of a unit that a pass has to recompute.
  struct Missing {
    std::vector<bool> parts;
    int64_t rows; // rows of the unit's first input
    int64_t begin; // the first of these rows that some part lacks
  };

  // Returns the parts of a unit that the pass has to recompute. Moves the captured results of parts into `captured_`.
  // On the tape the parts of a unit follow the unit.
  Missing missing_of(size_t index) {
    const Record& record = tape_.records[index];
    const int32_t token = record.made.front();
    const bool has_rows = !record.inputs.empty() && !record.inputs.front().geometry.size.empty();
    const int64_t rows = has_rows ? record.inputs.front().geometry.size.front() : 0;
    int64_t begin = record.written.empty() ? rows : 0;
    std::vector<bool> needed;
    for (size_t i = index + 1; i < tape_.records.size() && tape_.records[i].op->has(PART_OF_UNIT) &&
         tape_.records[i].reads(token);
         ++i) {
      if (actions_[i] == Action::SUBSTITUTE) {
        captured_.emplace(i, helpers_.substitute(i));
        const int64_t there = captured_.at(i).rows;
        needed.push_back(there >= 0);
        begin = there >= 0 ? std::min(begin, there / *rows_of_part(tape_, i)) : begin;
      } else {
        needed.push_back(actions_[i] == Action::RUN);
        begin = actions_[i] == Action::RUN ? 0 : begin;
      }
    }
    return {std::move(needed), rows, begin};
  }

  // Runs a unit again if one of its parts lacks rows. The unit gets only the rows of its inputs from the first missing
  // row on. Returns the unit's token (unit.h).
  at::Tensor run_unit(size_t index) {
    first_part_ = index + 1;
    const auto [needed, rows, begin] = missing_of(index);
    const at::Tensor made = at::empty({0}, at::TensorOptions(at::kByte));
    const Record& record = tape_.records[index];
    const bool is_needed = std::find(needed.begin(), needed.end(), true) != needed.end();
    if (!is_needed && record.written.empty()) { // all rows that the pass needs are captured
      return made;
    }
    std::vector<at::Tensor> given;
    for (const Use& use : record.inputs) {
      if (use.path.position > 0) {
        break; // the second argument list repeats the inputs that the unit writes to
      }
      const at::Tensor tensor = at(use);
      const bool by_rows = begin > 0 && tensor.dim() > 0 && tensor.size(0) == rows;
      given.push_back(by_rows ? tensor.slice(0, begin) : tensor);
    }
    const ForcedKeys outside(outside_);
    parts_ = helpers_.run_unit(index, given, needed);
    return made;
  }

  // Computes a matmul's rows from `begin` on into `out`, which has the rows before `begin`.
  void compute_rows(const Record& record, const at::Tensor& out, int64_t begin) const {
    Stack stack = arguments_of(record);
    at::Tensor rows = out.slice(0, begin);
    const std::string& name = record.op->name;
    const auto rest = [&](size_t position) { return stack[position].toTensor().slice(0, begin); };
    const auto bias = [&](int64_t dimensions) {
      const at::Tensor all = stack[0].toTensor();
      return all.dim() < dimensions || all.size(0) == 1 ? all : all.slice(0, begin);
    };
    if (name == "aten::mm") {
      at::mm_out(rows, rest(0), stack[1].toTensor());
    } else if (name == "aten::bmm") {
      at::bmm_out(rows, rest(0), rest(1));
    } else if (name == "aten::addmm") {
      at::addmm_out(rows, bias(2), rest(1), stack[2].toTensor(), stack[3].toScalar(), stack[4].toScalar());
    } else if (name == "aten::baddbmm") {
      at::baddbmm_out(rows, bias(3), rest(1), rest(2), stack[3].toScalar(), stack[4].toScalar());
    } else { // _grouped_mm(a, b, offs, ...): a group that ends before row `begin` becomes empty
      stack[0] = rest(0);
      stack[2] = stack[2].toTensor().sub(begin).clamp_min_(0);
      record.op->handle.callBoxed(&stack);
      rows.copy_(stack[0].toTensor());
    }
  }

  void release(const Record& record, size_t index) {
    for (const Use& use : record.inputs) {
      if (last_[use.storage] == static_cast<int64_t>(index)) {
        bases_[use.storage].reset();
      }
    }
    for (const int32_t number : record.made) {
      if (last_[number] == static_cast<int64_t>(index)) {
        bases_[number].reset();
      }
    }
  }

  const Tape& tape_;
  const std::vector<Action>& actions_;
  std::vector<at::Tensor> bases_; // by storage, as in `Bases`
  std::vector<int64_t> last_;
  const Helpers& helpers_;
  const LocalKeys outside_;
  size_t first_part_ = 0; // operator index of the first part of the unit that ran last
  std::vector<at::Tensor> parts_; // outputs of the unit that ran last, by part
  std::map<size_t, Substitute> captured_; // captured results of the parts of the unit that ran last, by operator index
  Generators generators_;
};

} // namespace

at::Tensor tensor_at(const at::Tensor& base, const Geometry& geometry) {
  return geometry.is_of(base) ? base : alias_at(base, geometry);
}

at::Tensor alias_at(const at::Tensor& base, const Geometry& geometry) {
  return view_of(base, geometry.size, geometry.stride, geometry.offset, geometry.dtype, geometry.conj, geometry.neg);
}

std::vector<at::Tensor> replay(
    const Tape& tape,
    const std::vector<Action>& actions,
    Bases bases,
    const std::vector<std::vector<GeneratorDraw>>& drawn,
    const std::vector<const Use*>& wanted,
    const Helpers& helpers) {
  const auto outside = local_keys();
  const Below below;
  RecomputePass pass(tape, actions, std::move(bases), helpers, outside);
  pass.find_last_uses(wanted);
  auto next = drawn.begin();
  for (size_t i = 0; i < tape.records.size(); ++i) {
    const std::vector<GeneratorDraw>* const states = tape.records[i].draws ? &*next++ : nullptr;
    if (actions[i] == Action::RUN) {
      pass.run(i, states);
    } else if (actions[i] == Action::SUBSTITUTE) {
      pass.substitute(i);
    }
  }
  std::vector<at::Tensor> restored;
  // return an alias of a given tensor, since a parameter's memory may be exchanged before backward reads the restored
  // tensor
  for (const Use* const use : wanted) {
    restored.push_back(tape.given[use->storage] ? pass.alias(*use) : pass.at(*use));
  }
  return restored;
}

} // namespace memplug
