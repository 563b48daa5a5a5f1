// Runs the core's finder, which recognises the tensors of a swap list, on steps that have no tensors.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "finder.h"

namespace memplug {

class Rehearsal {
 public:
  using Named = std::tuple<int64_t, int64_t, int32_t>;

  // Operators: number, depth, inputs and outputs as (identity, bytes, dtype).
  using Step = std::vector<std::tuple<int32_t, int32_t, std::vector<Named>, std::vector<Named>>>;

  explicit Rehearsal(SwapListPlan plan) : plan_(std::move(plan)), finder_(plan_) {}

  // Runs a step several times; returns, for each target, the identity of the tensor found in the last run (-1: none).
  std::vector<int64_t> run(const Step& step, int times) {
    std::vector<int64_t> found;
    for (int time = 0; time < times; ++time) {
      found = run(step);
    }
    return found;
  }

 private:
  static const void* key_of(int64_t id) {
    return reinterpret_cast<const void*>(static_cast<uintptr_t>(id));
  }

  std::vector<int64_t> run(const Step& step) {
    finder_.begin([](const void*) { return false; });
    std::vector<int64_t> found(plan_.targets.size(), -1);
    std::vector<size_t> running;
    const auto end = [&](int32_t depth) {
      for (; !running.empty() && std::get<1>(step[running.back()]) >= depth; running.pop_back()) {
        find(std::get<3>(step[running.back()]), std::get<0>(step[running.back()]), true, found);
      }
    };
    for (size_t i = 0; i < step.size(); ++i) {
      const auto& [number, depth, inputs, outputs] = step[i];
      end(depth);
      running.push_back(i);
      if (depth == 0) {
        finder_.tick(number);
        int32_t slot = 0;
        for (const auto& [id, nbytes, dtype] : inputs) {
          finder_.anchor(key_of(id), slot++, number);
        }
      }
      for (const auto& [id, nbytes, dtype] : inputs) {
        finder_.see(key_of(id), nbytes, dtype, {});
        finder_.read(key_of(id), number);
      }
      find(inputs, number, false, found);
    }
    end(0);
    return found;
  }

  void find(const std::vector<Named>& values, int32_t number, bool output, std::vector<int64_t>& found) {
    for (const auto& [id, nbytes, dtype] : values) {
      finder_.see(key_of(id), nbytes, dtype, {});
    }
    if (!finder_.expects(number, output)) {
      return;
    }
    int32_t slot = 0;
    for (const auto& [id, nbytes, dtype] : values) {
      const int32_t target = finder_.find(key_of(id), nbytes, number, output, slot++);
      if (target >= 0) {
        found[target] = id;
      }
    }
  }

  const SwapListPlan plan_;
  Finder finder_;
};

} // namespace memplug
