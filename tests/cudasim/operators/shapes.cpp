// Shapes and types of an operator's results, from its meta kernel. Meta kernels in Python are slow, so results
// are cached under all facts that they may depend on.
#include <cstdio>
#include <mutex>
#include <unordered_map>

#include "../runtime/settings.h"
#include "operators.h"

namespace cudasim {
namespace {

template <typename T>
void add(std::string& key, const T& number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void add_tensor(std::string& key, const Tensor& tensor) {
  key += tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'W' : 'T';
  add(key, tensor.scalar_type());
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    add(key, tensor.size(d));
    add(key, tensor.stride(d));
  }
  key += ';';
}

void add_tensors(std::string& key, const IValue& value) {
  if (value.isTensorList()) {
    add(key, value.toTensorList().size());
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
      key += each.has_value() && each->defined() ? '1' : '0';
    }
  }
  key += ':';
  visit(value, [&](const Tensor& each) { add_tensor(key, each); });
}

template <typename List>
void add_list(std::string& key, const List& list) {
  for (const auto& each : list) {
    add(key, each);
  }
  key += ';';
}

// Adds an argument to the key; returns false if its kind is not known.
bool add_argument(std::string& key, const IValue& value) {
  key += static_cast<char>('A' + (value.isTensor() ? 0 : value.isTensorList() ? 1 : value.isOptionalTensorList() ? 2
      : value.isInt() ? 3 : value.isDouble() ? 4 : value.isBool() ? 5 : value.isIntList() ? 6
      : value.isBoolList() ? 7 : value.isString() ? 8 : value.isDoubleList() ? 9 : 10));
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    add_tensors(key, value);
  } else if (value.isInt()) {
    add(key, value.toInt());
  } else if (value.isDouble()) {
    add(key, value.toDouble());
  } else if (value.isBool()) {
    add(key, value.toBool());
  } else if (value.isIntList()) {
    add_list(key, value.toIntVector());
  } else if (value.isDoubleList()) {
    add_list(key, value.toDoubleVector());
  } else if (value.isBoolList()) {
    add_list(key, std::vector<char>(value.toBoolList().begin(), value.toBoolList().end()));
  } else if (value.isString()) {
    key += value.toStringRef() + ';';
  } else {
    return value.isNone() || value.isDevice() || value.isGenerator();
  }
  return true;
}

Tensor to_meta(const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

bool infer_anew(const c10::OperatorHandle& op, const Info& info, const Stack& arguments, Stack& metas) {
  for (const IValue& argument : arguments) {
    metas.push_back(argument.isDevice() ? IValue(c10::Device(at::kMeta))
                                        : argument.isGenerator() ? IValue() : map(argument, to_meta));
  }
  try {
    if (info.convolves) { // the one operator of cuDNN that is simulated has no meta kernel
      metas = info.compute(op, std::move(metas), {});
    } else {
      op.callBoxed(&metas);
    }
  } catch (const std::exception& error) { // there is no meta kernel, or it needs the data
    if (number_of("CUDASIM_VERBOSE", 0) != 0) {
      std::fprintf(stderr, "cudasim: %s waits for its stream, as its result is not known before: %.200s\n",
                   info.name.c_str(), error.what());
    }
    return false;
  }
  return info.tensors_only || info.compute ||
      std::all_of(metas.begin(), metas.end(), [](const IValue& each) { return each.isTensor() || each.isTensorList(); });
}

} // namespace

bool infer(const c10::OperatorHandle& op, const Info& info, const Stack& arguments, Stack& metas) {
  static auto* const known = new std::unordered_map<std::string, std::pair<bool, Stack>>();
  static std::mutex mutex;
  std::string key = op.operator_name().name + "." + op.operator_name().overload_name + ":";
  for (const IValue& argument : arguments) {
    if (!add_argument(key, argument)) {
      return infer_anew(op, info, arguments, metas);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known->find(key);
    if (found != known->end()) {
      metas = found->second.second;
      return found->second.first;
    }
  }
  const bool result = infer_anew(op, info, arguments, metas);
  const std::lock_guard<std::mutex> lock(mutex);
  known->emplace(std::move(key), std::make_pair(result, metas));
  return result;
}

} // namespace cudasim
