// Out of memory: what is tried before a request fails (Chameleon, section 6.3 and algorithm 3).
//
//     request ──fails──► what is leaving is released ──► request ──fails──► more tensors leave ──► request ──► … ──► error
//
// torch's allocator gives back what it has cached before it fails: each try does so too.
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace memplug {

// What was done, in order.
struct ReliefEvent {
  enum Kind : int32_t { FAILED, RELEASED, LEFT, TURNED, SERVED, GIVEN_UP };
  Kind kind;
  int64_t nbytes; // of the request, or of what was freed for it
};

// Frees memory for a request of the calling thread that has failed so often, from 1. False: nothing is left to free.
using Reliever = bool (*)(size_t nbytes, int failures);

// What is to be said of a request that fails for good.
using Explanation = std::function<std::string()>;

// The reliever and the explanation from now on, null for none.
void ask_for_relief(Reliever reliever, Explanation explain);
void end_relief_in_child(); // of a fork

void note_relief(ReliefEvent event);

// Of all requests since the last call, the first few thousand.
std::vector<ReliefEvent> take_relief_events();

bool relieve(size_t nbytes, int failures);
void explain(c10::OutOfMemoryError& error);

// What `request()` gives, which throws where there is no memory.
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
