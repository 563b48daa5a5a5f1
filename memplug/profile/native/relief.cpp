#include "relief.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "bus.h"

namespace memplug {
namespace {

constexpr size_t kMostEvents = 1 << 12;

std::atomic<Reliever> asked{nullptr};

struct Events {
  std::mutex mutex;
  std::vector<ReliefEvent> all;
  std::shared_ptr<const Explanation> explain;
};

Events& events() {
  static auto* instance = new Events(); // never destroyed: allocators outlive static destruction
  return *instance;
}

} // namespace

void ask_for_relief(Reliever reliever, Explanation explain) {
  asked = reliever;
  auto& noted = events();
  std::shared_ptr<const Explanation> next = explain ? std::make_shared<const Explanation>(std::move(explain)) : nullptr;
  const std::lock_guard<std::mutex> lock(noted.mutex);
  std::swap(noted.explain, next); // the former explanation is destroyed after the lock is released
}

void end_relief_in_child() {
  asked = nullptr;
}

// Does nothing while memplug runs its own operators (`Pause`): memplug handles the failure of their requests itself,
// and may hold a lock.
void explain(c10::OutOfMemoryError& error) {
  std::shared_ptr<const Explanation> explain;
  {
    auto& noted = events();
    const std::lock_guard<std::mutex> lock(noted.mutex);
    explain = noted.explain;
  }
  if (asked.load() == nullptr || Pause::depth() > 0) {
    return;
  }
  note_relief({ReliefEvent::GIVEN_UP, 0});
  if (explain != nullptr) {
    try {
      error.add_context((*explain)());
    } catch (const std::exception& failed) { // the original error matters more than this one
      error.add_context(std::string("memplug: could not describe this shortage of memory: ") + failed.what());
    }
  }
}

void note_relief(ReliefEvent event) {
  auto& noted = events();
  const std::lock_guard<std::mutex> lock(noted.mutex);
  if (noted.all.size() < kMostEvents) {
    noted.all.push_back(event);
  }
}

std::vector<ReliefEvent> take_relief_events() {
  auto& noted = events();
  const std::lock_guard<std::mutex> lock(noted.mutex);
  return std::exchange(noted.all, {});
}

bool relieve(size_t nbytes, int failures) {
  const Reliever reliever = asked;
  if (reliever == nullptr) {
    return false;
  }
  note_relief({ReliefEvent::FAILED, static_cast<int64_t>(nbytes)});
  return reliever(nbytes, failures);
}

} // namespace memplug
