// Finds free bytes for requests that are not served at a planned address, and serves them there.
//
// Such a request gets the lowest free bytes of its group, the highest ones below its group's ceiling, or those of the
// annex. Free are the bytes of a hole (holes.h) in which no planned block is in use. While the program keeps to its
// plan, no planned block is in use in a group's space at all, so that a search reads holes only.
#include <algorithm>

#include "arena.h"

namespace memplug {

Arena::SearchedSpace Arena::space_of(int64_t begin, int64_t end) const {
  return {begin, end, now_.planned.number_from(begin), now_.planned.number_from(end)};
}

bool Arena::has_planned(const SearchedSpace& space) const {
  const int64_t next = now_.planned.next(space.first);
  return (next >= 0 && next < space.last) || now_.planned.reaching(space.first, space.begin) >= 0;
}

// Returns the first planned block in use that overlaps [begin, end), clipped to begin at `begin` or later; an empty
// stretch at `end` if there is none.
Stretch Arena::first_planned(int64_t begin, int64_t end) const {
  const int64_t above = now_.planned.number_from(begin + 1);
  const int64_t reaching = now_.planned.reaching(above, begin);
  const int64_t first = reaching >= 0 ? reaching : now_.planned.next(above);
  if (first < 0 || now_.planned.offset(first) >= end) {
    return {end, end};
  }
  return {std::max(now_.planned.offset(first), begin), now_.planned[first].end};
}

// Returns the last planned block in use that overlaps [begin, end), clipped to end at `end` or earlier; an empty
// stretch at `begin` if there is none.
Stretch Arena::last_planned(int64_t begin, int64_t end) const {
  const int64_t last = now_.planned.reaching(now_.planned.number_from(end), begin);
  return last < 0 ? Stretch{begin, begin} : Stretch{now_.planned.offset(last), std::min(now_.planned[last].end, end)};
}

// Returns the offset of the lowest `size` bytes of the space that are free now, or -1.
int64_t Arena::lowest(const SearchedSpace& space, int64_t size) {
  const bool planned = has_planned(space);
  for (int64_t from = space.begin; space.end - from >= size;) {
    const Stretch hole = reused_->holes.lowest(from, space.end, size);
    for (int64_t begin = hole.first; hole.second - begin >= size;) {
      const Stretch block = planned ? first_planned(begin, hole.second) : Stretch{hole.second, hole.second};
      if (block.first - begin >= size) {
        return begin;
      }
      begin = block.second;
    }
    from = hole.second;
  }
  return -1;
}

// Returns the offset of the highest `size` bytes of the space that are free now, or -1.
int64_t Arena::highest(const SearchedSpace& space, int64_t size) {
  const bool planned = has_planned(space);
  for (int64_t to = space.end; to - space.begin >= size;) {
    const Stretch hole = reused_->holes.highest(space.begin, to, size);
    for (int64_t end = hole.second; end - hole.first >= size;) {
      const Stretch block = planned ? last_planned(hole.first, end) : Stretch{hole.first, hole.first};
      if (end - block.second >= size) {
        return end - size;
      }
      end = block.first;
    }
    to = hole.first;
  }
  return -1;
}

int64_t Arena::lowest_of(int32_t group, int64_t size) {
  for (const SearchedSpace& space : now_.spaces_of[group]) {
    if (const int64_t offset = lowest(space, size); offset >= 0) {
      return offset;
    }
  }
  return -1;
}

int64_t Arena::highest_of(int32_t group, int64_t size, int64_t ceiling) {
  const std::vector<SearchedSpace>& spaces = now_.spaces_of[group];
  for (auto space = spaces.rbegin(); space != spaces.rend(); ++space) {
    SearchedSpace below = *space;
    below.end = std::min(below.end, ceiling);
    if (const int64_t offset = highest(below, size); offset >= 0) {
      return offset;
    }
  }
  return -1;
}

// Serves a dynamic request from the lowest free bytes of its group, or the highest ones below the group's ceiling.
void* Arena::take_dynamic(Spot& spot, const RequestKind& kind, size_t nbytes, Stream stream) {
  const int32_t group = now_.plan.dynamic[spot.dynamic_next].group;
  spot.dynamic_next = std::min(spot.dynamic_next + 1, spot.dynamic_end - 1);
  if (group < 0 || !is_stream(0, stream)) {
    return nullptr;
  }
  const int64_t ceiling = now_.plan.ceilings[group];
  int64_t offset = ceiling > 0 ? highest_of(group, kind.size, ceiling) : -1;
  offset = offset < 0 ? lowest_of(group, kind.size) : offset;
  return offset < 0 ? nullptr : take_other(*reused_, offset, kind, nbytes, stream, now_.plan.crosses[group]);
}

// Serves a request from the lowest free bytes of the group.
void* Arena::take_reusable(int32_t group, const RequestKind& kind, size_t nbytes, Stream stream) {
  const int64_t offset = is_stream(0, stream) ? lowest_of(group, kind.size) : -1;
  return offset < 0 ? nullptr : take_other(*reused_, offset, kind, nbytes, stream, now_.plan.crosses[group]);
}

// Serves a request that the plan does not have, such as one of a validation or of data loading, or of a larger step than
// planned. Prefers the bytes that the plan needs last, and then the highest free bytes.
void* Arena::serve_reusable(const RequestKind& kind, size_t nbytes, Stream stream) {
  if (reused_ == nullptr || !is_stream(0, stream)) {
    return nullptr;
  }
  for (const int32_t group : now_.plan.reusable) {
    if (void* found = take_reusable(group, kind, nbytes, stream)) {
      return found;
    }
  }
  const int64_t offset = highest(space_of(0, reused_->nbytes), kind.size);
  return offset < 0 ? nullptr : take_other(*reused_, offset, kind, nbytes, stream, ~uint64_t{0});
}

// Serves a request from the lowest free bytes of the annex.
void* Arena::take_annex(const RequestKind& kind, size_t nbytes, Stream stream) {
  const Stretch hole = annex_->holes.lowest(0, annex_->nbytes, kind.size);
  const bool found = hole.second > hole.first;
  return found ? take_other(*annex_, hole.first, kind, nbytes, stream, ~uint64_t{0}) : nullptr;
}

void* Arena::take_other(
    Reservation& part, int64_t offset, const RequestKind& kind, size_t nbytes, Stream stream, uint64_t crosses) {
  char* const begin = part.begin + offset;
  const bool wanted = hand_out(begin, kind.size, nbytes, stream, crosses);
  add_other(begin, {begin + kind.size, static_cast<int64_t>(nbytes), stream, &part, kind, wanted});
  ++part.live;
  return begin;
}

void Arena::add_other(char* begin, const Other& other) {
  others_.add(begin, other);
  other.part->holes.take(begin - other.part->begin, other.end - other.part->begin);
}

} // namespace memplug
