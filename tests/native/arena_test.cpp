// Drives the arena's core by itself, on memory of the host with streams and events that only keep count. Built and run
// by tests/test_arena_core.py, under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer.
#include "../../memplug/native/arena.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

using namespace memplug;

namespace {

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      std::exit(1);                                                           \
    }                                                                         \
  } while (false)

const int main_stream = 0, side_stream = 0;
const Stream MAIN = &main_stream, SIDE = &side_stream;
constexpr int64_t UNIT = GRANULARITY;

// Work queued on a stream is a running number; waiting for an event brings a stream up to another's.
struct Simulated final : Device {
  ~Simulated() override {
    CHECK(events == 0);
    CHECK(reserved.empty());
  }
  char* reserve(size_t nbytes) override {
    if (reserved_bytes + nbytes > capacity) {
      throw std::runtime_error("out of memory");
    }
    auto* const begin = static_cast<char*>(std::aligned_alloc(UNIT, nbytes));
    std::lock_guard<std::mutex> lock(mutex);
    reserved[begin] = nbytes;
    reserved_bytes += nbytes;
    return begin;
  }
  void release(char* begin) override {
    std::lock_guard<std::mutex> lock(mutex);
    reserved_bytes -= reserved.at(begin);
    reserved.erase(begin);
    std::free(begin);
  }
  Event record(Stream stream) override {
    ++events;
    return new std::pair<Stream, int64_t>(stream, queued[stream]);
  }
  void wait(Stream stream, Event event) override {
    const auto& [other, number] = *static_cast<std::pair<Stream, int64_t>*>(event);
    auto& known = seen[{stream, other}];
    known = std::max(known, number);
  }
  bool is_done(Event event) override {
    const auto& [stream, number] = *static_cast<std::pair<Stream, int64_t>*>(event);
    return number <= finished[stream];
  }
  void drop(Event event) override {
    --events;
    delete static_cast<std::pair<Stream, int64_t>*>(event);
  }
  void synchronize() override {
    for (const auto& [stream, number] : queued) {
      finished[stream] = number;
    }
  }
  void fill(char* begin, size_t nbytes, int byte, Stream) override {
    std::memset(begin, byte, nbytes);
  }
  bool is_filled(const char* begin, size_t nbytes, int byte, Stream) override {
    return std::all_of(begin, begin + nbytes, [&](char c) { return c == static_cast<char>(byte); });
  }
  bool handed_out(void*, size_t, Stream) override {
    return true;
  }
  void came_back(void*, size_t, bool, bool) override {}

  // Work of a stream from now on follows all that the other has queued so far, by events.
  bool is_after(Stream stream, Stream other) {
    return seen[{stream, other}] >= queued[other];
  }

  std::mutex mutex;
  std::map<char*, size_t> reserved;
  size_t reserved_bytes = 0, capacity = size_t{1} << 30;
  int64_t events = 0;
  std::map<Stream, int64_t> queued, finished;
  std::map<std::pair<Stream, Stream>, int64_t> seen;
};

PlannedRequest planned(int64_t offset, int64_t size, int32_t phase = 0, int32_t stream = 0, uint64_t crosses = 0) {
  return {size * UNIT, offset * UNIT, crosses, phase, 0, stream, -1, -1};
}

ArenaPlan plan_of(std::vector<PlannedRequest> requests, int64_t size, int32_t streams = 1) {
  ArenaPlan plan;
  plan.requests = std::move(requests);
  plan.reused_bytes = size * UNIT;
  plan.streams = streams;
  return plan;
}

void* ask(Arena& arena, int64_t units, int32_t phase = 0, Stream stream = MAIN, bool between = false) {
  return arena.request(phase, 0, static_cast<size_t>(units * UNIT), stream, between);
}

int64_t at(Arena& arena, void* pointer) {
  return (static_cast<char*>(pointer) - arena.reserved_with(pointer)) / UNIT;
}

// -- matching ---------------------------------------------------------------------------------------------------------

