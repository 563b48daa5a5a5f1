#include "repeated_step.h"

#include <algorithm>

namespace memplug {

void RepeatedStep::begin(size_t targets, size_t turns) {
  is_followed_ = alike_ >= needed_;
  is_spoilt_ = false;
  stream_.reset();
  requests_ = {}; // faster than to clear a large map
  target_of_ = {};
  now_ = {{}, std::vector<LastUse>(targets), std::vector<int64_t>(turns, -1)};
  storages_.assign(targets, WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()));
  opens_ = 0;
  next_ = 0;
  next_opening_ = 0;
  open_.clear();
  if (is_followed_) {
    open_until(0);
  }
}

void RepeatedStep::end(bool is_whole) {
  if (is_spoilt_ || !is_whole) {
    alike_ = 0;
  } else if (!is_followed_) {
    const bool is_alike = !now_.requests.empty() && now_ == former_; // empty: this device does not report requests
    alike_ = is_alike ? alike_ + 1 : 0;
    former_ = std::move(now_);
    former_storages_ = std::move(storages_);
    wanted_.clear();
    quiet_.assign(former_.requests.size(), 1);
    for (size_t target = 0; target < former_.last_uses.size(); ++target) {
      const auto& [origin, opens, closes] = former_.last_uses[target];
      if (origin.request >= 0) {
        wanted_[origin.request] = static_cast<int32_t>(target);
        expect(origin.request);
        expect(origin.request + 1); // a request's memory becomes known at the next request
      }
      expect(opens - 1);
      expect(closes);
    }
    by_opening_.clear();
    for (size_t target = 0; target < former_.last_uses.size(); ++target) {
      if (former_.last_uses[target].opens >= 0) { // a target that left as the step began has no last use
        by_opening_.push_back(static_cast<int32_t>(target));
      }
    }
    std::stable_sort(by_opening_.begin(), by_opening_.end(), [this](int32_t one, int32_t other) {
      return former_.last_uses[one].opens < former_.last_uses[other].opens;
    });
  }
  is_followed_ = false;
}

// -- all operators are seen -------------------------------------------------------------------------------------------

void RepeatedStep::learn_request(int64_t nbytes, const void* stream, int32_t place) {
  now_.requests.push_back({nbytes, stream, place});
}

// Spoils a step whose operators run on several streams, since memplug has to see all operators of such a step.
// Otherwise an operator might read a storage on a stream that has not waited for its copy in.
void RepeatedStep::learn_operator(int64_t stream) {
  opens_ = made();
  is_spoilt_ |= stream_.value_or(stream) != stream;
  stream_ = stream;
}

void RepeatedStep::learn_last_use(int32_t target, const c10::Storage& storage) {
  const auto* const impl = storage.unsafeGetStorageImpl();
  Origin origin;
  const auto earlier = target_of_.find(impl);
  const auto request = requests_.find(impl->data());
  if (earlier != target_of_.end()) {
    origin.target = earlier->second;
  } else if (request != requests_.end()) {
    origin.request = request->second;
  } else {
    origin.storage = impl;
  }
  target_of_[impl] = target;
  storages_[target] = storage.getWeakStorageImpl();
  now_.last_uses[target] = {origin, opens_, made()};
}

void RepeatedStep::learn_end_of_last_use(int32_t target) {
  now_.last_uses[target].closes = made();
}

void RepeatedStep::served(const void* memory) {
  requests_.erase(memory);
  if (!is_followed_) {
    requests_[memory] = made() - 1;
  } else if (wanted_.find(last_request()) != wanted_.end()) {
    requests_[memory] = last_request();
  }
}

// -- followed ---------------------------------------------------------------------------------------------------------

void RepeatedStep::expect(int64_t request) {
  if (request >= 0 && request < static_cast<int64_t>(quiet_.size())) {
    quiet_[request] = 0;
  }
}

bool RepeatedStep::follow(int64_t nbytes, const void* stream) {
  const int64_t number = next_;
  if (number >= static_cast<int64_t>(former_.requests.size()) || !is_learnt(number, nbytes, stream)) {
    return false;
  }
  if (std::any_of(open_.begin(), open_.end(), [&](int32_t target) { return former_.last_uses[target].closes <= number; })) {
    return false;
  }
  ++next_;
  open_until(next_);
  return true;
}

void RepeatedStep::open_until(int64_t requests) {
  for (; next_opening_ < by_opening_.size() && former_.last_uses[by_opening_[next_opening_]].opens <= requests; ++next_opening_) {
    open_.push_back(by_opening_[next_opening_]);
  }
}

bool RepeatedStep::is_of(int32_t target, const c10::Storage& storage) const {
  const auto* const impl = storage.unsafeGetStorageImpl();
  const Origin& origin = former_.last_uses[target].origin;
  if (origin.target >= 0) {
    return storages_[origin.target]._unsafe_get_target() == impl;
  }
  if (origin.request < 0) {
    return origin.storage == impl;
  }
  const auto request = requests_.find(impl->data());
  return request != requests_.end() && request->second == origin.request;
}

void RepeatedStep::close(int32_t target, const c10::Storage& storage) {
  storages_[target] = storage.getWeakStorageImpl();
  open_.erase(std::find(open_.begin(), open_.end(), target));
}

void RepeatedStep::depart() {
  is_followed_ = false;
  distrust();
  open_.clear();
}

} // namespace memplug
