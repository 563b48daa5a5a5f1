#include "clock.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

#include "torch_private_csrc.h"

namespace memplug {
namespace {

// Micro-batch and layer of the autograd nodes that a thread makes from sequence number `sequence` on.
struct NodeMark {
  uint64_t sequence;
  int32_t micro_batch;
  int32_t layer;
};

struct Forwards {
  std::mutex mutex;
  std::map<uint64_t, std::vector<NodeMark>> of_thread; // by autograd's thread number; sorted by sequence number
};

Forwards& forwards() {
  static auto* instance = new Forwards(); // never destroyed: threads may outlive static destruction
  return *instance;
}

// State of the calling thread, in one struct because each access to a thread-local variable is a call.
struct Thread {
  uint64_t owned = 0; // value of `ownership` when this thread last became the training thread
  int32_t suspensions = 0;
  int32_t frameworks = 0; // number of calls of `begin_framework` whose `end_framework` is still to come
  uint64_t suspended_nodes = 0; // number of nodes made in earlier suspensions
  uint64_t suspended_at = 0; // number of nodes made before the latest suspension
  int32_t number = 0;
  Place explicit_place;
  int32_t last_forward = -1;
  Place last_backward;
  uint64_t last_node[2] = {0, 0}; // thread and sequence number of the node that `last_backward` belongs to
  Place outside_of_backward; // place of the nodes that the thread makes outside of backward
  bool made_in_backward = false; // a backward has marked other places: `here` must mark `outside_of_backward` again
};

thread_local Thread this_thread;
// number of calls of `own_thread`; the thread of the last call is the training thread
std::atomic<uint64_t> ownership{0};
std::atomic<int32_t> other_threads{0};

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void mark(Place place) {
  auto& known = forwards();
  const std::lock_guard<std::mutex> lock(known.mutex);
  auto& marks = known.of_thread[at::RecordFunction::currentThreadId()];
  const uint64_t sequence = nodes_made();
  if (!marks.empty() && marks.back().sequence == sequence) {
    marks.pop_back(); // the thread made no node since the last mark
  }
  if (!marks.empty() && marks.back().micro_batch == place.micro_batch && marks.back().layer == place.layer) {
    return;
  }
  marks.push_back({sequence, place.micro_batch, place.layer});
}

// Marks the nodes that the calling thread makes from now on with `place`. A mark made in a backward holds until that
// backward has ended: then `here` marks `outside_of_backward` again.
void mark(Thread& thread, Place place) {
  if (in_backward()) {
    thread.made_in_backward = true;
  } else {
    thread.outside_of_backward = place;
  }
  mark(place);
}

Place find(uint64_t thread, uint64_t sequence) {
  auto& known = forwards();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.of_thread.find(thread);
  if (found == known.of_thread.end()) {
    return {BACKWARD, -1, -1};
  }
  const auto& marks = found->second;
  const auto after = std::upper_bound(
      marks.begin(), marks.end(), sequence, [](uint64_t s, const NodeMark& m) { return s < m.sequence; });
  if (after == marks.begin()) {
    return {BACKWARD, -1, -1};
  }
  return {BACKWARD, (after - 1)->micro_batch, (after - 1)->layer};
}

// Returns whether a node accumulates gradients. Such a node has the largest possible sequence number, and runs right
// after the node that feeds it.
bool accumulates(const torch::autograd::Node& node) {
  return node.sequence_nr() == std::numeric_limits<uint64_t>::max();
}

Place place_of_backward(Thread& thread) {
  const auto node = torch::autograd::get_current_node();
  if (node && !accumulates(*node)) {
    const uint64_t key[2] = {node->thread_id(), node->sequence_nr()};
    if (!std::equal(key, key + 2, thread.last_node)) {
      std::copy(key, key + 2, thread.last_node);
      thread.last_backward = find(key[0], key[1]);
    }
  }
  thread.last_backward.pass = BACKWARD;
  if (c10::GradMode::is_enabled()) { // a recompute pass, or `create_graph`: backward makes nodes
    mark(thread, thread.last_backward);
  }
  return thread.last_backward;
}

Place enter(Place next) {
  Thread& thread = this_thread;
  const Place former = thread.explicit_place;
  thread.explicit_place = next;
  mark(thread, next);
  return former;
}

bool owns(const Thread& thread) {
  return thread.owned == ownership.load(std::memory_order_relaxed);
}

bool is_training(const Thread& thread) {
  return owns(thread) || in_backward();
}

} // namespace

void own_thread() {
  this_thread.owned = ++ownership;
  forget();
}

bool in_program() {
  const Thread& thread = this_thread;
  return thread.suspensions == 0 && (in_backward() || (owns(thread) && c10::GradMode::is_enabled()));
}

bool in_model() {
  if (!in_program() || this_thread.frameworks > 0) {
    return false;
  }
  if (!in_backward()) {
    return true;
  }
  const auto node = torch::autograd::get_current_node();
  return node && !accumulates(*node);
}

void begin_framework() {
  ++this_thread.frameworks;
}

void end_framework() {
  --this_thread.frameworks;
}

bool trains() {
  return is_training(this_thread);
}

bool trains_unsuspended() {
  return this_thread.suspensions == 0 && is_training(this_thread);
}

bool is_suspended() {
  return this_thread.suspensions > 0;
}

int32_t thread_number() {
  Thread& thread = this_thread;
  if (is_training(thread)) {
    return 0;
  }
  if (thread.number == 0) {
    thread.number = ++other_threads;
  }
  return thread.number;
}

Place here() {
  Thread& thread = this_thread;
  if (thread.explicit_place.pass != OTHER || thread.explicit_place.layer != -1) {
    return thread.explicit_place;
  }
  if (in_backward()) {
    return place_of_backward(thread);
  }
  if (thread.made_in_backward) {
    thread.made_in_backward = false;
    mark(thread.outside_of_backward);
  }
  return {};
}

Place enter_forward(int32_t micro_batch) {
  this_thread.last_forward = micro_batch;
  return enter({FORWARD, micro_batch, -1});
}

Place enter_no_grad() {
  return enter({NO_GRAD, -1, -1});
}

Place enter_layer(int32_t layer) {
  Place next = here();
  next.layer = layer;
  return enter(next);
}

Place enter_optimizer() {
  return enter({OPTIMIZER, -1, -1});
}

void leave(Place former) {
  Thread& thread = this_thread;
  const int32_t micro_batch = thread.explicit_place.micro_batch;
  thread.explicit_place = former;
  // nodes made after a forward, such as those of the loss, belong to its micro-batch until the next forward begins
  mark(thread, {former.pass, former.micro_batch == -1 ? micro_batch : former.micro_batch, former.layer});
}

// `enter` and `leave` would mark the nodes that the backward makes.
PrefetchPlace::PrefetchPlace(Place offloaded) : former_(this_thread.explicit_place) {
  this_thread.explicit_place = {PREFETCH, offloaded.micro_batch, offloaded.layer};
}

PrefetchPlace::~PrefetchPlace() {
  this_thread.explicit_place = former_;
}

int32_t last_forward() {
  return this_thread.last_forward;
}

void forget() {
  Thread& thread = this_thread;
  thread.last_forward = -1;
  thread.explicit_place = {};
  thread.last_backward = {};
  thread.last_node[0] = thread.last_node[1] = 0;
  thread.outside_of_backward = {};
  thread.made_in_backward = false;
  auto& known = forwards();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.of_thread.clear();
}

void suspend() {
  Thread& thread = this_thread;
  if (thread.suspensions++ == 0) {
    thread.suspended_at = nodes_made();
  }
}

void resume() {
  Thread& thread = this_thread;
  if (--thread.suspensions == 0) {
    thread.suspended_nodes += nodes_made() - thread.suspended_at;
  }
}

uint64_t nodes() {
  return nodes_made() - this_thread.suspended_nodes;
}

void lock_places_for_fork() {
  forwards().mutex.lock();
}

void unlock_places_after_fork() {
  forwards().mutex.unlock();
}

} // namespace memplug
