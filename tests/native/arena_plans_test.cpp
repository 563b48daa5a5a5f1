// Plans that come and go, stray writes, random requests, threads.
// Built and run by tests/arena/test_arena_core.py, under the compiler's sanitizers.
#include "simulated.h"

namespace {

// -- plans come and go ------------------------------------------------------------------------------------------------

void what_is_in_use_outlives_its_plan() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 3)}, 4));
  arena.begin_step();
  void* const kept = ask(arena, 1);
  std::memset(kept, 7, UNIT);
  ++device.queued[SIDE]; // work of this plan, unknown to the next
  arena.load(plan_of({planned(0, 4), planned(1, 3)}, 4)); // in the same memory
  arena.begin_step();
  CHECK(device.reserved.size() == 1 && device.finished[SIDE] == device.queued[SIDE]);
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
  CHECK(device.reserved.size() == 2); // 3 units of the first plan are still in use
}

void plans_that_take_turns_share_memory_as_large_as_the_largest() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 4), planned(4, 4)}, 8), 1);
  arena.load(plan_of({planned(0, 12)}, 12), 2);
  CHECK(device.reserved.size() == 1 && device.reserved_bytes == 12 * UNIT);
  arena.load(plan_of({planned(2, 3)}, 5), 3); // less than half, but the second plan needs it
  CHECK(device.reserved.size() == 1 && device.reserved_bytes == 12 * UNIT);
  for (int round = 0; round < 3; ++round) {
    arena.begin_step();
    CHECK(arena.turn(1) && arena.turn(1));
    void* const first = ask(arena, 4);
    CHECK(at(arena, first) == 0);
    ++device.queued[SIDE];
    CHECK(arena.turn(2) && device.finished[SIDE] < device.queued[SIDE]); // the device is not waited for
    CHECK(ask(arena, 12) == nullptr); // the first plan's block is in use
    CHECK(arena.turn(3) && ask(arena, 3) == nullptr);
    CHECK(arena.give_back(first));
    arena.begin_step();
    void* const second = ask(arena, 3);
    CHECK(at(arena, second) == 2 && arena.give_back(second));
    CHECK(arena.turn(2));
    arena.begin_step();
    void* const whole = ask(arena, 12);
    CHECK(at(arena, whole) == 0 && arena.give_back(whole));
  }
  CHECK(!arena.turn(4));
  CHECK(arena.turn(3));
  arena.unload(2);
  arena.unload(1);
  CHECK(!arena.turn(1) && !arena.turn(2));
  arena.load(plan_of({planned(0, 5)}, 5), 4);
  CHECK(device.reserved_bytes == 5 * UNIT); // the largest plan is gone
  arena.close();
  CHECK(!arena.turn(3) && !arena.turn(4) && ask(arena, 5) == nullptr);
}

void streams_of_a_plan_are_waited_for_under_the_next() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 1), planned(1, 1, 1, 1)}, 2, 2), 1);
  arena.load(plan_of({planned(0, 2)}, 2), 2);
  CHECK(arena.turn(1));
  arena.begin_step();
  void* const main = ask(arena, 1);
  void* const side = ask(arena, 1, 1, SIDE);
  CHECK(main != nullptr && side != nullptr);
  ++device.queued[SIDE];
  CHECK(arena.give_back(side) && arena.give_back(main));
  CHECK(arena.turn(2));
  arena.begin_step();
  CHECK(!device.is_after(MAIN, SIDE));
  CHECK(ask(arena, 2) != nullptr && device.is_after(MAIN, SIDE));
}

void what_one_plan_keeps_stays_where_it_is_under_the_other() {
  Simulated device;
  Arena arena(device, false);
  const auto keeping = [](int64_t slots) {
    ArenaPlan plan = plan_of({}, 0);
    for (int64_t slot = 0; slot < slots; ++slot) {
      plan.requests.push_back({UNIT, 0, 0, 0, 0, 0, 0, 0, 0, -1, CONSTANT});
      plan.slots.push_back({slot * UNIT, 0});
    }
    plan.kept_bytes = slots * UNIT;
    return plan;
  };
  arena.load(keeping(2), 1);
  arena.load(keeping(1), 2);
  CHECK(arena.turn(1));
  arena.begin_step();
  void* const first = ask(arena, 1);
  void* const second = ask(arena, 1);
  CHECK(at(arena, first) == 0 && at(arena, second) == 1);
  CHECK(arena.turn(2));
  arena.begin_step();
  CHECK(ask(arena, 1) == nullptr); // `first` has the slot
  CHECK(arena.give_back(first));
  CHECK(arena.turn(1));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 1)) == 0 && ask(arena, 1) == nullptr); // `second` has the other slot
}

