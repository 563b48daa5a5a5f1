// Serves the requests of a step one by one, as the arena serves dynamic ones, from two ends of a room without a limit.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>

namespace {

// One end of a room. Offsets are counted from that end.
class Side {
 public:
  // Takes the lowest free bytes; returns their offset.
  int64_t take(int64_t size) {
    auto hole = holes_.begin();
    while (hole->second - hole->first < size) ++hole;
    const auto [begin, end] = *hole;
    holes_.erase(hole);
    if (begin + size < end) holes_.emplace(begin + size, end);
    return begin;
  }

  void give_back(int64_t begin, int64_t size) {
    int64_t end = begin + size;
    auto after = holes_.lower_bound(end);
    if (after->first == end) {
      end = after->second;
      after = holes_.erase(after);
    }
    if (after != holes_.begin() && std::prev(after)->second == begin)
      std::prev(after)->second = end;
    else
      holes_.emplace_hint(after, begin, end);
  }

  // Returns the end of the highest bytes in use.
  int64_t height() const { return std::prev(holes_.end())->first; }

 private:
  std::map<int64_t, int64_t> holes_ = {{0, std::numeric_limits<int64_t>::max()}};  // from begin to end
};

}  // namespace

// Each of the `events` is the malloc of request[event], or its free if that request is in use. Requests of `size` bytes
// take the lowest free bytes at the bottom, or where `hangs` is set the highest at the top. Writes the `begin` of each,
// counted from its end of the room, and the `height` that the room needs after each event.
extern "C" void memplug_serve(int32_t events, int32_t count, const int32_t* request, const int64_t* size,
                              const uint8_t* hangs, int64_t* begin, int64_t* height) {
  Side sides[2];
  std::fill(begin, begin + count, -1);
  for (int32_t event = 0; event < events; ++event) {
    const int32_t row = request[event];
    Side& side = sides[hangs[row] != 0];
    if (begin[row] < 0)
      begin[row] = side.take(size[row]);
    else
      side.give_back(begin[row], size[row]);
    height[event] = sides[0].height() + sides[1].height();
  }
}
