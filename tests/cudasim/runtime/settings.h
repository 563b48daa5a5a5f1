// What the environment says of the simulated device; read once.
#pragma once
#include <cstddef>
#include <string>

namespace cudasim {

enum class Policy { EAGER, LAZY, RANDOM, COPY_FIRST, COMPUTE_FIRST };
enum class Races { OFF, COUNT, PRINT, RAISE, ABORT };

struct Settings {
  Policy policy;
  Races races;
  unsigned long long seed;   // of Policy::RANDOM
  size_t memory_bytes;       // of the device
  size_t pinned_bytes;       // host memory that can be registered
  bool refuses_to_register;
  bool poison;               // new memory is filled with NaN
  int queries;               // unsuccessful ones of an event or a stream before a lazy device gives in
  size_t depth;              // tasks of a stream before the host has to wait
  double copy_bytes_per_s;   // over the link, in the virtual time that events tell
  int capability;            // compute capability, times ten
};

// Aborts the process where a variable names no policy.
Settings& settings();

// Sets the policy; false: there is none of that name.
bool set_policy(const char* name);

long long number_of(const char* variable, long long otherwise);
std::string word_of(const char* variable, const char* otherwise);

} // namespace cudasim
