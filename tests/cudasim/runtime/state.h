// Streams, tasks, events and memory of the simulated device; all of it under one lock.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>

#include "cudasim.h"
#include "settings.h"

namespace cudasim {

// A vector clock: for each stream, how many of its tasks are known to have run before.
using Clock = std::vector<uint64_t>;

inline void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

struct Stream;
struct Graph;

// One recording of an event.
struct Mark {
  bool done = false;
  double time = 0; // when it was reached, in virtual seconds
  int queries = 0;
  Stream* stream = nullptr;
  Clock clock;
  Graph* capture = nullptr; // the graph into which the event was captured; null: none
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  enum Kind { RUN, RECORD, WAIT } kind = RUN;
  const char* name = "";
  std::function<void()> run;
  Ranges ranges;
  MarkPtr mark;         // for RECORD and WAIT
  double host_time = 0; // when the task was queued, in virtual seconds
  double seconds = -1;  // how long the task takes; negative: as long as it really takes
};

struct Stream {
  int index = 0;
  bool is_default = false;
  int priority = 0;
  unsigned flags = 0;
  std::deque<Task> queue;
  uint64_t position = 0; // position of the task that was queued last
  Clock clock;           // clock of the task that is queued next
  double time = 0;       // when the last task that has run ended, in virtual seconds
  int queries = 0;
  Graph* capture = nullptr;
};

// The tasks that were queued while streams were captured, in program order.
struct Graph {
  std::vector<Task> tasks;
  unsigned long long id = 0;
  Stream* origin = nullptr;
  std::map<Stream*, Clock> clocks; // for each stream that takes part: which tasks of the graph precede its next task
  bool invalid = false;
};

struct Event {
  unsigned flags = 0;
  MarkPtr mark;
};

// One task's access to some bytes.
struct Access {
  int stream = -1;
  uint64_t position = 0;
  const char* name = "";
};
struct Segment {
  uintptr_t end = 0;
  Access written;
  std::vector<Access> read;
};

struct State {
  std::recursive_mutex mutex;
  std::vector<Stream*> streams; // never deleted
  Stream* default_stream = nullptr;
  std::map<uintptr_t, size_t> device, pinned; // begin -> bytes
  std::set<uintptr_t> registered;             // pieces of `pinned` that are the program's own memory
  size_t used_bytes = 0, pinned_bytes = 0;
  std::mt19937_64 random;
  Clock host; // the tasks that the host has waited for
  std::map<uintptr_t, Segment> accesses;
  std::unordered_map<const void*, std::string> kernels;
  std::set<std::string> told;
  long long violations = 0, tasks = 0, blocked = 0;
  unsigned long long captures = 0;
};

State& state();

using Lock = std::lock_guard<std::recursive_mutex>;

Stream* new_stream();
Stream* stream_of(cudaStream_t handle);
inline Event* event_of(cudaEvent_t handle) {
  return reinterpret_cast<Event*>(handle);
}

// Sets what cudaGetLastError returns in this thread.
cudaError_t fail(cudaError_t error);

} // namespace cudasim
