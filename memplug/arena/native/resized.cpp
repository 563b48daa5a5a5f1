// Finds planned requests whose sizes differ in this step from the plan's.
#include <algorithm>
#include <set>

#include "arena.h"

namespace memplug {
namespace {

constexpr size_t MOST_UNKNOWN = 4096; // a step that makes more such requests runs another program
constexpr int32_t MOST_ABSENT = 32; // planned requests to search for one that has not come

} // namespace

void Arena::note_unknown(const Spot& spot, int64_t size, Stream stream) {
  if (now_.unknown.size() < MOST_UNKNOWN && is_stream(0, stream)) {
    now_.unknown.push_back({&spot, spot.next, size});
  }
}

std::vector<std::pair<int32_t, int64_t>> Arena::resized() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<int32_t> taken;
  const auto is_absent = [&](int32_t at) {
    const Row& row = now_.rows[at];
    return row.served_in != step_ && row.kept < 0 && row.stream == 0 && taken.count(at) == 0;
  };
  // The nearest one from the expected request on, else before it.
  const auto absent = [&](const UnknownRequest& unknown) {
    const auto [spot, expected, size] = unknown;
    for (int32_t at = expected; at < std::min(spot->end, expected + MOST_ABSENT); ++at) {
      if (is_absent(at)) {
        return at;
      }
    }
    for (int32_t at = expected - 1; at >= std::max(spot->begin, expected - MOST_ABSENT); --at) {
      if (is_absent(at)) {
        return at;
      }
    }
    return -1;
  };
  std::vector<std::pair<int32_t, int64_t>> found;
  for (const UnknownRequest& unknown : now_.unknown) {
    if (const int32_t at = absent(unknown); at >= 0) {
      taken.insert(at);
      found.emplace_back(at, unknown.size);
    }
  }
  return found;
}

} // namespace memplug