void requests_get_the_addresses_of_their_plan_in_every_step() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2), planned(2, 1), planned(0, 3, 1)}, 3));
  for (int step = 0; step < 3; ++step) {
    arena.begin_step();
    void* const first = ask(arena, 2);
    void* const second = ask(arena, 1);
    CHECK(at(arena, first) == 0 && at(arena, second) == 2);
    CHECK(arena.give_back(first) && arena.give_back(second));
    void* const third = ask(arena, 3, 1);
    CHECK(at(arena, third) == 0);
    CHECK(arena.give_back(third));
  }
  CHECK(arena.counters().planned == 9 && arena.counters().peak_size == 3 * UNIT);
  arena.close();
}

void one_request_too_many_shifts_no_other() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 2), planned(3, 1), planned(4, 2)}, 6));
  arena.begin_step();
  CHECK(ask(arena, 7) == nullptr); // of a size that is not in the plan
  CHECK(at(arena, ask(arena, 1)) == 0);
  CHECK(at(arena, ask(arena, 2)) == 1);
  CHECK(at(arena, ask(arena, 2)) == 4); // too early: that of the next one of its size
  CHECK(at(arena, ask(arena, 1)) == 3); // and this one is found behind
  CHECK(ask(arena, 2) == nullptr); // nothing is left
  const ArenaCounters counters = arena.counters();
  CHECK(counters.planned == 4 && counters.unplanned == 2 && counters.native_bytes == 9 * UNIT);
}

void a_request_that_is_missing_shifts_no_other() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 2), planned(3, 3)}, 6));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 2)) == 1);
  CHECK(at(arena, ask(arena, 3)) == 3);
}

void bytes_that_are_in_use_are_not_handed_out() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 4), planned(3, 1), planned(2, 4)}, 6));
  arena.begin_step();
  void* const first = ask(arena, 4);
  CHECK(at(arena, first) == 0);
  CHECK(ask(arena, 1) == nullptr); // it was to come after the free
  CHECK(ask(arena, 4) == nullptr);
  CHECK(arena.counters().occupied == 2);
  arena.give_back(first);
  arena.begin_step();
  CHECK(at(arena, ask(arena, 1)) == 3);
  CHECK(ask(arena, 4) != nullptr || arena.counters().occupied == 3);
}

void what_outlives_the_step_takes_turns() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 1)}, 1);
  plan.requests.push_back({UNIT, 0, 0, 1, 0, 0, 0, -1});
  plan.slots = {{0, 0}, {UNIT, 0}};
  plan.kept_bytes = 2 * UNIT;
  arena.load(std::move(plan));
  void* former = nullptr;
  for (int step = 0; step < 4; ++step) {
    arena.begin_step();
    void* const loss = ask(arena, 1, 1);
    CHECK(loss != nullptr && at(arena, loss) == step % 2);
    if (former != nullptr) {
      arena.give_back(former);
    }
    former = loss;
  }
  arena.begin_step();
  CHECK(ask(arena, 1, 1) != nullptr); // the other slot
  arena.begin_step();
  CHECK(ask(arena, 1, 1) == nullptr); // both are kept
}

// -- dynamic ----------------------------------------------------------------------------------------------------------

void a_dynamic_request_gets_the_smallest_stretch_that_is_large_enough() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 1), planned(9, 1)}, 12);
  plan.dynamic = {{4, 0, 0}, {4, 0, 1}};
  plan.spaces = {{1 * UNIT, 5 * UNIT, 0}, {6 * UNIT, 8 * UNIT, 0}, {10 * UNIT, 12 * UNIT, 1}};
  plan.crosses = {0, 0};
  arena.load(std::move(plan));
  arena.begin_step();
  void* const first = ask(arena, 2, 4);
  CHECK(at(arena, first) == 6);
  CHECK(at(arena, ask(arena, 1, 4)) == 10); // of another group, as all that follow
  CHECK(at(arena, ask(arena, 1, 4)) == 11);
  CHECK(ask(arena, 1, 4) == nullptr);
  arena.begin_step();
  CHECK(at(arena, ask(arena, 2, 4)) == 1);
  arena.begin_step();
  CHECK(at(arena, ask(arena, 2, 4)) == 3);
  arena.give_back(first);
  CHECK(arena.counters().dynamic == 5 && arena.counters().dynamic_missed == 1);
}

