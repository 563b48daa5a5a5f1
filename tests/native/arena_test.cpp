// The bytes that the arena hands out: matching, dynamic requests, streams.
// Built and run by tests/arena/test_arena_core.py, under the compiler's sanitizers.
#include "simulated.h"

namespace {

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
  CHECK(ask(arena, 7) == nullptr); // the plan has no such size
  CHECK(at(arena, ask(arena, 1)) == 0);
  CHECK(at(arena, ask(arena, 2)) == 1);
  CHECK(at(arena, ask(arena, 2)) == 4); // early, so it gets the slot of the next request of its size
  CHECK(at(arena, ask(arena, 1)) == 3); // found before the last slot taken
  CHECK(ask(arena, 2) == nullptr); // no slot is left
  const ArenaCounters counters = arena.counters();
  CHECK(counters.planned == 4 && counters.unplanned == 2 && counters.fallback_bytes == 9 * UNIT);
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
  CHECK(ask(arena, 1) == nullptr); // `first` still holds its bytes
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
  plan.requests.push_back(planned(0, 1, 1));
  plan.requests.back().kept = 0;
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
  CHECK(ask(arena, 1, 1) == nullptr); // both slots are in use
}

// -- dynamic ----------------------------------------------------------------------------------------------------------

void a_dynamic_request_gets_the_lowest_free_bytes_of_its_group() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 1), planned(9, 1)}, 12);
  plan.dynamic = {{4, 0, 0}, {4, 0, 1}};
  plan.spaces = {{1 * UNIT, 2 * UNIT, 0}, {6 * UNIT, 8 * UNIT, 0}, {10 * UNIT, 12 * UNIT, 1}};
  plan.crosses = {0, 0};
  plan.ceilings = {0, 0};
  arena.load(std::move(plan));
  arena.begin_step();
  void* const first = ask(arena, 2, 4);
  CHECK(at(arena, first) == 6);
  CHECK(at(arena, ask(arena, 1, 4)) == 10); // belongs to the other group, like all later requests
  CHECK(at(arena, ask(arena, 1, 4)) == 11);
  CHECK(ask(arena, 1, 4) == nullptr);
  void* const second = ask(arena, 2, 4);
  CHECK(second == nullptr); // belongs to the other group, which is full
  CHECK(arena.counters().dynamic_missed_largest == 2 * UNIT);
  arena.give_back(first);
  arena.begin_step();
  CHECK(arena.counters().dynamic_missed_largest == 0);
  CHECK(at(arena, ask(arena, 2, 4)) == 6);
  CHECK(arena.counters().dynamic == 4 && arena.counters().dynamic_missed == 2);
  CHECK(arena.counters().dynamic_missed_bytes == 3 * UNIT);
}

void below_a_ceiling_a_dynamic_request_gets_the_highest_free_bytes() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(4, 1)}, 8);
  plan.dynamic = {{4, 0, 0}};
  plan.spaces = {{0, 8 * UNIT, 0}};
  plan.crosses = {0};
  plan.ceilings = {6 * UNIT};
  arena.load(std::move(plan));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 1)) == 4);
  void* const first = ask(arena, 2, 4);
  CHECK(at(arena, first) == 2); // one unit between the planned block and the ceiling is too little
  CHECK(at(arena, ask(arena, 1, 4)) == 5);
  CHECK(at(arena, ask(arena, 1, 4)) == 1);
  arena.give_back(first);
  CHECK(at(arena, ask(arena, 1, 4)) == 3);
  CHECK(at(arena, ask(arena, 2, 4)) == 6); // none are left below: the lowest of all
}

void what_lies_between_the_passes_is_lent_as_far_up_as_possible() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2), planned(2, 2), planned(6, 2)}, 8));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 2)) == 0);
  void* const lent = ask(arena, 3, 9, MAIN, Reuse::BETWEEN);
  CHECK(at(arena, lent) == 5);
  CHECK(at(arena, ask(arena, 2)) == 2);
  CHECK(ask(arena, 2) == nullptr); // `lent` holds its bytes
  CHECK(ask(arena, 3, 9, MAIN, Reuse::BETWEEN) == nullptr);
  arena.give_back(lent);
  CHECK(at(arena, ask(arena, 4, 9, MAIN, Reuse::BETWEEN)) == 4);
  CHECK(arena.counters().reusable == 2);
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
  CHECK(!device.is_after(SIDE, MAIN)); // MAIN never used its bytes
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
  ++device.queued[SIDE]; // other work
  arena.give_back(second);
  device.synchronize();
  arena.begin_step();
  CHECK(ask(arena, 1) != nullptr && !device.is_after(MAIN, SIDE)); // SIDE's work has finished
  CHECK(device.events == 0);
}

