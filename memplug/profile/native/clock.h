// Tracks which thread trains, and the place of each thread: the pass, micro-batch and layer that it is in.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace memplug {

// The values of class Pass in memplug/profile/trace.py.
enum Pass : int32_t { OTHER = 0, FORWARD = 1, BACKWARD = 2, OPTIMIZER = 3, NO_GRAD = 5, PREFETCH = 6 };

struct Place {
  int32_t pass = OTHER;
  int32_t micro_batch = -1;
  int32_t layer = -1;
};

// Makes the calling thread the training thread, and forgets earlier forwards.
void own_thread();

// Returns whether the calling thread trains: whether it is the training thread (`own_thread`), or runs a backward.
bool trains();

// Returns whether the calling thread runs part of the program: a forward with gradients or a backward, but not
// memplug's own code (`suspend`). Code without gradients (a validation, generation, the optimizer, the inside of an
// autograd function's forward) is no part of the program: it may run in any step, and none of its memory lives until
// backward.
bool in_program();

// Returns whether the calling thread runs the model's part of the program. memplug compares steps by this part. It
// excludes work whose amount varies with ranks, with buckets, and with the parameters that are still gathered when
// backward reaches a module: work of frameworks (`begin_framework`), gradient accumulation with the hooks that follow
// it, and everything after the last node of a backward.
bool in_model();

// Between these two calls, the calling thread's operators count as a framework's, such as those that gather parameters.
void begin_framework();
void end_framework();

// Returns whether the calling thread trains and runs none of memplug's own code.
bool trains_unsuspended();

// Returns whether the calling thread runs memplug's own code.
bool is_suspended();

// Returns 0 if the calling thread trains, otherwise the thread's own number, from 1.
int32_t thread_number();

// Returns the calling thread's place. In a backward, micro-batch and layer are those of the forward that made the
// current node. They are looked up by the node's sequence number, so backward needs no hooks.
Place here();

// Enter a place on the calling thread: a forward, a forward without gradients, a layer or the optimizer. Each call
// returns the thread's former place, for `leave`.
Place enter_forward(int32_t micro_batch);
Place enter_no_grad();
Place enter_layer(int32_t layer);
Place enter_optimizer();
void leave(Place former);

// Requests that the calling thread makes for the memory of a prefetched tensor have the pass PREFETCH, and the
// micro-batch and layer at which the tensor was offloaded. When a tensor is prefetched depends on the device's memory,
// so these requests would otherwise come among those of any layer's backward, at turns that differ from step to step.
class PrefetchPlace {
 public:
  explicit PrefetchPlace(Place offloaded);
  ~PrefetchPlace();
  PrefetchPlace(const PrefetchPlace&) = delete;
  PrefetchPlace& operator=(const PrefetchPlace&) = delete;

 private:
  Place former_;
};

// Returns the micro-batch of the forward that the calling thread entered last; -1: it has entered none since `forget`.
int32_t last_forward();

// Resets the calling thread's place, and forgets all forwards; called between steps.
void forget();

// Between these two calls, the calling thread's operators are memplug's own, and do not belong to the program.
void suspend();
void resume();
struct Suspension {
  Suspension() {
    suspend();
    // leave the user's inference mode, so that memplug's tensors have version counters
    if (c10::InferenceMode::is_enabled()) {
      normal_.emplace(false);
      c10::GradMode::set_enabled(false); // leaving inference mode has enabled gradients
    }
  }
  ~Suspension() {
    resume();
  }

 private:
  std::optional<c10::InferenceMode> normal_;
};

// Returns the number of autograd nodes that the program has made on the calling thread since the thread started. The
// number of nodes that a step makes characterises its forwards, at no cost.
uint64_t nodes();

void lock_places_for_fork();
void unlock_places_after_fork();

} // namespace memplug
