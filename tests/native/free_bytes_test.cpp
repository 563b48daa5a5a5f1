// The search for free bytes, and what it reads, against models that look at every byte.
// Built and run by tests/arena/test_arena_core.py, under the compiler's sanitizers.
#include "simulated.h"

namespace {

// -- what the search reads --------------------------------------------------------------------------------------------

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

// Returns the parts in [begin, end) of the free stretches, in order.
std::vector<Stretch> free_parts(const std::vector<bool>& used, int64_t begin, int64_t end) {
  std::vector<Stretch> parts;
  for (int64_t at = begin; at < end; ++at) {
    if (!used[at]) {
      if (parts.empty() || parts.back().second < at) {
        parts.emplace_back(at, at);
      }
      parts.back().second = at + 1;
    }
  }
  return parts;
}

void holes_are_the_bytes_that_are_free(int64_t size, int64_t most) {
  std::mt19937 random(1);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  Holes holes(size);
  std::vector<Stretch> blocks;
  std::vector<bool> used(size, false);
  for (int i = 0; i < 6000; ++i) {
    const int64_t begin = number(0, size - 1), end = std::min(size, begin + number(1, most));
    const bool is_free = std::find(used.begin() + begin, used.begin() + end, true) == used.begin() + end;
    CHECK(holes.are_free(begin, end) == is_free);
    const bool fills = i / 1000 % 2 == 0; // by turns there are more and more blocks, and fewer and fewer
    if (is_free && (fills || number(0, 3) == 0)) {
      holes.take(begin, end);
      blocks.emplace_back(begin, end);
      std::fill(used.begin() + begin, used.begin() + end, true);
    } else if (!blocks.empty() && (!fills || number(0, 3) == 0)) {
      std::swap(blocks[number(0, static_cast<int64_t>(blocks.size()) - 1)], blocks.back());
      const auto [first, last] = blocks.back();
      blocks.pop_back();
      holes.give_back(first, last);
      std::fill(used.begin() + first, used.begin() + last, false);
    }
    const int64_t from = number(0, size), to = number(from, size), least = number(1, most);
    std::vector<Stretch> large = free_parts(used, from, to);
    const auto is_small = [&](const Stretch& part) { return part.second - part.first < least; };
    large.erase(std::remove_if(large.begin(), large.end(), is_small), large.end());
    const Stretch lowest = holes.lowest(from, to, least), highest = holes.highest(from, to, least);
    CHECK(large.empty() ? lowest.first == lowest.second : lowest == large.front());
    CHECK(large.empty() ? highest.first == highest.second : highest == large.back());
  }
}

void a_table_has_the_blocks_that_were_added() {
  std::mt19937 random(1);
  std::vector<char> memory(3000 * UNIT);
  BlockTable<int> table;
  std::map<char*, int> truth;
  for (int i = 0; i < 20000; ++i) {
    char* const begin = memory.data() + random() % 3000 * UNIT;
    const auto known = truth.find(begin);
    int* const found = table.find(begin);
    CHECK((found != nullptr) == (known != truth.end()) && (found == nullptr || *found == known->second));
    if (found == nullptr) {
      table.add(begin, i);
      truth[begin] = i;
    } else {
      table.remove(begin);
      truth.erase(known);
    }
    if (i % 5000 == 0) { // now and then the table becomes empty
      for (const auto& [other, number] : truth) {
        table.remove(other);
      }
      truth.clear();
    }
    if (i % 1000 == 0) {
      std::map<char*, int> all;
      table.for_each([&](char* other, int number) { CHECK(all.emplace(other, number).second); });
      CHECK(all == truth);
    }
  }
}

// -- the search -------------------------------------------------------------------------------------------------------

// Returns the offset of the lowest (or highest) `units` free units of the spaces below `ceiling`, or -1.
int64_t searched(
    const std::vector<bool>& used, const std::vector<Stretch>& spaces, int64_t units, int64_t ceiling, bool highest) {
  int64_t found = -1;
  for (const auto& [begin, space_end] : spaces) {
    const int64_t end = std::min(space_end, ceiling);
    for (int64_t at = begin; at + units <= end && (highest || found < 0); ++at) {
      const bool is_free = std::find(used.begin() + at, used.begin() + at + units, true) == used.begin() + at + units;
      found = is_free ? at : found;
    }
  }
  return found;
}

// Among planned blocks in use, also in the group's own space, a dynamic request, a displaced planned one and a request
// outside of the program get the bytes that a search of every byte finds.
void every_search_finds_what_a_search_of_every_byte_finds(unsigned seed) {
  constexpr int32_t DYNAMIC = 4, DISPLACED = 5, OUTSIDE = 9; // phases
  std::mt19937 random(seed);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const int64_t size = number(0, 3) == 0 ? number(300, 900) : number(10, 60);
  const int64_t ceiling = number(0, 1) * number(1, size);
  std::vector<std::vector<Stretch>> spaces(3); // of the dynamic group, of displaced requests, for others
  for (auto& of_group : spaces) {
    int64_t cuts[6];
    std::generate(std::begin(cuts), std::end(cuts), [&] { return number(0, size); });
    std::sort(std::begin(cuts), std::end(cuts));
    for (int i = 0; i < 6; i += 2) {
      if (cuts[i] < cuts[i + 1] && (of_group.empty() || of_group.back().second < cuts[i])) {
        of_group.emplace_back(cuts[i], cuts[i + 1]);
      }
    }
  }
  std::vector<PlannedRequest> requests;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t units = number(1, 9);
    requests.push_back(planned(number(0, size - units), units));
  }
  for (int i = 0; i < 200; ++i) { // planned where the first request is, which stays in use
    requests.push_back(planned(0, 1 + i % 9, DISPLACED));
    requests.back().spare = 1;
  }
  requests.push_back(planned(0, 1, 6));
  ArenaPlan plan = plan_of(requests, size);
  plan.dynamic = {{DYNAMIC, 0, 0}};
  for (int32_t group = 0; group < 3; ++group) {
    for (const auto& [begin, end] : spaces[group]) {
      plan.spaces.push_back({begin * UNIT, end * UNIT, group});
    }
  }
  plan.crosses = {0, 0, 0};
  plan.ceilings = {ceiling * UNIT};
  plan.reusable = {2};
  Simulated device;
  Arena arena(device, false);
  arena.load(std::move(plan));
  arena.begin_step();
  std::vector<bool> used(size, false);
  std::vector<std::pair<void*, int64_t>> blocks; // and their units
  const auto note = [&](void* block, int64_t units) {
    const int64_t begin = at(arena, block);
    CHECK(begin >= 0 && begin + units <= size);
    CHECK(std::find(used.begin() + begin, used.begin() + begin + units, true) == used.begin() + begin + units);
    std::fill(used.begin() + begin, used.begin() + begin + units, true);
    blocks.emplace_back(block, units);
  };
  note(ask(arena, 1, 6), 1);
  for (int i = 0; i < 400; ++i) {
    const int64_t units = number(1, 9), kind = number(0, 6);
    if (kind >= 5 && blocks.size() > 1) {
      std::swap(blocks[number(1, static_cast<int64_t>(blocks.size()) - 1)], blocks.back());
      const auto [block, length] = blocks.back();
      blocks.pop_back();
      const auto begin = used.begin() + at(arena, block);
      std::fill(begin, begin + length, false);
      CHECK(arena.give_back(block));
      continue;
    }
    int64_t expected = -1;
    int32_t phase = 0;
    if (kind == 0 || kind == 1) {
      phase = DYNAMIC;
      expected = ceiling > 0 ? searched(used, spaces[0], units, ceiling, true) : -1;
      expected = expected < 0 ? searched(used, spaces[0], units, size, false) : expected;
    } else if (kind == 2) {
      phase = DISPLACED;
      expected = searched(used, spaces[1], units, size, false);
    } else if (kind == 3) {
      phase = OUTSIDE + static_cast<int32_t>(i); // no more than a few of a kind are served
      expected = searched(used, spaces[2], units, size, false);
      expected = expected < 0 ? searched(used, {{0, size}}, units, size, true) : expected;
    }
    const int64_t unplanned = arena.counters().unplanned;
    void* const found = ask(arena, units, phase, MAIN, kind == 3 ? Reuse::BETWEEN : Reuse::NOTHING);
    const bool has_row = arena.counters().unplanned == unplanned;
    if (kind < 2 || (kind == 2 && has_row) || kind == 3) {
      CHECK(found == nullptr ? expected == -1 : at(arena, found) == expected);
    }
    if (found != nullptr) {
      note(found, units);
    }
  }
  for (const auto& [block, units] : blocks) {
    CHECK(arena.give_back(block));
  }
  arena.close();
}

} // namespace

int main(int count, char** arguments) {
  const unsigned seeds = count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 300;
  a_set_of_starts_is_a_set();
  holes_are_the_bytes_that_are_free(40, 40);
  holes_are_the_bytes_that_are_free(3000, 4); // in many chunks
  a_table_has_the_blocks_that_were_added();
  for (unsigned seed = 0; seed < seeds; ++seed) {
    every_search_finds_what_a_search_of_every_byte_finds(seed);
  }
  std::puts("all hold");
}