void what_the_plan_does_not_know_of_is_ordered_all_the_same() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(2, 1), planned(0, 2, 1, 1)}, 3, 2));
  arena.begin_step();
  CHECK(ask(arena, 1) != nullptr); // the first request shows which stream is the main one
  void* const lent = ask(arena, 2, 9, MAIN, Reuse::BETWEEN);
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
  CHECK(at(arena, ask(arena, 1)) == 3); // not at 1, whose bytes are in use
  CHECK(ask(arena, 1, 1) == nullptr); // it has no spare bytes
  CHECK(arena.counters().reusable == 1 && arena.counters().occupied == 1);
}

void the_arena_knows_when_requests_came_and_were_freed_wherever_they_lay() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 1), planned(0, 2), planned(3, 1, 1), planned(2, 1, 1), planned(5, 4, 1)}, 9);
  plan.requests[1].spare = 0;
  plan.spaces = {{3 * UNIT, 5 * UNIT, 0}};
  plan.crosses = {0};
  arena.load(std::move(plan));
  for (int step = 0; step < 2; ++step) {
    arena.begin_step();
    void* const late = ask(arena, 1); // planned until the next one comes
    void* const displaced = ask(arena, 2);
    CHECK(at(arena, late) == 0 && at(arena, displaced) == 3);
    arena.give_back(late);
    CHECK(arena.lifetimes().came() == (std::vector<int32_t>{0, 1, -1, -1, -1}));
    CHECK(arena.lifetimes().freed() == (std::vector<int32_t>{2, Lifetimes::STILL_IN_USE, -1, -1, -1}));
    void* const early = ask(arena, 4, 1);
    void* const former = ask(arena, 1, 1);
    CHECK(at(arena, early) == 5 && at(arena, former) == 2);
    CHECK(ask(arena, 1, 1) == nullptr); // the displaced block has its bytes
    arena.give_back(displaced);
    arena.give_back(former);
    CHECK(arena.lifetimes().came() == (std::vector<int32_t>{0, 1, 4, 3, 2}));
    CHECK(arena.lifetimes().freed() == (std::vector<int32_t>{2, 5, -1, 5, Lifetimes::STILL_IN_USE}));
    arena.give_back(early);
  }
}

void what_is_lent_is_needed_last() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(3, 1)}, 4);
  plan.spaces = {{2 * UNIT, 3 * UNIT, 0}, {1 * UNIT, 3 * UNIT, 1}};
  plan.crosses = {0, 0};
  plan.reusable = {0, 1};
  arena.load(std::move(plan));
  arena.begin_step();
  CHECK(at(arena, ask(arena, 1, 9, MAIN, Reuse::BETWEEN)) == 2);
  CHECK(at(arena, ask(arena, 1, 9, MAIN, Reuse::BETWEEN)) == 1);
  CHECK(at(arena, ask(arena, 1, 9, MAIN, Reuse::BETWEEN)) == 3);
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
  void* const first = ask(arena, 1, 0, MAIN);
  void* const aside = ask(arena, 1, 1, SIDE);
  CHECK(first != nullptr && aside != nullptr);
  arena.give_back(first);
  arena.load(plan_of({planned(1, 1)}, 2)); // in the same memory
  arena.begin_step();
  ++device.queued[SIDE];
  arena.give_back(aside);
  CHECK(!device.is_after(MAIN, SIDE));
  CHECK(ask(arena, 1, 0, MAIN) == aside && device.is_after(MAIN, SIDE));
}

} // namespace

int main() {
  requests_get_the_addresses_of_their_plan_in_every_step();
  one_request_too_many_shifts_no_other();
  a_request_that_is_missing_shifts_no_other();
  bytes_that_are_in_use_are_not_handed_out();
  what_outlives_the_step_takes_turns();
  a_dynamic_request_gets_the_lowest_free_bytes_of_its_group();
  below_a_ceiling_a_dynamic_request_gets_the_highest_free_bytes();
  what_lies_between_the_passes_is_lent_as_far_up_as_possible();
  bytes_that_another_stream_used_are_behind_an_event();
  a_stream_that_a_block_was_lent_to_is_waited_for();
  what_the_plan_does_not_know_of_is_ordered_all_the_same();
  a_request_of_another_stream_than_planned_is_left_to_the_native_allocator();
  where_the_bytes_are_not_free_idle_ones_are_taken();
  the_arena_knows_when_requests_came_and_were_freed_wherever_they_lay();
  what_is_lent_is_needed_last();
  one_stream_is_not_taken_for_two();
  a_stream_that_only_an_earlier_plan_had_is_waited_for();
  std::puts("all hold");
}
