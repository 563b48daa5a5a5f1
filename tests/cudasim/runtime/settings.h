// Settings of the simulated device, read once from the environment.
#pragma once
#include <cstddef>
#include <string>

namespace cudasim {

enum class Policy { EAGER, LAZY, RANDOM, COPY_FIRST, COMPUTE_FIRST };
enum class Races { OFF, COUNT, PRINT, RAISE, ABORT };

struct Settings {
  Policy policy;
  Races races;
  unsigned long long seed;   // for Policy::RANDOM
  size_t memory_bytes;       // the device's memory
  size_t pinned_bytes;       // host memory that can be registered
  bool refuses_to_register;
  bool poison;               // new memory is filled with NaN
  int queries;               // after this many queries of an event or a stream, its tasks run
  size_t depth;              // if more tasks than this are queued on a stream, the oldest one runs
  double copy_bytes_per_s;   // the link's rate, in the virtual time that events measure
  int capability;            // compute capability, times ten
};

// Returns the settings; aborts the process if a variable has an unknown value.
Settings& settings();

// Sets the policy; returns false if there is none of that name.
bool set_policy(const char* name);

long long number_of(const char* variable, long long otherwise);
std::string word_of(const char* variable, const char* otherwise);

} // namespace cudasim
