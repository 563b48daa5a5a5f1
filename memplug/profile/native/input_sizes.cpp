#include "input_sizes.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace memplug {
namespace {

std::mutex mutex;
std::vector<std::vector<int64_t>> known; // by micro-batch
std::atomic<uint32_t> version{0};

} // namespace

void note_input_sizes(int32_t micro_batch, std::vector<int64_t> sizes) {
  const std::lock_guard<std::mutex> lock(mutex);
  known.resize(std::max(known.size(), static_cast<size_t>(micro_batch) + 1));
  if (known[micro_batch] != sizes) {
    known[micro_batch] = std::move(sizes);
    ++version;
  }
}

uint32_t input_version() {
  return version.load(std::memory_order_acquire);
}

std::pair<uint32_t, std::vector<int64_t>> input_sizes(int32_t micro_batch) {
  const std::lock_guard<std::mutex> lock(mutex);
  const bool is_known = micro_batch >= 0 && static_cast<size_t>(micro_batch) < known.size();
  return {version.load(), is_known ? known[micro_batch] : std::vector<int64_t>()};
}

std::vector<std::vector<int64_t>> input_sizes() {
  const std::lock_guard<std::mutex> lock(mutex);
  return known;
}

} // namespace memplug
