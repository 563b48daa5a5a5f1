// Decides whether buffers fit below a height: a depth-first search over stable placements, with restarts in other
// orders. Each buffer is in use in consecutive sections of time, which are numbered from 0.
//
// A placement is stable if no buffer can be moved to a lower offset; if any placement fits, a stable one does. The
// search places buffers by rising offset; at the same offset, it places them by rank. Each restart draws the ranks
// anew. So the search visits each placement at most once between two restarts. (Canonical solutions, section inference
// and dynamic decomposition: M. Moffitt, "MiniMalloc", ASPLOS 2023.)
//
// Two things go beyond MiniMalloc. First, a bound: an unplaced buffer would rest at the lowest offset above the placed
// buffers. Once the search has passed this offset, the buffer must rest on another one that is placed later; a shortest
// path gives a lower bound of its offset. Second, restarts (Luby's sequence). Their orders are drawn at random, and
// favour buffers at which earlier searches failed.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;
constexpr int64_t kFirstNodes = 500;
constexpr size_t kStack = size_t{1} << 20, kStackOfBuffer = size_t{1} << 14;

enum Verdict : int32_t { kUnknown = -1, kNo = 0, kYes = 1 };

struct Instance {
  int32_t count, sections;
  const int32_t *lower, *upper;
  const int64_t *size, *alignment;
  int64_t height;
  Clock::time_point deadline;
  std::vector<std::vector<int32_t>> neighbours;  // by buffer: the buffers in use at the same time
  // by buffer: features that orders weigh; all but `middle` are logarithms
  std::vector<double> width, bytes, load, overlaps, middle;

  bool fits_in_time(int32_t a, int32_t b) const { return upper[a] <= lower[b] || upper[b] <= lower[a]; }
};

