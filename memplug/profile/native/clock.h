// Which thread trains, which pass of which layer it is in, and how far the program has come.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace memplug {

// As in memplug/profile/trace.py, class Pass.
enum Pass : int32_t { OTHER = 0, FORWARD = 1, BACKWARD = 2, OPTIMIZER = 3, NO_GRAD = 5 };

struct Place {
  int32_t pass = OTHER;
  int32_t micro_batch = -1;
  int32_t layer = -1;
};

// The calling thread is the one that trains from now on; what was known of earlier forwards is forgotten.
void own_thread();

// Whether the calling thread trains: the owner, or one of autograd's while it runs a backward.
bool trains();

// Whether what the calling thread runs now is part of the program: a forward with gradients, or a backward, that is not
// suspended. What runs without gradients (a validation, generation, the optimizer, the inside of an autograd function's
// forward) is not: it may come in any step, and nothing of it lives until a backward.
bool in_program();

// Whether what the calling thread runs now is the model's part of the program, by which steps are compared: not what a
// framework does on its account (`begin_framework`), nor what accumulates a gradient, with the hooks behind it that reduce
// or partition it, nor what follows the last node of a backward. How much that is depends on ranks and buckets, and on
// which parameters are still gathered as backward comes to a module.
bool in_model();

// Operators of the calling thread inside are a framework's, whose hooks gather parameters and let them go.
void begin_framework();
void end_framework();

// Whether the calling thread trains, and runs nothing of memplug's own now.
bool trains_unsuspended();

// Whether the calling thread runs something of memplug's own now.
bool is_suspended();

// 0 for a thread that trains, else a running number that the thread keeps.
int32_t thread_number();

// Where the calling thread is. In a backward: the micro-batch and layer whose forward made the node that runs, by the
// node's sequence number, so that no hook has to run in backward.
Place here();

// Enter a forward, one without gradients, a layer or the optimizer on the calling thread; returns where it was. `leave` goes back there.
Place enter_forward(int32_t micro_batch);
Place enter_no_grad();
Place enter_layer(int32_t layer);
Place enter_optimizer();
void leave(Place former);

// The micro-batch that the calling thread entered last, -1: none since `forget`.
int32_t last_forward();

// Between steps: the calling thread is nowhere, and forwards before it are forgotten.
void forget();

// Operators of the calling thread inside are memplug's own, and no part of the program.
void suspend();
void resume();
struct Suspension {
  Suspension() {
    suspend();
    if (c10::InferenceMode::is_enabled()) { // of the program; what memplug makes has a version
      normal_.emplace(false);
      c10::GradMode::set_enabled(false); // as it was
    }
  }
  ~Suspension() {
    resume();
  }

 private:
  std::optional<c10::InferenceMode> normal_;
};

// Autograd nodes that the program has made on the calling thread, ever: a summary of a step's forwards that costs
// nothing to keep.
uint64_t nodes();

void lock_places_for_fork();
void unlock_places_after_fork();

} // namespace memplug
