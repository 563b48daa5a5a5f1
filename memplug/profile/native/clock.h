// Tracks which thread trains, the pass and layer that it is in, and how far the program has come.
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

// Returns whether the calling thread trains: it is the owner, or one of autograd's threads during a backward.
bool trains();

// Returns whether the calling thread runs part of the program: an unsuspended forward with gradients, or backward. Code
// without gradients (a validation, generation, the optimizer, the inside of an autograd function's forward) is not part
// of it: it may run in any step, and none of its memory lives until a backward.
bool in_program();

// Returns whether the calling thread runs the model's part of the program, by which steps are compared. Not included:
// work of a framework (`begin_framework`); gradient accumulation and the hooks behind it that reduce or partition
// gradients; and anything after the last node of a backward. The amount of such work depends on ranks and buckets, and
// on which parameters are still gathered when backward reaches a module.
bool in_model();

// Marks operators of the calling thread in between as a framework's, whose hooks gather and release parameters.
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

// Enters a forward, a forward without gradients, a layer or the optimizer on the calling thread, and returns its former
// place, for `leave`.
Place enter_forward(int32_t micro_batch);
Place enter_no_grad();
Place enter_layer(int32_t layer);
Place enter_optimizer();
void leave(Place former);

// Returns the micro-batch that the calling thread entered last; -1: none since `forget`.
int32_t last_forward();

// Between steps: resets the calling thread's place, and forgets all forwards.
void forget();

// Marks operators of the calling thread in between as memplug's own, which are not part of the program.
void suspend();
void resume();
struct Suspension {
  Suspension() {
    suspend();
    // the program's inference mode is left, so that memplug's tensors have versions
    if (c10::InferenceMode::is_enabled()) {
      normal_.emplace(false);
      c10::GradMode::set_enabled(false); // leaving inference mode turned it on
    }
  }
  ~Suspension() {
    resume();
  }

 private:
  std::optional<c10::InferenceMode> normal_;
};

// Returns how many autograd nodes the program has made on the calling thread since it started: a summary of a step's
// forwards that costs nothing to keep.
uint64_t nodes();

void lock_places_for_fork();
void unlock_places_after_fork();

} // namespace memplug
