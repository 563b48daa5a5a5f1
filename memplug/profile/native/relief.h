// Frees device memory when a request fails for lack of it, and tries again (Chameleon, section 6.3 and algorithm 3).
//
//     request ──fails──► release offloaded tensors ──► request ──fails──► offload more ──► request ──► … ──► error
//
// torch's allocator also frees its cached memory before it lets a request fail.
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace memplug {

// One event of relief. FAILED: the request failed. RELEASED: memory of offloaded tensors was released. LEFT: another
// tensor was offloaded. TURNED: a tensor's prefetch was undone. SERVED: the request succeeded. GIVEN_UP: the request
// failed for good.
struct ReliefEvent {
  enum ReliefKind : int32_t { FAILED, RELEASED, LEFT, TURNED, SERVED, GIVEN_UP };
  ReliefKind kind;
  int64_t nbytes; // bytes of the request, or of the memory that was freed for it
};

// Frees memory for a request of the calling thread; `failures`: how often the request has failed, from 1. Returns
// whether to try the request again; false if there is nothing left to free.
using Reliever = bool (*)(size_t nbytes, int failures);

// Returns the text that memplug adds to the error of a request that fails for good.
using Explanation = std::function<std::string()>;

// Sets the reliever and the explanation; null removes them.
void ask_for_relief(Reliever reliever, Explanation explain);
void end_relief_in_child(); // called in the child of a fork

void note_relief(ReliefEvent event);

// Returns the events since the last call, at most the first 4096.
std::vector<ReliefEvent> take_relief_events();

bool relieve(size_t nbytes, int failures);
void explain(c10::OutOfMemoryError& error);

// Returns the result of `request()`. If the call throws for lack of memory, frees memory and calls again.
template <typename Request>
auto with_relief(size_t nbytes, const Request& request) {
  for (int failures = 0;;) {
    try {
      auto given = request();
      if (failures > 0) {
        note_relief({ReliefEvent::SERVED, static_cast<int64_t>(nbytes)});
      }
      return given;
    } catch (c10::OutOfMemoryError& error) {
      if (!relieve(nbytes, ++failures)) {
        explain(error);
        throw;
      }
    }
  }
}

} // namespace memplug
