// Places buffers one by one in a given order, each in a gap among placed buffers that live at the same time.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

struct PlacedBuffer {
  int64_t offset, end;
  int32_t lower, upper;
};

// Placed buffers sorted by offset, in several vectors that are short enough for cheap insertion.
class Shelf {
 public:
  void insert(const PlacedBuffer& placed) {
    auto after = [](int64_t offset, const std::vector<PlacedBuffer>& block) { return offset < block.front().offset; };
    auto block = std::upper_bound(blocks_.begin(), blocks_.end(), placed.offset, after);
    if (block != blocks_.begin()) --block;
    if (block == blocks_.end()) block = blocks_.emplace(block);
    auto later = [](int64_t offset, const PlacedBuffer& other) { return offset < other.offset; };
    block->insert(std::upper_bound(block->begin(), block->end(), placed.offset, later), placed);
    if (block->size() > kBlock) {
      std::vector<PlacedBuffer> half(block->begin() + kBlock / 2, block->end());
      block->resize(kBlock / 2);
      blocks_.insert(block + 1, std::move(half));
    }
  }

  // Calls visit(offset, end) for buffers in use in [lower, upper), sorted by offset, until `visit` returns false.
  template <typename Visit>
  void scan(int32_t lower, int32_t upper, Visit visit) const {
    for (const auto& block : blocks_)
      for (const PlacedBuffer& placed : block)
        if (placed.lower < upper && lower < placed.upper && !visit(placed.offset, placed.end)) return;
  }

 private:
  static constexpr size_t kBlock = 512;
  std::vector<std::vector<PlacedBuffer>> blocks_;
};

// Holds all placed buffers twice: on one shelf, and again on one shelf for each stretch of time. To look up a short
// lifetime, the shelf of its stretch suffices.
class Shelves {
 public:
  Shelves(int32_t instants, int32_t stretches)
      : width_((instants + stretches - 1) / stretches), of_stretch_(stretches > 1 ? stretches : 0) {}

  void insert(const PlacedBuffer& placed) {
    all_.insert(placed);
    if (of_stretch_.empty()) return;
    for (int32_t at = placed.lower / width_; at <= (placed.upper - 1) / width_; ++at) of_stretch_[at].insert(placed);
  }

  template <typename Visit>
  void scan(int32_t lower, int32_t upper, Visit visit) const {
    const int32_t first = lower / width_;
    const bool is_short = !of_stretch_.empty() && first == (upper - 1) / width_;
    (is_short ? of_stretch_[first] : all_).scan(lower, upper, visit);
  }

 private:
  int32_t width_;
  Shelf all_;
  std::vector<Shelf> of_stretch_;
};

int64_t aligned(int64_t offset, int64_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

}  // namespace

// Places `count` buffers in the order of `order`, and writes `offsets`. A buffer's lifetime is [lower, upper), in
// instants from 0 up to `instants`. The buffer gets the lowest offset that is free during its lifetime, or with
// `tightest` the smallest gap. Returns the height; once the height reaches `limit`, leaves all further buffers
// unplaced.
extern "C" int64_t memplug_place(int32_t count, int32_t instants, const int32_t* lower, const int32_t* upper,
                                 const int64_t* size, const int64_t* alignment, const int32_t* order, int32_t tightest,
                                 int64_t limit, int64_t* offsets) {
  Shelves shelves(instants, std::clamp(count / 512, 1, 256));
  int64_t height = 0;
  for (int32_t turn = 0; turn < count; ++turn) {
    const int32_t row = order[turn];
    int64_t top = 0, found = -1, smallest = std::numeric_limits<int64_t>::max();
    shelves.scan(lower[row], upper[row], [&](int64_t offset, int64_t end) {
      const int64_t start = aligned(top, alignment[row]), gap = offset - start;
      if (gap >= size[row] && gap < smallest) {
        found = start;
        smallest = gap;
        if (!tightest || gap == size[row]) return false;
      }
      top = std::max(top, end);
      return true;
    });
    offsets[row] = found >= 0 ? found : aligned(top, alignment[row]);
    height = std::max(height, offsets[row] + size[row]);
    if (height >= limit) return height;
    shelves.insert({offsets[row], offsets[row] + size[row], lower[row], upper[row]});
  }
  return height;
}
