// The free stretches of a piece of memory, sorted by address. Chunks of at most MOST_HOLES neighbouring holes know the
// largest size among their holes. A search skips chunks without a large enough hole: of n holes it reads some sqrt(n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memplug {

using Stretch = std::pair<int64_t, int64_t>; // offsets [begin, end)

class Holes {
 public:
  // Begins with memory of `nbytes` that is free.
  explicit Holes(int64_t nbytes);

  // Takes bytes that are free; [begin, end) is not empty.
  void take(int64_t begin, int64_t end);

  // Gives back bytes that are in use; [begin, end) is not empty.
  void give_back(int64_t begin, int64_t end);

  // Returns whether all bytes of [begin, end) are free.
  bool are_free(int64_t begin, int64_t end) const;

  // Returns the part in [begin, end) of the lowest hole that has at least `size` bytes there, or an empty stretch.
  Stretch lowest(int64_t begin, int64_t end, int64_t size);

  // Returns the part in [begin, end) of the highest hole that has at least `size` bytes there, or an empty stretch.
  Stretch highest(int64_t begin, int64_t end, int64_t size);

 private:
  static constexpr size_t MOST_HOLES = 64;

  struct HoleChunk { // only the first chunk may be empty, if there is no hole
    int64_t begin; // where the first hole begins
    int64_t largest; // no hole of the chunk has more bytes; searches lower it to the truth
    std::vector<Stretch> holes;
  };
  struct Position {
    size_t chunk;
    size_t hole;
  };

  Position behind(int64_t offset) const;
  Position at_or_below(int64_t offset) const;
  bool holds(Position at, int64_t offset) const;
  void insert(Position at, Stretch hole);
  void erase(Position at);
  static void note_largest(HoleChunk& chunk);

  std::vector<HoleChunk> chunks_;
  Position found_{0, 0}; // of the latest search, most likely the hole to take bytes from next
};

} // namespace memplug
