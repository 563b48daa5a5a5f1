// Tests of requests whose sizes change: those that follow from a step's inputs, and those that do not.

#include "simulated.h"

namespace {

void a_request_of_another_size_is_paired_with_the_planned_one_that_did_not_come() {
  Simulated device;
  Arena arena(device, false);
  arena.load(plan_of({planned(0, 2), planned(2, 3), planned(5, 4), planned(9, 5), planned(14, 6, 1)}, 20));
  const auto resized_in = [&](std::vector<int64_t> sizes) {
    arena.begin_step();
    std::vector<void*> blocks;
    for (const int64_t size : sizes) {
      blocks.push_back(ask(arena, size));
    }
    for (void* block : blocks) {
      CHECK(block == nullptr || arena.give_back(block));
    }
    return arena.resized();
  };
  using Pairs = std::vector<std::pair<int32_t, int64_t>>;
  CHECK(resized_in({2, 3, 4, 5}) == Pairs());
  CHECK(resized_in({2, 7, 4, 5}) == (Pairs{{1, 7 * UNIT}}));
  CHECK(resized_in({2, 8, 7, 5}) == (Pairs{{1, 8 * UNIT}, {2, 7 * UNIT}}));
  CHECK(resized_in({7, 3, 4, 8}) == (Pairs{{0, 7 * UNIT}, {3, 8 * UNIT}}));
  CHECK(resized_in({2, 3, 4, 5, 7}) == Pairs()); // one more, in nobody's stead
  CHECK(resized_in({2, 4, 4, 5}) == (Pairs{{1, 4 * UNIT}})); // the first of size 4 was taken for the planned one
  CHECK(ask(arena, 7, 0, MAIN, Reuse::BETWEEN) != nullptr && arena.resized() == (Pairs{{1, 4 * UNIT}}));
}

void a_request_has_the_size_that_follows_from_the_inputs_of_its_micro_batch() {
  Simulated device;
  Arena arena(device, false);
  const auto scaled = [](int64_t offset, int64_t size, int32_t micro_batch, int64_t factor, int32_t term) {
    PlannedRequest request = planned(offset, size, (micro_batch + 1) * 8);
    request.factor = factor, request.term = term;
    return request;
  };
  // micro-batch 0: 2 units for each of up to 3 tokens, then a constant one, then up to 4 units; micro-batch 1: batch × tokens
  ArenaPlan plan = plan_of({scaled(0, 6, 0, 2 * UNIT, 1), planned(6, 2, 8), scaled(8, 4, 0, 0, BOUNDED), scaled(12, 8, 1, UNIT, 2)}, 20);
  plan.terms = {{}, {1}, {0, 1}};
  arena.load(std::move(plan));
  const auto place = [&](int64_t units, int32_t micro_batch) {
    void* const block = ask(arena, units, (micro_batch + 1) * 8);
    const int64_t found = block != nullptr ? at(arena, block) : -1;
    CHECK(block == nullptr || arena.give_back(block));
    return found;
  };
  for (const int64_t tokens : {3, 1, 2, 3}) {
    note_input_sizes(0, {1, tokens});
    note_input_sizes(1, {2, tokens});
    arena.begin_step();
    CHECK(place(2 * tokens, 0) == 0 && place(2, 0) == 6 && place(tokens, 0) == 8);
    CHECK(place(2 * tokens, 1) == 12);
  }
  note_input_sizes(0, {1, 4}); // longer than planned: the highest free bytes serve what does not fit
  arena.begin_step();
  CHECK(place(8, 0) == 12 && place(2, 0) == 6 && place(5, 0) == 15 && place(4, 0) == 8 && place(21, 0) == -1);
  void* const held = ask(arena, 7, 8);
  CHECK(at(arena, held) == 13 && place(8, 0) == 5 && place(14, 0) == -1);
  CHECK(arena.give_back(held) && arena.counters().exceeding == 4 && arena.counters().unplanned == 2);
  note_input_sizes(0, {1, 2}); // requests that do not follow from the inputs
  arena.begin_step();
  CHECK(place(6, 0) == -1 && place(4, 0) == 0 && arena.counters().exceeding == 4);
  note_input_sizes(0, {}); // inputs of fewer dimensions
  arena.begin_step();
  CHECK(place(4, 0) == -1 && place(2, 0) == 6);
  CHECK(arena.counters().live_bytes == 0);
}

void a_block_that_outlives_a_larger_step_than_planned_is_left_to_the_native_allocator() {
  Simulated device;
  Arena arena(device, false);
  ArenaPlan plan = plan_of({planned(0, 4, 8), planned(0, 4, 8)}, 20);
  for (PlannedRequest& request : plan.requests) {
    request.factor = UNIT, request.term = 1;
  }
  plan.requests.push_back(planned(0, 2, 8));
  plan.requests[2].factor = UNIT / 2, plan.requests[2].term = 1, plan.requests[2].kept = 0;
  plan.slots = {{0, 0}};
  plan.kept_bytes = 2 * UNIT;
  plan.terms = {{}, {1}};
  arena.load(std::move(plan));
  note_input_sizes(0, {1, 8});
  arena.begin_step();
  CHECK(ask(arena, 4, 8) == nullptr && arena.counters().lasting == 1); // the third request
  void* const again = ask(arena, 4, 8); // it comes once
  CHECK(again != nullptr && arena.counters().exceeding == 1 && arena.counters().lasting == 1);
  CHECK(arena.give_back(again));
}

} // namespace

int main() {
  a_request_of_another_size_is_paired_with_the_planned_one_that_did_not_come();
  a_request_has_the_size_that_follows_from_the_inputs_of_its_micro_batch();
  a_block_that_outlives_a_larger_step_than_planned_is_left_to_the_native_allocator();
  std::puts("all hold");
}