int64_t aligned(int64_t offset, int64_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

class PlacementSearch {
 public:
  PlacementSearch(const Instance& of, uint64_t seed, std::atomic<bool>& over)
      : in_(of), over_(over), random_(seed), blame_(of.count, 0.0), rank_(of.count), bound_(of.count) {}

  Verdict run(std::vector<int64_t>& offsets) {
    for (int64_t turn = 0; !over_; ++turn) {
      reset();
      order(turn);
      nodes_left_ = kFirstNodes * luby(turn);
      std::vector<int32_t> all(in_.count);
      std::iota(all.begin(), all.end(), 0);
      std::stable_sort(all.begin(), all.end(), [&](int32_t a, int32_t b) { return in_.lower[a] < in_.lower[b]; });
      if (place_parts(all, -1, 0, -1)) {
        offsets = offset_;
        return kYes;
      }
      if (nodes_left_ >= 0 && !over_) return kNo;
    }
    return kUnknown;
  }

 private:
  void reset() {
    sky_.assign(in_.sections, 0);
    load_.assign(in_.sections, 0);
    floor_.assign(in_.sections, 0);
    rest_.assign(in_.count, 0);
    offset_.assign(in_.count, 0);
    placed_.assign(in_.count, 0);
    for (int32_t row = 0; row < in_.count; ++row)
      for (int32_t at = in_.lower[row]; at < in_.upper[row]; ++at) load_[at] += in_.size[row];
    for (double& blame : blame_) blame *= 0.9;
  }

  // Draws the ranks for the search up to the next restart. The first three orders are MiniMalloc's; later ones mix the
  // features at random.
  void order(int64_t turn) {
    std::normal_distribution<double> normal;
    std::exponential_distribution<double> weight;
    auto coin = [&] { return static_cast<double>(random_() & 1); };
    double of_width = coin() * weight(random_), of_size = coin() * weight(random_);
    double of_load = coin() * weight(random_), of_overlaps = coin() * weight(random_);
    double of_middle = coin() * normal(random_), noise = 0.1 * static_cast<double>(random_() % 4);
    if (turn < 3) of_overlaps = of_middle = noise = 0;
    if (turn == 0) of_width = 1e6, of_size = 1, of_load = 1e-6;  // by width, then area, then load
    if (turn == 1) of_load = 1e9, of_width = 1, of_size = 1;     // by load, then area, then width
    if (turn == 2) of_load = 1e9, of_width = 1e3, of_size = 1;   // by load, then width, then area
    const double most_blame = *std::max_element(blame_.begin(), blame_.end());
    const double of_blame = turn % 2 && most_blame > 0 ? 1 / most_blame : 0;
    std::vector<double> key(in_.count);
    for (int32_t row = 0; row < in_.count; ++row)
      key[row] = of_width * in_.width[row] + of_size * in_.bytes[row] + of_load * 4 * in_.load[row] +
                 of_overlaps * in_.overlaps[row] + of_middle * in_.middle[row] + noise * normal(random_);
    std::vector<int32_t> rows = sorted(key);
    if (of_blame > 0) {
      for (int32_t at = 0; at < in_.count; ++at)
        key[rows[at]] = of_blame * blame_[rows[at]] - static_cast<double>(at) / in_.count;
      rows = sorted(key);
    }
    for (int32_t at = 0; at < in_.count; ++at) rank_[rows[at]] = at;
  }

  static std::vector<int32_t> sorted(const std::vector<double>& key) {
    std::vector<int32_t> rows(key.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return key[a] > key[b]; });
    return rows;
  }

  static int64_t luby(int64_t turn) {
    int64_t length = 1, power = 0;
    for (; length < turn + 1; ++power) length = 2 * length + 1;
    for (; length - 1 != turn; --power) {
      length = (length - 1) / 2;
      turn %= length;
    }
    return int64_t{1} << power;
  }

  // Places all of `rows`, which are sorted by `lower`, except `skip`. Splits `rows` at times that no lifetime crosses,
  // and places the parts one after another.
  bool place_parts(const std::vector<int32_t>& rows, int32_t skip, int64_t from, int32_t last_rank) {
    std::vector<std::vector<int32_t>> parts;
    int32_t end = -1;
    for (int32_t row : rows) {
      if (row == skip) continue;
      if (parts.empty() || in_.lower[row] >= end) parts.emplace_back();
      parts.back().push_back(row);
      end = std::max(end, in_.upper[row]);
    }
    // The smallest part first: it fails fastest.
    std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
    return std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return place(part, from, last_rank); });
  }

  bool may_rest(int32_t row, int64_t from, int32_t last_rank) const {
    return rest_[row] > from || (rest_[row] == from && rank_[row] > last_rank);
  }

  // Places all of `rows` at `from` or above; at `from` itself, only buffers with a later rank than `last_rank`.
  bool place(const std::vector<int32_t>& rows, int64_t from, int32_t last_rank) {
    if (--nodes_left_ < 0 || is_over()) return false;
    int64_t ceiling = kNever;
    int32_t begin = in_.lower[rows.front()], end = 0;
    for (int32_t row : rows) {
      ceiling = std::min(ceiling, rest_[row] + in_.size[row]);
      end = std::max(end, in_.upper[row]);
    }
    // A buffer that fits wholly below `from` could be moved there: the placement would not be stable.
    if (ceiling <= from || !bound_offsets(rows, from, last_rank) || !has_room(rows, begin, end)) return false;
    std::vector<int32_t> next;
    for (int32_t row : rows)
      if (rest_[row] < ceiling && may_rest(row, from, last_rank)) next.push_back(row);
    std::sort(next.begin(), next.end(), [&](int32_t a, int32_t b) {
      return rest_[a] != rest_[b] ? rest_[a] < rest_[b] : rank_[a] < rank_[b];
    });
    return branch(rows, next, begin, end);
  }

  bool branch(const std::vector<int32_t>& rows, const std::vector<int32_t>& next, int32_t begin, int32_t end) {
    const std::vector<int64_t> sky(sky_.begin() + begin, sky_.begin() + end);
    const std::vector<int64_t> load(load_.begin() + begin, load_.begin() + end);
    std::vector<int64_t> rest(rows.size());
    for (size_t at = 0; at < rows.size(); ++at) rest[at] = rest_[rows[at]];
    for (int32_t row : next) {
      if (put(row) && place_parts(rows, row, offset_[row], rank_[row])) return true;
      for (size_t at = 0; at < rows.size(); ++at) {
        rest_[rows[at]] = rest[at];
        placed_[rows[at]] = 0;
      }
      std::copy(sky.begin(), sky.end(), sky_.begin() + begin);
      std::copy(load.begin(), load.end(), load_.begin() + begin);
      if (nodes_left_ < 0 || over_) return false;
    }
    return false;
  }

  // Places a buffer at the lowest offset above the placed ones. Returns false if it, or the buffers still to be placed
  // above it, do not fit below the height.
  bool put(int32_t row) {
    const int64_t end = rest_[row] + in_.size[row];
    placed_[row] = 1;
    offset_[row] = rest_[row];
    bool fits = end <= in_.height;
    for (int32_t at = in_.lower[row]; at < in_.upper[row]; ++at) {
      sky_[at] = end;
      load_[at] -= in_.size[row];
      fits = fits && end + load_[at] <= in_.height;
    }
    for (int32_t other : in_.neighbours[row])
      if (!placed_[other]) rest_[other] = std::max(rest_[other], aligned(end, in_.alignment[other]));
    return fits;
  }

  // Computes a lower bound of each unplaced buffer's offset. A buffer that cannot be placed next will rest on one that
  // is placed later. Returns false if a buffer does not fit below the height.
  bool bound_offsets(const std::vector<int32_t>& rows, int64_t from, int32_t last_rank) {
    std::vector<int32_t> hanging;
    for (int32_t row : rows) {
      const bool next = may_rest(row, from, last_rank);
      bound_[row] = next ? rest_[row] : kNever;
      if (!next) hanging.push_back(row);
    }
    for (bool changed = !hanging.empty(); changed;) {
      changed = false;
      for (int32_t row : hanging) {
        int64_t lowest = kNever;
        for (int32_t other : in_.neighbours[row])
          if (!placed_[other]) lowest = std::min(lowest, bound_[other] + in_.size[other]);
        if (lowest >= kNever) continue;
        lowest = aligned(lowest, in_.alignment[row]);
        changed = changed || lowest < bound_[row];
        bound_[row] = std::min(bound_[row], lowest);
      }
    }
    for (int32_t row : rows) {
      if (bound_[row] + in_.size[row] <= in_.height) continue;
      blame_[row] += 1;
      return false;
    }
    return true;
  }

  // Returns whether, in each section, the unplaced buffers fit above the lowest offset that any of them may get.
  bool has_room(const std::vector<int32_t>& rows, int32_t begin, int32_t end) {
    std::fill(floor_.begin() + begin, floor_.begin() + end, kNever);
    for (int32_t row : rows)
      for (int32_t at = in_.lower[row]; at < in_.upper[row]; ++at) floor_[at] = std::min(floor_[at], bound_[row]);
    for (int32_t at = begin; at < end; ++at) {
      if (load_[at] == 0 || floor_[at] + load_[at] <= in_.height) continue;
      for (int32_t row : rows)
        if (in_.lower[row] <= at && at < in_.upper[row]) blame_[row] += 1;
      return false;
    }
    return true;
  }

  bool is_over() {
    if (nodes_left_ % 1024 == 0 && Clock::now() > in_.deadline) over_ = true;
    return over_;
  }

  const Instance& in_;
  std::atomic<bool>& over_;
  std::mt19937_64 random_;
  std::vector<double> blame_;  // by buffer: its failures so far, of which recent ones weigh more
  std::vector<int32_t> rank_;
  std::vector<int64_t> bound_;
  // By section. `sky_`: end of the highest placed buffer. `load_`: bytes of the unplaced buffers. `floor_`: lower bound
  // of the unplaced buffers' offsets.
  std::vector<int64_t> sky_, load_, floor_;
  // By buffer. `rest_`: the lowest offset above the placed buffers. `offset_`: the buffer's own offset, if it is
  // placed.
  std::vector<int64_t> rest_, offset_;
  std::vector<char> placed_;
  int64_t nodes_left_ = 0;
};