void leftovers_of_one_plan_are_known_under_the_other() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2)}, 2), 1);
  arena.load(plan_of({planned(0, 2)}, 2), 2);
  arena.begin_step();
  void* const kept = ask(arena, 2);
  arena.begin_step(); // `kept` becomes a leftover of the second plan's request
  CHECK(arena.turn(1));
  CHECK(ask(arena, 2) == nullptr && arena.counters().lasting == 1); // the same request of the first plan
  arena.forget_leftovers();
  CHECK(arena.give_back(kept));
  arena.begin_step();
  CHECK(arena.turn(2));
  CHECK(ask(arena, 2) != nullptr);
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
  CHECK(!arena.give_back(block)); // the arena does not own it any more
}

void what_an_earlier_plan_kept_frees_nothing_of_a_later_one() {
  Simulated device;
  Arena arena(device, false);
  const auto keeping = [] {
    ArenaPlan plan = plan_of({}, 0);
    plan.requests = {planned(0, 1), planned(0, 1)};
    plan.requests[0].kept = plan.requests[1].kept = 0;
    plan.slots = {{0, 0}};
    plan.kept_bytes = UNIT;
    return plan;
  };
  arena.load(keeping());
  arena.begin_step();
  void* const former = ask(arena, 1);
  arena.load(keeping());
  arena.begin_step();
  CHECK(former != nullptr && device.reserved.size() == 1 && ask(arena, 1) == nullptr); // `former` has the slot
  arena.give_back(former);
  void* const later = ask(arena, 1);
  CHECK(later == former && !arena.give_back(static_cast<char*>(later) + UNIT));
  arena.begin_step();
  CHECK(ask(arena, 1) == nullptr); // `later` holds the only slot
}

void a_block_that_outlives_its_step_is_the_only_one_of_its_request() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2), planned(0, 3, 1)}, 3));
  arena.begin_step();
  void* const first = ask(arena, 2);
  for (int step = 0; step < 3; ++step) {
    arena.begin_step();
    CHECK(first != nullptr && ask(arena, 2) == nullptr);
    CHECK(ask(arena, 3, 1) == nullptr); // `first` holds these bytes
  }
  CHECK(arena.counters().lasting == 3 && arena.counters().occupied == 3 && arena.counters().leftover_bytes == 2 * UNIT);
  CHECK(arena.leftovers() == (std::vector<std::pair<int64_t, int64_t>>{{0, 2 * UNIT}}));
  arena.extend(4 * UNIT);
  arena.begin_step();
  void* const displaced = ask(arena, 3, 1);
  CHECK(displaced != nullptr && at(arena, displaced) == 0 && displaced != first && arena.give_back(displaced));
  arena.extend(0);
  CHECK(device.reserved.size() == 1);
  arena.load(plan_of({planned(0, 2), planned(0, 2, 1)}, 2)); // the same memory: `first` stays a leftover
  arena.begin_step();
  CHECK(device.reserved.size() == 1 && ask(arena, 2) == nullptr);
  arena.give_back(first);
  int steps = 0;
  for (arena.begin_step(); ask(arena, 2) == nullptr; arena.begin_step()) {
    CHECK(++steps < 100); // some steps later the arena serves the request again
  }
  CHECK(steps > 8);
}

void a_block_that_is_freed_a_little_late_changes_nothing() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2)}, 2));
  for (int step = 0; step < 4; ++step) {
    arena.begin_step();
    void* const block = ask(arena, 2);
    CHECK(block != nullptr);
    arena.begin_step();
    CHECK(arena.give_back(block));
  }
  CHECK(arena.counters().lasting == 0);
}