void of_the_stretches_in_one_space_the_smallest_is_taken_too() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(4, 1)}, 8);
  plan.dynamic = {{4, 0, 0}};
  plan.spaces = {{0, 8 * UNIT, 0}};
  plan.crosses = {0};
  arena.load(std::move(plan));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 1)) == 4);
  CHECK(at(arena, ask(arena, 2, 4)) == 5); // 3 units up there, 4 below
  CHECK(at(arena, ask(arena, 2, 4)) == 0);
}

void what_lies_between_the_passes_is_lent_as_far_up_as_possible() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2), planned(2, 2), planned(6, 2)}, 8));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 2)) == 0);
  void* const lent = ask(arena, 3, 9, MAIN, true);
  CHECK(at(arena, lent) == 5);
  CHECK(at(arena, ask(arena, 2)) == 2);
  CHECK(ask(arena, 2) == nullptr); // its bytes are lent
  CHECK(ask(arena, 3, 9, MAIN, true) == nullptr);
  arena.give_back(lent);
  CHECK(at(arena, ask(arena, 4, 9, MAIN, true)) == 4);
  CHECK(arena.counters().lent == 2);
}

// -- streams ----------------------------------------------------------------------------------------------------------

void bytes_that_another_stream_used_are_behind_an_event() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1, 0, 0, 2), planned(0, 1, 1, 1, 1), planned(1, 1, 2, 1)}, 2, 2));
  arena.begin_step();
  void* const first = ask(arena, 1, 0, MAIN);
  ++device.queued[MAIN];
  arena.give_back(first);
  CHECK(!device.is_after(SIDE, MAIN));
  CHECK(ask(arena, 1, 2, SIDE) != nullptr);
  CHECK(!device.is_after(SIDE, MAIN)); // bytes of its own
  CHECK(at(arena, ask(arena, 1, 1, SIDE)) == 0);
  CHECK(device.is_after(SIDE, MAIN));
}

void a_stream_that_a_block_was_lent_to_is_waited_for() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(0, 2)}, 2));
  arena.begin_step();
  void* const first = ask(arena, 1);
  CHECK(arena.use_on(first, SIDE));
  ++device.queued[SIDE];
  arena.give_back(first);
  CHECK(!device.is_after(MAIN, SIDE));
  void* const second = ask(arena, 2);
  CHECK(second == first && device.is_after(MAIN, SIDE));
  ++device.queued[SIDE]; // of something else
  arena.give_back(second);
  device.synchronize();
  arena.begin_step();
  CHECK(ask(arena, 1) != nullptr && !device.is_after(MAIN, SIDE)); // it was done with
  CHECK(device.events == 0);
}

void what_the_plan_does_not_know_of_is_ordered_all_the_same() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(2, 1), planned(0, 2, 1, 1)}, 3, 2));
  arena.begin_step();
  CHECK(ask(arena, 1) != nullptr); // tells which stream is the main one
  void* const lent = ask(arena, 2, 9, MAIN, true);
  CHECK(at(arena, lent) == 0);
  ++device.queued[MAIN];
  arena.give_back(lent);
  CHECK(at(arena, ask(arena, 2, 1, SIDE)) == 0);
  CHECK(device.is_after(SIDE, MAIN));
  device.synchronize();
  arena.begin_step();
}

void a_request_of_another_stream_than_planned_is_left_to_the_native_allocator() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 1)}, 2));
  arena.begin_step();
  CHECK(ask(arena, 1, 0, MAIN) != nullptr);
  CHECK(ask(arena, 1, 0, SIDE) == nullptr);
}

void where_the_bytes_are_not_free_idle_ones_are_taken() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 2), planned(1, 1), planned(1, 1, 1)}, 4);
  plan.requests[1].spare = 0;
  plan.spaces = {{3 * UNIT, 4 * UNIT, 0}};
  plan.crosses = {0};
  arena.load(std::move(plan));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 2)) == 0);
  CHECK(at(arena, ask(arena, 1)) == 3); // not at 1
  CHECK(ask(arena, 1, 1) == nullptr); // there are none for this one
  CHECK(arena.counters().lent == 1 && arena.counters().occupied == 1 && arena.late().size() == 2);
}

