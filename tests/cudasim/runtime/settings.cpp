// Environment variables, all read when the first setting is needed.
#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <map>

namespace cudasim {
namespace {

const std::map<std::string, Policy>& policies() {
  static const auto* all = new std::map<std::string, Policy>{{"eager", Policy::EAGER},
                                                             {"lazy", Policy::LAZY},
                                                             {"random", Policy::RANDOM},
                                                             {"copyfirst", Policy::COPY_FIRST},
                                                             {"computefirst", Policy::COMPUTE_FIRST}};
  return *all;
}

template <typename T>
T named(const char* variable, const char* otherwise, const std::map<std::string, T>& names) {
  const std::string word = word_of(variable, otherwise);
  const auto found = names.find(word);
  if (found == names.end()) {
    std::fprintf(stderr, "cudasim: %s is %s, expected one of:", variable, word.c_str());
    for (const auto& [name, value] : names) {
      std::fprintf(stderr, " %s", name.c_str());
    }
    std::fprintf(stderr, "\n");
    std::abort();
  }
  return found->second;
}

Settings read() {
  Settings s{};
  s.policy = named("CUDASIM_POLICY", "eager", policies());
  s.races = named<Races>("CUDASIM_RACES", "print",
                         {{"off", Races::OFF},
                          {"count", Races::COUNT},
                          {"print", Races::PRINT},
                          {"raise", Races::RAISE},
                          {"abort", Races::ABORT}});
  s.seed = static_cast<unsigned long long>(number_of("CUDASIM_SEED", 0));
  s.memory_bytes = static_cast<size_t>(number_of("CUDASIM_MEMORY_MIB", 4096)) << 20;
  s.pinned_bytes = static_cast<size_t>(number_of("CUDASIM_PINNED_MIB", 1 << 20)) << 20;
  s.refuses_to_register = number_of("CUDASIM_REFUSE_REGISTER", 0) != 0;
  s.poison = number_of("CUDASIM_POISON", 1) != 0;
  s.queries = static_cast<int>(number_of("CUDASIM_QUERIES", 8));
  s.depth = static_cast<size_t>(number_of("CUDASIM_DEPTH", 1024));
  s.copy_bytes_per_s = 1e9 * static_cast<double>(number_of("CUDASIM_COPY_GBPS", 25));
  s.capability = static_cast<int>(number_of("CUDASIM_CAPABILITY", 90));
  return s;
}

} // namespace

bool set_policy(const char* name) {
  const auto found = policies().find(name);
  if (found != policies().end()) {
    settings().policy = found->second;
  }
  return found != policies().end();
}

long long number_of(const char* variable, long long otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != 0 ? std::atoll(text) : otherwise;
}

std::string word_of(const char* variable, const char* otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != 0 ? text : otherwise;
}

Settings& settings() {
  static auto* instance = new Settings(read());
  return *instance;
}

} // namespace cudasim
