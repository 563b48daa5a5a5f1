// Tracks which thread trains, and the pass, micro-batch and layer that a thread is in (its place).
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace memplug {

// The values of class Pass in memplug/profile/trace.py.
enum Pass : int32_t { OTHER = 0, FORWARD = 1, BACKWARD = 2, OPTIMIZER = 3, NO_GRAD = 5 };

struct Place {
  int32_t pass = OTHER;
  int32_t micro_batch = -1;
  int32_t layer = -1;
};

// Makes the calling thread the training thread, and forgets earlier forwards.
void own_thread();

// Returns whether the calling thread trains: it is the training thread (`own_thread`), or a thread of autograd's during
// a backward.
bool trains();

// Returns whether the calling thread runs part of the program: a forward with gradients, or a backward, outside of
// memplug's own code (`suspend`). Code without gradients (a validation, generation, the optimizer, the inside of an
// autograd function's forward) is no part of the program: it may run in any step, and none of its memory lives until a
// backward.
bool in_program();

// Returns whether the calling thread runs the model's part of the program; steps are compared by this part. It does not
// include a framework's work (`begin_framework`), gradient accumulation and the hooks behind it that reduce or
// partition gradients, or anything after the last node of a backward. The amount of such work depends on ranks and
// buckets, and on which parameters are still gathered when backward reaches a module.
bool in_model();

// Marks the calling thread's operators between these two calls as a framework's, such as those that gather parameters.
void begin_framework();
void end_framework();

// Returns whether the calling thread trains and runs none of memplug's own code.
bool trains_unsuspended();

// Returns whether the calling thread runs memplug's own code.
bool is_suspended();

// Returns 0 for a thread that trains, otherwise a running number that the thread keeps.
int32_t thread_number();

// Returns where the calling thread is. In a backward: the micro-batch and layer whose forward made the current node,
// found by the node's sequence number, so that no hook has to run in backward.
Place here();

// Enters a forward, a forward without gradients, a layer or the optimizer on the calling thread, and returns the
// thread's former place, for `leave`.
Place enter_forward(int32_t micro_batch);
Place enter_no_grad();
Place enter_layer(int32_t layer);
Place enter_optimizer();
void leave(Place former);

// Returns the micro-batch that the calling thread entered last; -1: none since `forget`.
int32_t last_forward();

// Resets the calling thread's place, and forgets all forwards; called between steps.
void forget();

// Marks the calling thread's operators between these two calls as memplug's own; they are no part of the program.
void suspend();
void resume();
struct Suspension {
  Suspension() {
    suspend();
    // leave the program's inference mode, so that memplug's tensors have version counters
    if (c10::InferenceMode::is_enabled()) {
      normal_.emplace(false);
      c10::GradMode::set_enabled(false); // leaving inference mode enabled gradients
    }
  }
  ~Suspension() {
    resume();
  }

 private:
  std::optional<c10::InferenceMode> normal_;
};

// Returns how many autograd nodes the program has made on the calling thread since the thread started. The number that
// a step adds summarises its forwards, and costs nothing to keep.
uint64_t nodes();

void lock_places_for_fork();
void unlock_places_after_fork();

} // namespace memplug