void what_is_kept_in_numbers_is_not_put_where_a_step_passes() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 40)}, 40));
  arena.begin_step();
  int served = 0;
  for (int i = 0; i < 30; ++i) {
    served += ask(arena, 1, 9, MAIN, Reuse::WITHOUT_GRADIENTS) != nullptr;
  }
  CHECK(served == 8 && arena.counters().without_gradients == 22);
  for (int size = 2; size < 40; ++size) { // one request per step, of varying size
    arena.begin_step();
    served += ask(arena, 1 + size % 3 * 2, 17, MAIN, Reuse::BETWEEN) != nullptr;
  }
  CHECK(served <= 8 + 3);
}

void a_later_arena_that_cannot_be_reserved_leaves_nothing_of_the_earlier_one() {
  Simulated device;
  device.capacity = 4 * UNIT;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 4)}, 4));
  ArenaPlan plan = plan_of({planned(0, 4)}, 4); // the same memory, plus bytes that outlive the step
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

void memory_is_ordered_after_its_users_before_the_arena_and_theirs_after_it() {
  Simulated device;
  device.current = SIDE;
  Arena arena(device, false);
  ++device.queued[SIDE];
  arena.load(plan_of({planned(0, 4)}, 4));
  CHECK(device.finished[SIDE] == device.queued[SIDE]); // the first request may be of any stream
  arena.begin_step();
  void* const block = ask(arena, 4);
  arena.close();
  ++device.queued[MAIN];
  CHECK(block != nullptr && !device.is_after(SIDE, MAIN));
  CHECK(arena.give_back(block) && device.reserved_bytes == 0 && device.is_after(SIDE, MAIN));
}

// -- checks -----------------------------------------------------------------------------------------------------------

void writes_that_do_not_belong_there_are_found() {
  Simulated device;
  Arena arena(device, true);
  arena.load(plan_of({planned(0, 2), planned(2, 2)}, 4)); // one unit each for the margin
  arena.begin_step();
  auto* const first = static_cast<char*>(arena.request(0, 0, 100, MAIN, Reuse::NOTHING));
  CHECK(first != nullptr);
  std::memset(first, 1, 100);
  arena.give_back(first);
  CHECK(arena.counters().written_beyond == 0);
  first[5] = 0; // after it was freed
  arena.begin_step();
  auto* const again = static_cast<char*>(arena.request(0, 0, 100, MAIN, Reuse::NOTHING));
  CHECK(again == first && arena.counters().written_freed == 1);
  again[100] = 0; // beyond its end
  arena.give_back(again);
  CHECK(arena.counters().written_beyond == 1);
}

// -- random requests --------------------------------------------------------------------------------------------------

struct Block {
  char* begin;
  size_t nbytes;
  char mark;
};

// Whatever is requested and freed, no byte belongs to two blocks, and no block is lost.
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
    plan.ceilings = {number(0, 1) * number(1, size) * UNIT};
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
        void* const found = arena.request(phase, 0, nbytes, number(0, 9) == 0 ? SIDE : MAIN, static_cast<Reuse>(number(0, 2)));
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

} // namespace

int main(int count, char** arguments) {
  const unsigned seeds = count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 300;
  what_is_in_use_outlives_its_plan();
  plans_that_take_turns_share_memory_as_large_as_the_largest();
  streams_of_a_plan_are_waited_for_under_the_next();
  what_one_plan_keeps_stays_where_it_is_under_the_other();
  leftovers_of_one_plan_are_known_under_the_other();
  memory_goes_when_the_last_block_does();
  what_an_earlier_plan_kept_frees_nothing_of_a_later_one();
  a_block_that_outlives_its_step_is_the_only_one_of_its_request();
  a_block_that_is_freed_a_little_late_changes_nothing();
  what_is_kept_in_numbers_is_not_put_where_a_step_passes();
  a_later_arena_that_cannot_be_reserved_leaves_nothing_of_the_earlier_one();
  an_arena_that_cannot_be_reserved_serves_nothing_and_leaks_nothing();
  memory_is_ordered_after_its_users_before_the_arena_and_theirs_after_it();
  writes_that_do_not_belong_there_are_found();
  for (unsigned seed = 0; seed < seeds; ++seed) {
    no_byte_ever_belongs_to_two(seed, seed % 3 == 0);
  }
  threads_may_give_back_while_others_ask();
  threads_may_give_back_while_plans_come_and_go();
  std::puts("all hold");
}