void what_is_lent_is_needed_last() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(3, 1)}, 4);
  plan.spaces = {{2 * UNIT, 3 * UNIT, 0}, {1 * UNIT, 3 * UNIT, 1}};
  plan.crosses = {0, 0};
  plan.lendable = {0, 1};
  arena.load(std::move(plan));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 1, 9, MAIN, true)) == 2);
  CHECK(at(arena, ask(arena, 1, 9, MAIN, true)) == 1);
  CHECK(at(arena, ask(arena, 1, 9, MAIN, true)) == 3);
}

void one_stream_is_not_taken_for_two() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 2, 0, 1)}, 3, 2));
  arena.begin_step();
  CHECK(ask(arena, 1, 0, MAIN) != nullptr);
  CHECK(ask(arena, 2, 0, MAIN) == nullptr);
  CHECK(ask(arena, 2, 0, SIDE) != nullptr);
}

void a_stream_that_only_an_earlier_plan_had_is_waited_for() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 1, 1, 1)}, 2, 2));
  arena.begin_step();
  CHECK(ask(arena, 1, 0, MAIN) != nullptr);
  void* const aside = ask(arena, 1, 1, SIDE);
  CHECK(aside != nullptr);
  arena.load(plan_of({planned(1, 1)}, 2)); // in the same memory
  arena.begin_step();
  ++device.queued[SIDE];
  arena.give_back(aside);
  CHECK(!device.is_after(MAIN, SIDE));
  CHECK(ask(arena, 1, 0, MAIN) == aside && device.is_after(MAIN, SIDE));
}

// -- plans come and go ------------------------------------------------------------------------------------------------

void what_is_in_use_outlives_its_plan() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 3)}, 4));
  arena.begin_step();
  void* const kept = ask(arena, 1);
  std::memset(kept, 7, UNIT);
  arena.load(plan_of({planned(0, 4), planned(1, 3)}, 4)); // in the same memory
  arena.begin_step();
  CHECK(device.reserved.size() == 1);
  CHECK(ask(arena, 4) == nullptr);
  CHECK(at(arena, ask(arena, 3)) == 1);
  arena.load(plan_of({planned(0, 16)}, 16));
  arena.begin_step();
  CHECK(device.reserved.size() == 2 && ask(arena, 16) != nullptr);
  CHECK(static_cast<char*>(kept)[UNIT - 1] == 7 && arena.owns(kept));
  arena.close();
  CHECK(ask(arena, 16) == nullptr);
  CHECK(arena.counters().reserved_bytes == 20 * UNIT);
  arena.give_back(kept);
  CHECK(device.reserved.size() == 2); // of the first plan, 3 units are in use yet
}

void memory_goes_when_the_last_block_does() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1)}, 1));
  arena.begin_step();
  void* const block = ask(arena, 1);
  arena.close();
  CHECK(device.reserved_bytes == UNIT);
  CHECK(arena.give_back(block) && device.reserved_bytes == 0);
  CHECK(!arena.give_back(block)); // no longer anybody's
}

void what_an_earlier_plan_kept_frees_nothing_of_a_later_one() {
  Simulated device;
  Arena arena(device, false);
  const auto keeping = [] {
    ArenaPlan plan = plan_of({}, 0);
    plan.requests = {{UNIT, 0, 0, 0, 0, 0, 0, -1}, {UNIT, 0, 0, 0, 0, 0, 0, -1}};
    plan.slots = {{0, 0}};
    plan.kept_bytes = UNIT;
    return plan;
  };
  arena.load(keeping());
  arena.begin_step();
  void* const former = ask(arena, 1);
  arena.load(keeping());
  arena.begin_step();
  CHECK(former != nullptr && ask(arena, 1) != nullptr);
  arena.give_back(former);
  CHECK(ask(arena, 1) == nullptr); // its one slot is taken
}

void a_later_arena_that_cannot_be_reserved_leaves_nothing_of_the_earlier_one() {
  Simulated device;
  device.capacity = 4 * UNIT;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 4)}, 4));
  ArenaPlan plan = plan_of({planned(0, 4)}, 4); // in the same memory, but for what it keeps
  plan.kept_bytes = UNIT;
  bool refused = false;
  try {
    arena.load(std::move(plan));
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused && device.reserved_bytes == 0);
}

