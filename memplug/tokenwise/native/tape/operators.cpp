#include "operators.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torch_private.h"

namespace memplug {
namespace {

struct Known {
  std::mutex mutex;
  // by address of the name, which the operator's schema owns
  ska::flat_hash_map<const char*, std::unique_ptr<Operator>> operators;
  std::vector<std::unique_ptr<Operator>> gone; // dead operators, to which tapes may still refer
  std::atomic<uint64_t> generation{0}; // number of operators that have died
  std::function<uint32_t(const std::string&, const std::string&)> describe;
};

Known& known() {
  static auto* instance = new Known(); // never destroyed: autograd's threads outlive static destruction
  return *instance;
}

// Drops operators when the library that defined them is unloaded, since the addresses of their names may be reused.
struct Watch final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& handle) override {
    const std::lock_guard<std::mutex> lock(known().mutex);
    for (auto each = known().operators.begin(); each != known().operators.end();) {
      if (each->second != nullptr && each->second->handle == handle) {
        known().gone.push_back(std::move(each->second));
        each = known().operators.erase(each);
      } else {
        ++each;
      }
    }
    ++known().generation;
  }
};

// Returns whether an operator may read elements of its arguments. Views do not, and neither do operators that only make
// memory, such as `empty_like`.
bool may_read_elements(const c10::FunctionSchema& schema, bool mutates, uint32_t traits) {
  const bool makes = std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& each) {
    const auto kind = each.type()->kind();
    return each.alias_info() == nullptr &&
        (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType || kind == c10::TypeKind::OptionalType);
  });
  return (makes || mutates || (traits & VALUE) != 0) && (traits & (BLANK | FACTORY)) == 0;
}

std::unique_ptr<Operator> look_up(const c10::OperatorName& name, uint32_t traits) {
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle || name.name == "aten::record_stream") {
    return nullptr;
  }
  const bool mutates =
      (handle->schema().is_mutable() && name.name != "aten::detach_") || (traits & (EXCHANGE | STATISTICS)) != 0;
  const auto& arguments = handle->schema().arguments();
  const auto position = [&](const char* argument) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == argument) {
        return static_cast<int32_t>(i);
      }
    }
    return -1;
  };
  using Key = c10::DispatchKey;
  const auto has = [&](Key key) { return handle->hasKernelForDispatchKey(key); };
  return std::unique_ptr<Operator>(new Operator{
      *handle,
      name.name,
      name.overload_name,
      name.overload_name.empty() ? name.name : name.name + "." + name.overload_name,
      traits,
      name.name.rfind("aten::", 0) == 0,
      has(Key::CompositeImplicitAutograd),
      has(Key::CUDA) && !has(Key::AutogradCUDA),
      has(Key::PrivateUse1) && !has(Key::AutogradPrivateUse1),
      has(Key::AutocastCPU),
      has(Key::AutocastCUDA),
      has(Key::AutocastPrivateUse1),
      mutates,
      may_read_elements(handle->schema(), mutates, traits),
      handle->schema().arguments().size(),
      handle->schema().returns().size(),
      std::max(position("dropout_p"), position("p_dropout")),
      position("async_op"),
      position("running_mean"),
      position("running_var"),
      position("training"),
      position("accumulate"),
      (traits & PARTIAL) != 0 ? std::max({position("values"), position("source"), position("index")}) : -1});
}

// Returns the operator whose name is at address `key`. Calls `name_of` if this thread has not seen that address.
template <typename Name>
const Operator* operator_at(const char* key, const Name& name_of) {
  static const auto* const watch =
      new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Watch>()));
  (void)watch;
  thread_local ska::flat_hash_map<const char*, const Operator*> seen; // read without the lock
  thread_local uint64_t generation = 0;
  if (const uint64_t now = known().generation.load(std::memory_order_acquire); now != generation) {
    seen.clear();
    generation = now;
  }
  if (const auto found = seen.find(key); found != seen.end()) {
    return found->second;
  }
  const std::optional<c10::OperatorName> name = name_of();
  if (!name) {
    return nullptr; // a profiler's label; its address may be reused
  }
  std::function<uint32_t(const std::string&, const std::string&)> describe;
  {
    const std::lock_guard<std::mutex> lock(known().mutex);
    if (const auto found = known().operators.find(key); found != known().operators.end()) {
      return seen[key] = found->second.get();
    }
    describe = known().describe;
  }
  // `describe` may run Python, so no lock is held
  auto fresh = look_up(*name, describe ? describe(name->name, name->overload_name) : 0);
  const std::lock_guard<std::mutex> lock(known().mutex);
  auto& kept = known().operators[key];
  if (kept == nullptr) {
    kept = std::move(fresh);
  }
  return seen[key] = kept.get();
}

} // namespace

const Operator* operator_of(const at::RecordFunction& function) {
  return operator_at(function.name(), [&] { return function.operator_name(); });
}

const Operator* operator_named(const std::string& name, const std::string& overload) {
  const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  return handle ? operator_at(handle->schema().name().c_str(), [&] { return handle->operator_name(); }) : nullptr;
}

void describe_operators(std::function<uint32_t(const std::string&, const std::string&)> describe) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().describe = std::move(describe);
}

bool Operator::casts(c10::ArrayRef<c10::IValue> arguments) const {
  const bool on_cpu = casts_on_cpu && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
  const bool on_cuda = casts_on_cuda && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCUDA);
  const bool on_other =
      casts_on_other && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastPrivateUse1);
  bool found = false;
  for (size_t i = 0; (on_cpu || on_cuda || on_other) && i < arguments.size(); ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      found = found || (on_cpu && tensor.is_cpu()) || (on_cuda && tensor.is_cuda()) ||
          (on_other && tensor.is_privateuseone());
    });
  }
  return found;
}

bool Operator::is_composite(c10::ArrayRef<c10::IValue> arguments) const {
  bool found = composite;
  for (size_t i = 0; found && (kernel_on_cuda || kernel_on_other) && i < arguments.size(); ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      found = found && !(kernel_on_cuda && tensor.is_cuda()) && !(kernel_on_other && tensor.is_privateuseone());
    });
  }
  return found;
}

bool Operator::draws(c10::ArrayRef<c10::IValue> arguments) const {
  if (!has(RANDOM)) {
    return false;
  }
  return dropout < 0 || !arguments[dropout].isDouble() || arguments[dropout].toDouble() != 0;
}

} // namespace memplug
