#include "operator_names.h"

#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <mutex>

namespace memplug {
namespace {

constexpr size_t NAMES = 1 << 13; // capacity of the table; torch has some 3,000 operators

constexpr int32_t UNNAMED = 0; // shared by all operators that do not fit into the table

// Maps the address of an operator's name, which the operator's schema owns, to the operator's number. Looking up a
// known name takes no lock and allocates nothing.
class Names {
 public:
  int32_t number(const at::RecordFunction& function) {
    const char* key = function.name();
    for (size_t i = slot(key), tried = 0; tried < PROBES; i = (i + 1) % NAMES, ++tried) {
      const char* found = table_[i].key.load(std::memory_order_acquire);
      if (found == key) {
        return table_[i].number;
      }
      if (found == nullptr) {
        return insert(function, key);
      }
    }
    return UNNAMED;
  }

  std::vector<int32_t> numbers(const std::vector<std::string>& texts) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> found;
    for (const std::string& text : texts) {
      found.push_back(number_of(text));
    }
    return found;
  }

  std::vector<std::string> all() {
    const std::lock_guard<std::mutex> lock(mutex);
    return of_number_;
  }

  std::mutex mutex;

 private:
  static constexpr size_t PROBES = 64;

  struct Entry {
    std::atomic<const char*> key{nullptr};
    int32_t number = UNNAMED;
  };

  static size_t slot(const char* key) {
    return reinterpret_cast<uintptr_t>(key) * 0x9E3779B97F4A7C15ull >> 51;
  }

  int32_t insert(const at::RecordFunction& function, const char* key) {
    const auto name = function.operator_name();
    if (!name) {
      return NOT_AN_OPERATOR;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const int32_t number =
        number_of(name->overload_name.empty() ? name->name : name->name + "." + name->overload_name);
    for (size_t i = slot(key), tried = 0; tried < PROBES; i = (i + 1) % NAMES, ++tried) {
      const char* taken = table_[i].key.load(std::memory_order_relaxed);
      if (taken == nullptr) {
        table_[i].number = number;
        table_[i].key.store(key, std::memory_order_release);
      }
      if (taken == nullptr || taken == key) {
        break;
      }
    }
    return number;
  }

  int32_t number_of(const std::string& text) {
    const auto [found, fresh] = by_text_.emplace(text, static_cast<int32_t>(of_number_.size()));
    if (fresh) {
      of_number_.push_back(text);
    }
    return found->second;
  }

  std::array<Entry, NAMES> table_;
  std::vector<std::string> of_number_{"?"};
  ska::flat_hash_map<std::string, int32_t> by_text_;
};

Names& names() {
  static auto* instance = new Names(); // never destroyed: autograd's threads outlive static destruction
  return *instance;
}

} // namespace

std::vector<std::string> operator_names() {
  return names().all();
}

int32_t number_of(const at::RecordFunction& function) {
  return names().number(function);
}

std::vector<int32_t> operator_numbers(const std::vector<std::string>& texts) {
  return names().numbers(texts);
}

void lock_names_for_fork() {
  names().mutex.lock();
}

void unlock_names_after_fork() {
  names().mutex.unlock();
}

} // namespace memplug