void an_arena_that_cannot_be_reserved_serves_nothing_and_leaks_nothing() {
  Simulated device;
  device.capacity = 4 * UNIT;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 4)}, 4);
  plan.kept_bytes = UNIT;
  bool refused = false;
  try {
    arena.load(std::move(plan));
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused && device.reserved_bytes == 0);
  CHECK(ask(arena, 4) == nullptr && arena.counters().unplanned == 0);
}

// -- checks -----------------------------------------------------------------------------------------------------------

void writes_that_do_not_belong_there_are_found() {
  Simulated device;
  Arena arena(device, true);
  arena.load(plan_of({planned(0, 2), planned(2, 2)}, 4)); // a unit for what surrounds each
  arena.begin_step();
  auto* const first = static_cast<char*>(arena.request(0, 0, 100, MAIN, false));
  CHECK(first != nullptr);
  std::memset(first, 1, 100);
  arena.give_back(first);
  CHECK(arena.counters().written_beyond == 0);
  first[5] = 0; // after it was freed
  arena.begin_step();
  auto* const again = static_cast<char*>(arena.request(0, 0, 100, MAIN, false));
  CHECK(again == first && arena.counters().written_freed == 1);
  again[100] = 0; // beyond its end
  arena.give_back(again);
  CHECK(arena.counters().written_beyond == 1);
}

// -- anything ---------------------------------------------------------------------------------------------------------

struct Block {
  char* begin;
  size_t nbytes;
  char mark;
};

// Whatever is asked for and given back, no byte belongs to two, and nothing is lost.
void no_byte_ever_belongs_to_two(unsigned seed, bool checks) {
  std::mt19937 random(seed);
  const auto number = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  Simulated device;
  Arena arena(device, checks);
  std::vector<Block> blocks;
  for (int round = 0; round < 4; ++round) {
    std::vector<PlannedRequest> requests;
    const int size = number(1, 60);
    for (int phase = 0; phase < 4; ++phase) {
      for (int i = number(0, 12); i > 0; --i) {
        const int units = number(1, std::min(size, 9));
        requests.push_back(planned(number(0, size - units), units, phase, number(0, 9) == 0, number(0, 3)));
      }
    }
    ArenaPlan plan = plan_of(std::move(requests), size, 2);
    plan.dynamic = {{8, 0, 0}, {8, 0, -1}, {8, 0, 0}};
    plan.spaces = {{0, size * UNIT, 0}};
    plan.crosses = {2};
    arena.load(std::move(plan));
    for (int step = 0; step < 6; ++step) {
      arena.begin_step();
      for (int i = 0; i < 60; ++i) {
        if (!blocks.empty() && number(0, 2) == 0) {
          std::swap(blocks[number(0, static_cast<int>(blocks.size()) - 1)], blocks.back());
          const Block block = blocks.back();
          blocks.pop_back();
          CHECK(std::all_of(block.begin, block.begin + block.nbytes, [&](char c) { return c == block.mark; }));
          CHECK(arena.give_back(block.begin));
          continue;
        }
        const auto nbytes = static_cast<size_t>(number(1, 9 * UNIT));
        const int phase = number(0, 5) == 0 ? 8 : number(0, 4);
        void* const found = arena.request(phase, 0, nbytes, number(0, 9) == 0 ? SIDE : MAIN, number(0, 7) == 0);
        if (found != nullptr) {
          blocks.push_back({static_cast<char*>(found), nbytes, static_cast<char>(number(0, 255))});
          std::memset(found, blocks.back().mark, nbytes);
        }
      }
      device.synchronize();
    }
  }
  int64_t live_bytes = 0;
  for (const Block& block : blocks) {
    live_bytes += static_cast<int64_t>(block.nbytes);
  }
  CHECK(arena.counters().live_bytes == live_bytes);
  CHECK(arena.counters().written_freed == 0 && arena.counters().written_beyond == 0);
  arena.close();
  for (const Block& block : blocks) {
    CHECK(arena.give_back(block.begin));
  }
  device.synchronize();
  arena.begin_step();
  CHECK(arena.counters().reserved_bytes == 0 && arena.counters().live_size == 0);
}

