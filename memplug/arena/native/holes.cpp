#include "holes.h"

#include <algorithm>
#include <iterator>

namespace memplug {
namespace {

int64_t size_of(const Stretch& hole) {
  return hole.second - hole.first;
}

} // namespace

Holes::Holes(int64_t nbytes) : chunks_{{0, nbytes, {{0, nbytes}}}} {}

// Returns the position behind the last hole that begins at or below `offset`, in that hole's chunk; if there is no such
// hole, the position of the first hole.
Holes::Position Holes::behind(int64_t offset) const {
  const auto chunk = std::prev(std::upper_bound(
      std::next(chunks_.begin()), chunks_.end(), offset, [](int64_t o, const HoleChunk& chunk) { return o < chunk.begin; }));
  const auto hole = std::upper_bound(
      chunk->holes.begin(), chunk->holes.end(), offset, [](int64_t o, const Stretch& hole) { return o < hole.first; });
  return {static_cast<size_t>(chunk - chunks_.begin()), static_cast<size_t>(hole - chunk->holes.begin())};
}

// Returns the position of the last hole that begins at or below `offset`, or else of the first hole.
Holes::Position Holes::at_or_below(int64_t offset) const {
  const Position at = behind(offset);
  return {at.chunk, at.hole > 0 ? at.hole - 1 : 0};
}

// Returns whether there is a hole at this position that contains `offset`.
bool Holes::holds(Position at, int64_t offset) const {
  if (at.chunk >= chunks_.size() || at.hole >= chunks_[at.chunk].holes.size()) {
    return false;
  }
  const auto& [begin, end] = chunks_[at.chunk].holes[at.hole];
  return begin <= offset && offset < end;
}

void Holes::take(int64_t begin, int64_t end) {
  const Position at = holds(found_, begin) ? found_ : at_or_below(begin);
  HoleChunk& chunk = chunks_[at.chunk];
  Stretch& hole = chunk.holes[at.hole];
  const int64_t hole_end = hole.second;
  if (hole.first < begin) {
    hole.second = begin;
    if (end < hole_end) {
      insert({at.chunk, at.hole + 1}, {end, hole_end});
    }
  } else if (end < hole_end) {
    hole.first = end;
    chunk.begin = chunk.holes.front().first;
  } else {
    erase(at);
  }
}

void Holes::give_back(int64_t begin, int64_t end) {
  const Position at = behind(begin);
  HoleChunk& chunk = chunks_[at.chunk];
  const bool is_last = at.hole == chunk.holes.size() && at.chunk + 1 < chunks_.size();
  const Position next = is_last ? Position{at.chunk + 1, 0} : at;
  HoleChunk& after = chunks_[next.chunk];
  Stretch* const lower = at.hole > 0 ? &chunk.holes[at.hole - 1] : nullptr;
  Stretch* const upper = next.hole < after.holes.size() ? &after.holes[next.hole] : nullptr;
  const bool joins_upper = upper != nullptr && upper->first == end;
  if (lower != nullptr && lower->second == begin) {
    lower->second = joins_upper ? upper->second : end;
    chunk.largest = std::max(chunk.largest, size_of(*lower));
    if (joins_upper) {
      erase(next);
    }
  } else if (joins_upper) {
    upper->first = begin;
    after.begin = after.holes.front().first;
    after.largest = std::max(after.largest, size_of(*upper));
  } else {
    insert(at, {begin, end});
  }
}

void Holes::insert(Position at, Stretch hole) {
  if (chunks_[at.chunk].holes.size() == MOST_HOLES) {
    constexpr size_t HALF = MOST_HOLES / 2;
    HoleChunk& lower = chunks_[at.chunk];
    const auto middle = lower.holes.begin() + HALF;
    HoleChunk upper{middle->first, lower.largest, {middle, lower.holes.end()}};
    lower.holes.erase(middle, lower.holes.end());
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(at.chunk) + 1, std::move(upper));
    at = at.hole <= HALF ? at : Position{at.chunk + 1, at.hole - HALF};
  }
  HoleChunk& chunk = chunks_[at.chunk];
  chunk.holes.insert(chunk.holes.begin() + static_cast<std::ptrdiff_t>(at.hole), hole);
  chunk.begin = chunk.holes.front().first;
  chunk.largest = std::max(chunk.largest, size_of(hole));
}

void Holes::erase(Position at) {
  HoleChunk& chunk = chunks_[at.chunk];
  chunk.holes.erase(chunk.holes.begin() + static_cast<std::ptrdiff_t>(at.hole));
  if (!chunk.holes.empty()) {
    chunk.begin = chunk.holes.front().first;
  } else if (chunks_.size() > 1) {
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(at.chunk));
  }
}

bool Holes::are_free(int64_t begin, int64_t end) const {
  const Position at = at_or_below(begin);
  const std::vector<Stretch>& holes = chunks_[at.chunk].holes;
  return !holes.empty() && holes[at.hole].first <= begin && end <= holes[at.hole].second;
}

Stretch Holes::lowest(int64_t begin, int64_t end, int64_t size) {
  const auto is_large = [size](const Stretch& hole) { return size_of(hole) >= size; };
  const Position first = at_or_below(begin);
  for (auto chunk = chunks_.begin() + first.chunk;; ++chunk) {
    chunk = std::find_if(chunk, chunks_.end(), [size](const HoleChunk& chunk) { return chunk.largest >= size; });
    if (chunk == chunks_.end()) {
      return {end, end};
    }
    auto& holes = chunk->holes;
    const auto from = holes.begin() + (chunk == chunks_.begin() + first.chunk ? first.hole : 0);
    auto hole = std::find_if(from, holes.end(), is_large);
    if (hole == holes.end() && from == holes.begin()) {
      note_largest(*chunk);
    }
    for (; hole != holes.end(); hole = std::find_if(hole + 1, holes.end(), is_large)) {
      const Stretch found{std::max(hole->first, begin), std::min(hole->second, end)};
      if (size_of(found) >= size || hole->first >= end) {
        found_ = {static_cast<size_t>(chunk - chunks_.begin()), static_cast<size_t>(hole - holes.begin())};
        return size_of(found) >= size ? found : Stretch{end, end};
      }
    }
  }
}

Stretch Holes::highest(int64_t begin, int64_t end, int64_t size) {
  const auto is_large = [size](const Stretch& hole) { return size_of(hole) >= size; };
  const Position last = at_or_below(end);
  for (auto chunk = std::make_reverse_iterator(chunks_.begin() + last.chunk + 1);; ++chunk) {
    chunk = std::find_if(chunk, chunks_.rend(), [size](const HoleChunk& chunk) { return chunk.largest >= size; });
    if (chunk == chunks_.rend()) {
      return {begin, begin};
    }
    auto& holes = chunk->holes;
    auto hole = std::find_if(holes.rbegin(), holes.rend(), is_large);
    if (hole == holes.rend()) {
      note_largest(*chunk);
    }
    for (; hole != holes.rend(); hole = std::find_if(hole + 1, holes.rend(), is_large)) {
      const Stretch found{std::max(hole->first, begin), std::min(hole->second, end)};
      if (size_of(found) >= size || hole->second <= begin) {
        found_ = {static_cast<size_t>(chunks_.rend() - chunk - 1), static_cast<size_t>(holes.rend() - hole - 1)};
        return size_of(found) >= size ? found : Stretch{begin, begin};
      }
    }
  }
}

void Holes::note_largest(HoleChunk& chunk) {
  chunk.largest = 0;
  for (const Stretch& hole : chunk.holes) {
    chunk.largest = std::max(chunk.largest, size_of(hole));
  }
}

} // namespace memplug
