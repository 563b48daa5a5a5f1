// The device for tests of the arena's core: host memory, with streams and events that only count.
#pragma once

#include "../../memplug/arena/native/arena.h"

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
constexpr int64_t UNIT = BLOCK_BYTES;

// Work queued on a stream is a running number; a stream that waits for an event knows the other stream's number.
struct Simulated final : ArenaDevice {
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
  Stream current_stream() override {
    return current;
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

  // Returns whether later work of a stream follows, through events, all work that the other has queued so far.
  bool is_after(Stream stream, Stream other) {
    return seen[{stream, other}] >= queued[other];
  }

  std::mutex mutex;
  std::map<char*, size_t> reserved;
  size_t reserved_bytes = 0, capacity = size_t{1} << 30;
  int64_t events = 0;
  Stream current = MAIN;
  std::map<Stream, int64_t> queued, finished;
  std::map<std::pair<Stream, Stream>, int64_t> seen;
};

PlannedRequest planned(int64_t offset, int64_t size, int32_t phase = 0, int32_t stream = 0, uint64_t crosses = 0) {
  return {size * UNIT, offset * UNIT, 0, 0, crosses, phase, 0, stream, -1, -1, CONSTANT};
}

ArenaPlan plan_of(std::vector<PlannedRequest> requests, int64_t size, int32_t streams = 1) {
  ArenaPlan plan;
  plan.requests = std::move(requests);
  plan.reused_bytes = size * UNIT;
  plan.streams = streams;
  return plan;
}

void* ask(Arena& arena, int64_t units, int32_t phase = 0, Stream stream = MAIN, Reuse reuse = Reuse::NOTHING) {
  return arena.request(phase, 0, static_cast<size_t>(units * UNIT), stream, reuse);
}

int64_t at(Arena& arena, void* pointer) {
  return (static_cast<char*>(pointer) - arena.reserved_with(pointer)) / UNIT;
}

} // namespace