void threads_may_give_back_while_others_ask() {
  Simulated device;
  Arena arena(device, false);
  std::vector<PlannedRequest> requests;
  for (int i = 0; i < 200; ++i) {
    requests.push_back(planned(i, 1));
  }
  arena.load(plan_of(std::move(requests), 200));
  for (int step = 0; step < 20; ++step) {
    arena.begin_step();
    std::vector<void*> blocks;
    for (int i = 0; i < 200; ++i) {
      blocks.push_back(ask(arena, 1));
      CHECK(blocks.back() != nullptr);
    }
    std::vector<std::thread> threads;
    for (int part = 0; part < 4; ++part) {
      threads.emplace_back([&, part] {
        for (int i = part; i < 200; i += 4) {
          arena.give_back(blocks[i]);
          (void)arena.counters();
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }
  CHECK(arena.counters().planned == 4000 && arena.counters().live_bytes == 0);
  arena.close();
}

void threads_may_give_back_while_plans_come_and_go() {
  Simulated device;
  Arena arena(device, false);
  for (int round = 0; round < 100; ++round) {
    std::vector<PlannedRequest> requests;
    for (int i = 0; i < 20; ++i) {
      requests.push_back(planned(i, 1));
    }
    arena.load(plan_of(std::move(requests), 20 + round % 3));
    arena.begin_step();
    std::vector<void*> blocks;
    for (int i = 0; i < 20; ++i) {
      blocks.push_back(ask(arena, 1));
    }
    std::thread thread([&] {
      for (void* block : blocks) {
        CHECK(block == nullptr || arena.give_back(block));
      }
    });
    arena.load(plan_of({planned(0, 20)}, 20));
    thread.join();
  }
  arena.close();
  CHECK(arena.counters().live_size == 0 && arena.counters().reserved_bytes == 0);
}

void a_set_of_starts_is_a_set() {
  std::mt19937 random(1);
  for (const int count : {1, 63, 64, 65, 4097, 70000}) {
    LiveStarts starts(count);
    std::set<int64_t> truth;
    for (int i = 0; i < 2000; ++i) {
      const int64_t value = std::uniform_int_distribution<int>(0, count - 1)(random);
      if (truth.count(value) != 0) {
        starts.remove(value);
        truth.erase(value);
      } else {
        starts.add(value);
        truth.insert(value);
      }
      const int64_t asked = std::uniform_int_distribution<int>(0, count - 1)(random);
      const auto next = truth.lower_bound(asked);
      CHECK(starts.holds(asked) == (truth.count(asked) != 0));
      CHECK(starts.from(asked) == (next == truth.end() ? -1 : *next));
      CHECK(starts.before(asked) == (next == truth.begin() ? -1 : *std::prev(next)));
    }
  }
}

} // namespace

int main() {
  requests_get_the_addresses_of_their_plan_in_every_step();
  one_request_too_many_shifts_no_other();
  a_request_that_is_missing_shifts_no_other();
  bytes_that_are_in_use_are_not_handed_out();
  what_outlives_the_step_takes_turns();
  a_dynamic_request_gets_the_smallest_stretch_that_is_large_enough();
  what_lies_between_the_passes_is_lent_as_far_up_as_possible();
  bytes_that_another_stream_used_are_behind_an_event();
  a_stream_that_a_block_was_lent_to_is_waited_for();
  what_the_plan_does_not_know_of_is_ordered_all_the_same();
  a_request_of_another_stream_than_planned_is_left_to_the_native_allocator();
  what_is_in_use_outlives_its_plan();
  memory_goes_when_the_last_block_does();
  of_the_stretches_in_one_space_the_smallest_is_taken_too();
  where_the_bytes_are_not_free_idle_ones_are_taken();
  what_is_lent_is_needed_last();
  one_stream_is_not_taken_for_two();
  a_stream_that_only_an_earlier_plan_had_is_waited_for();
  what_an_earlier_plan_kept_frees_nothing_of_a_later_one();
  a_later_arena_that_cannot_be_reserved_leaves_nothing_of_the_earlier_one();
  an_arena_that_cannot_be_reserved_serves_nothing_and_leaks_nothing();
  writes_that_do_not_belong_there_are_found();
  a_set_of_starts_is_a_set();
  for (unsigned seed = 0; seed < 300; ++seed) {
    no_byte_ever_belongs_to_two(seed, seed % 3 == 0);
  }
  threads_may_give_back_while_others_ask();
  threads_may_give_back_while_plans_come_and_go();
  std::puts("all hold");
}
