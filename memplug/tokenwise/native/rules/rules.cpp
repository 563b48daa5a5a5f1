// The rules of recompute passes behind a C interface, for the planner (memplug/tokenwise/plan/rules.py). Compiled apart
// from the core, without torch.
#include "../tape/rules.h"

#include <algorithm>
#include <utility>

namespace {

struct OfPlan {
  int32_t count;
  // `read`: storages that operators read. `changed`: storages that they make or write to. Both are flat lists, in
  // program order. The entries of operator i end before index `read_ends[i]` or `changed_ends[i]`.
  const int32_t *read_ends, *read, *changed_ends, *changed;
  const uint8_t *runs_always, *captured;

  size_t size() const {
    return count;
  }
  bool is_left_out(size_t) const {
    return false;
  }
  bool always_runs(size_t index) const {
    return runs_always[index] != 0;
  }
  memplug::Taken taken(size_t index) const {
    return captured[index] != 0 ? memplug::Taken::WHOLE : memplug::Taken::NOTHING;
  }
  template <typename Visit>
  void each_read(size_t index, const Visit& visit) const {
    std::for_each(read + (index == 0 ? 0 : read_ends[index - 1]), read + read_ends[index], visit);
  }
  template <typename Visit>
  void each_changed(size_t index, const Visit& visit) const {
    std::for_each(changed + (index == 0 ? 0 : changed_ends[index - 1]), changed + changed_ends[index], visit);
  }
  template <typename Visit>
  // Does nothing: in the planner's programs no operator before the captured one writes to its output.
  void each_made(size_t, const Visit&) const {}
};

} // namespace

extern "C" {

int64_t memplug_rows_taken(double fraction, int64_t rows) {
  return memplug::rows_taken(fraction, rows, true);
}

// Writes an `Action` for each of the `count` operators to `actions`. `storages`: number of storages. `wanted`: storages
// that backward asks for. The other arguments are as in `OfPlan`.
void memplug_actions(
    int32_t count,
    const int32_t* read_ends,
    const int32_t* read,
    const int32_t* changed_ends,
    const int32_t* changed,
    const uint8_t* runs_always,
    const uint8_t* captured,
    int32_t storages,
    const int32_t* wanted,
    int32_t wanted_count,
    uint8_t* actions) {
  std::vector<bool> needed(storages);
  std::for_each(wanted, wanted + wanted_count, [&](int32_t storage) { needed[storage] = true; });
  const auto found = memplug::actions_for(
      OfPlan{count, read_ends, read, changed_ends, changed, runs_always, captured}, std::move(needed));
  std::transform(found.begin(), found.end(), actions, [](memplug::Action each) { return static_cast<uint8_t>(each); });
}
}
