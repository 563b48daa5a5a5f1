// A task's vector clock has the tasks that precede it: by its stream's order, by events or by waits of the host. For
// each byte of device and pinned memory, the detector stores the last writer and the readers since then.
#include "races.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>

namespace cudasim {
namespace {

const size_t MOST_TOLD = 100;

bool precedes(const Access& access, const Clock& clock) {
  return access.stream < 0 ||
      (static_cast<size_t>(access.stream) < clock.size() && clock[access.stream] >= access.position);
}

// Splits a segment if needed, so that one begins at this byte.
void split(uintptr_t at) {
  auto& all = state().accesses;
  const auto next = all.upper_bound(at);
  if (next == all.begin()) {
    return;
  }
  const auto it = std::prev(next);
  if (it->first < at && at < it->second.end) {
    Segment right = it->second;
    it->second.end = at;
    all.emplace(at, std::move(right));
  }
}

// Calls f with each segment of a range; makes new segments for bytes that were never touched.
template <typename F>
void visit(const Range& range, const F& f) {
  auto& all = state().accesses;
  split(range.begin);
  split(range.end);
  uintptr_t at = range.begin;
  auto it = all.lower_bound(at);
  while (at < range.end) {
    if (it == all.end() || it->first > at) {
      const uintptr_t end = it == all.end() ? range.end : std::min(range.end, it->first);
      it = all.emplace_hint(it, at, Segment{end, {}, {}});
    }
    f(it->second);
    at = it->second.end;
    ++it;
  }
}

bool note(const Stream& stream, const char* task, const Range& range) {
  const Access mine{stream.index, stream.position, task};
  bool ordered = true;
  const auto complain = [&](const Access& other, const char* did) {
    ordered = false;
    violation(std::string("race: ") + task + " on stream " + std::to_string(stream.index) +
              (range.write ? " writes" : " reads") + " what " + other.name + " on stream " +
              std::to_string(other.stream) + " " + did + ", and is not ordered after it (" +
              std::to_string(range.end - range.begin) + " bytes)");
  };
  visit(range, [&](Segment& segment) {
    if (!precedes(segment.written, stream.clock)) {
      complain(segment.written, "wrote");
    }
    auto& read = segment.read;
    if (range.write) {
      for (const Access& reader : read) {
        if (!precedes(reader, stream.clock)) {
          complain(reader, "reads");
        }
      }
    } else {
      read.erase(std::remove_if(read.begin(), read.end(), [&](const Access& r) { return precedes(r, stream.clock); }),
                 read.end());
      read.push_back(mine);
    }
  });
  if (range.write) { // the whole range now has one last writer
    auto& all = state().accesses;
    all.erase(all.lower_bound(range.begin), all.lower_bound(range.end));
    all.emplace(range.begin, Segment{range.end, mine, {}});
  }
  return ordered;
}

} // namespace

bool note_accesses(const Stream& stream, const char* task, const Ranges& ranges) {
  bool ordered = true;
  if (settings().races != Races::OFF) {
    for (const Range& range : ranges) {
      ordered = (range.begin >= range.end || note(stream, task, range)) && ordered;
    }
  }
  return ordered;
}

void forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  auto& all = state().accesses;
  all.erase(all.lower_bound(begin), all.lower_bound(end));
}

void check_unused(uintptr_t begin, uintptr_t end, const char* call) {
  for (const Stream* stream : state().streams) {
    for (const Task& task : stream->queue) {
      for (const Range& range : task.ranges) {
        if (range.begin < end && begin < range.end) {
          violation(std::string(call) + " of memory that " + task.name + " on stream " +
                    std::to_string(stream->index) + " has still to use");
          return;
        }
      }
    }
  }
}

void violation(const std::string& what) {
  State& s = state();
  ++s.violations;
  const Races races = settings().races;
  if (races != Races::OFF && races != Races::COUNT && s.told.insert(what).second && s.told.size() <= MOST_TOLD) {
    std::fprintf(stderr, "cudasim: VIOLATION: %s\n", what.c_str());
  }
  if (races == Races::ABORT) {
    std::abort();
  }
}

} // namespace cudasim

CUDASIM_API long long cudasim_violations() {
  return cudasim::state().violations;
}
