// Recognises storages that live from step to step, such as an optimizer's states, by their first use outside of the
// program.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "finder.h"

namespace memplug {

class LastingTensors {
 public:
  explicit LastingTensors(const SwapListPlan& plan) {
    auto first = static_cast<int32_t>(plan.program.size());
    for (const auto& [place, operators] : plan.outside) {
      runs_.push_back({place, first, &operators});
      first += static_cast<int32_t>(operators.size());
    }
    for (const Anchor& anchor : plan.anchors) {
      if (anchor.place >= static_cast<int32_t>(plan.program.size())) {
        marks_.push_back(anchor);
      }
    }
  }

  // Notes that the program's operator at `place` begins; -1: the step begins.
  void begin(int32_t place) {
    run_ = nullptr;
    for (const OperatorRun& run : runs_) { // there are one or two
      if (run.after == place) {
        run_ = &run;
      }
    }
    number_ = -1;
    next_ = 0;
  }

  // Notes that an operator outside of the program begins; nested ones count too.
  void pass(int32_t number) {
    ++number_;
    if (run_ != nullptr &&
        (number_ >= static_cast<int32_t>(run_->operators->size()) || (*run_->operators)[number_] != number)) {
      run_ = nullptr;
    }
  }

  // Notes that the operator of the last `pass` reads a storage as its input `slot`.
  void read(int32_t slot, const c10::Storage& storage) {
    if (run_ == nullptr) {
      return;
    }
    const int32_t place = run_->first + number_;
    while (next_ < marks_.size() && std::tie(marks_[next_].place, marks_[next_].slot) < std::tie(place, slot)) {
      ++next_;
    }
    if (next_ < marks_.size() && marks_[next_].place == place && marks_[next_].slot == slot) {
      storages_.insert_or_assign(marks_[next_].key, storage.getWeakStorageImpl());
    }
  }

  // Returns the storage with that key, if it has been recognised and is alive.
  std::optional<c10::Storage> find(int32_t key) const {
    const auto known = storages_.find(key);
    auto storage = known == storages_.end() ? nullptr : known->second.lock();
    return storage ? std::optional<c10::Storage>(std::move(storage)) : std::nullopt;
  }

 private:
  // Consecutive operators outside of the program. `after`: place of the last program operator before them. `first`:
  // place of the first of them, see `Anchor`.
  struct OperatorRun {
    int32_t after, first;
    const std::vector<int32_t>* operators;
  };
  std::vector<OperatorRun> runs_;
  std::vector<Anchor> marks_; // the anchors outside of the program, sorted by place and slot
  ska::flat_hash_map<int32_t, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  // the run that all operators since the program's latest one match; null: none
  const OperatorRun* run_ = nullptr;
  int32_t number_ = -1;
  size_t next_ = 0;
};

} // namespace memplug
