#include "replay.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace memplug {
namespace {

using torch::jit::Stack;

// No autograd, and no casts: those of the forward are on the tape.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard casts{c10::autocast_dispatch_keyset};
};

// Puts the generators back that a pass has drawn from.
class Generators {
 public:
  ~Generators() {
    for (auto& [generator, state] : before_) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }

  void set(const std::vector<Drawn>& drawn) {
    for (const Drawn& each : drawn) {
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

class Pass {
 public:
  Pass(const Tape& tape, const std::vector<Action>& actions) : tape_(tape), actions_(actions), bases_(tape.given) {
    bases_.resize(tape.storages.size());
  }

  // A storage's index of the last operator that reads it.
  void find_last_uses(const std::vector<Use>& wanted) {
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
    for (const Use& use : wanted) {
      last_[use.storage] = static_cast<int64_t>(tape_.records.size());
    }
  }

  void run(size_t index) {
    const Record& record = tape_.records[index];
    generators_.set(record.drawn);
    Stack stack(record.arguments.begin(), record.arguments.end());
    put_in(record, stack);
    record.op->handle.callBoxed(&stack);
    for (const Use& use : record.outputs) {
      if (is_made(record, use.storage) && !bases_[use.storage].defined()) {
        const c10::IValue& value = stack[use.position];
        bases_[use.storage] = use.element < 0 ? value.toTensor() : value.toListRef()[use.element].toTensor();
      }
    }
    release(record, index);
  }

  void put(size_t index, Substitute found) {
    const Record& record = tape_.records[index];
    if (found.rows >= 0) {
      compute_rows(record, found.tensors.front(), found.rows);
    }
    for (size_t i = 0; i < found.tensors.size(); ++i) {
      bases_[record.outputs[i].storage] = std::move(found.tensors[i]);
    }
    release(record, index);
  }

  at::Tensor at(const Use& use) const {
    const at::Tensor& base = bases_[use.storage];
    TORCH_CHECK(base.defined(), "memplug: storage ", use.storage, " is not there in the recompute pass");
    if (use.geometry.is_of(base)) {
      return base;
    }
    constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW,
        c10::Storage(base.storage()),
        base.key_set() - lazy,
        c10::scalarTypeToTypeMeta(use.geometry.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(use.geometry.size, use.geometry.stride, use.geometry.offset);
    tensor._set_conj(use.geometry.conj);
    tensor._set_neg(use.geometry.neg);
    return tensor;
  }

 private:
  static bool is_made(const Record& record, int32_t number) {
    return std::find(record.made.begin(), record.made.end(), number) != record.made.end();
  }

  // The tensors of an operator's arguments.
  void put_in(const Record& record, Stack& stack) const {
    int32_t copied = -1; // the list at that position is this call's own
    for (const Use& use : record.inputs) {
      if (use.element < 0) {
        stack[use.position] = at(use);
        continue;
      }
      if (copied != use.position) {
        stack[use.position] = stack[use.position].toList().copy();
        copied = use.position;
      }
      stack[use.position].toList().set(use.element, at(use));
    }
  }

  // Rows from `begin` on of a matmul's result, into the memory of the rows that are there.
  void compute_rows(const Record& record, const at::Tensor& out, int64_t begin) const {
    Stack stack(record.arguments.begin(), record.arguments.end());
    put_in(record, stack);
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
    } else { // _grouped_mm(a, b, offs, ...): groups that end before `begin` become empty
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
  std::vector<at::Tensor> bases_; // by storage
  std::vector<int64_t> last_;
  Generators generators_;
};

} // namespace

std::vector<Action> actions_of(
    const Tape& tape, const std::unordered_map<size_t, bool>& captured, const std::vector<int32_t>& wanted) {
  std::vector<bool> needed(tape.storages.size());
  for (const int32_t number : wanted) {
    needed[number] = true;
  }
  const auto any = [&](const std::vector<int32_t>& numbers) {
    return std::any_of(numbers.begin(), numbers.end(), [&](int32_t number) { return needed[number]; });
  };
  std::vector<Action> actions(tape.records.size(), Action::SKIP);
  for (size_t index = tape.records.size(); index-- > 0;) {
    const Record& record = tape.records[index];
    if (record.form == Form::VIEW || record.form == Form::VALUE) {
      continue;
    }
    const bool asked = any(record.made) || any(record.written);
    if (const auto found = captured.find(index); found != captured.end()) {
      if (asked) {
        actions[index] = Action::SUBSTITUTE;
      }
      if (found->second) {
        for (const int32_t number : record.made) {
          needed[number] = false;
        }
        continue;
      }
    } else if (asked || (record.root && !record.draws)) {
      actions[index] = Action::RUN;
    }
    if (actions[index] != Action::SKIP) {
      for (const Use& use : record.inputs) {
        needed[use.storage] = true;
      }
    }
  }
  return actions;
}

std::vector<at::Tensor> replay(
    const Tape& tape,
    const std::vector<Action>& actions,
    const std::vector<Use>& wanted,
    const std::function<Substitute(size_t)>& substitute) {
  const Below below;
  Pass pass(tape, actions);
  pass.find_last_uses(wanted);
  for (size_t i = 0; i < tape.records.size(); ++i) {
    if (actions[i] == Action::RUN) {
      pass.run(i);
    } else if (actions[i] == Action::SUBSTITUTE) {
      pass.put(i, substitute(i));
    }
  }
  std::vector<at::Tensor> restored;
  for (const Use& use : wanted) {
    restored.push_back(pass.at(use));
  }
  return restored;
}

} // namespace memplug