void describe(Instance& instance) {
  std::vector<double> load(instance.sections, 0.0);
  for (int32_t row = 0; row < instance.count; ++row)
    for (int32_t at = instance.lower[row]; at < instance.upper[row]; ++at)
      load[at] += static_cast<double>(instance.size[row]) / static_cast<double>(instance.height);
  for (int32_t row = 0; row < instance.count; ++row) {
    const int32_t lower = instance.lower[row], upper = instance.upper[row];
    instance.width.push_back(std::log(upper - lower));
    instance.bytes.push_back(std::log(static_cast<double>(instance.size[row])));
    instance.load.push_back(std::log(*std::max_element(load.begin() + lower, load.begin() + upper)));
    instance.middle.push_back(static_cast<double>(lower + upper) / instance.sections);
    std::vector<int32_t> neighbours;
    for (int32_t other = 0; other < instance.count; ++other)
      if (other != row && !instance.fits_in_time(row, other)) neighbours.push_back(other);
    instance.overlaps.push_back(std::log(1.0 + static_cast<double>(neighbours.size())));
    instance.neighbours.push_back(std::move(neighbours));
  }
}

// Calls work(0) up to work(threads - 1), each on a thread with a stack of `stack` bytes, since the search is recursive.
template <typename Work>
void run_deep(int32_t threads, size_t stack, Work& work) {
  struct DeepTask {
    Work* work;
    uint64_t seed;
  };
  std::vector<DeepTask> tasks;
  for (int32_t seed = 0; seed < threads; ++seed) tasks.push_back({&work, static_cast<uint64_t>(seed)});
  auto start = [](void* task) -> void* {
    (*static_cast<DeepTask*>(task)->work)(static_cast<DeepTask*>(task)->seed);
    return nullptr;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, stack);
  std::vector<pthread_t> started;
  for (DeepTask& task : tasks) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, start, &task) == 0) started.push_back(thread);
  }
  pthread_attr_destroy(&attributes);
  for (pthread_t thread : started) pthread_join(thread, nullptr);
}

}  // namespace

// Searches for offsets with which `count` buffers fit below `height`, for at most `seconds`, on `threads` threads. A
// buffer is in use in the sections from `lower` up to, but not including, `upper`. Returns 1 and fills `offsets` if the
// buffers fit, 0 if they do not, -1 if time runs out.
extern "C" int32_t memplug_decide(int32_t count, int32_t sections, const int32_t* lower, const int32_t* upper,
                                  const int64_t* size, const int64_t* alignment, int64_t height, double seconds,
                                  int32_t threads, int64_t* offsets) {
  const auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  Instance instance{count, sections, lower, upper, size, alignment, height, Clock::now() + limit, {}, {}, {}, {}, {}, {}};
  describe(instance);
  std::atomic<bool> over{false};
  std::atomic<int32_t> verdict{kUnknown};
  auto work = [&](uint64_t seed) {
    std::vector<int64_t> found;
    const Verdict mine = PlacementSearch(instance, seed, over).run(found);
    int32_t unknown = kUnknown;
    if (mine != kUnknown && verdict.compare_exchange_strong(unknown, mine)) std::copy(found.begin(), found.end(), offsets);
    if (mine != kUnknown) over = true;
  };
  run_deep(threads, kStack + kStackOfBuffer * count, work);
  return verdict;
}
