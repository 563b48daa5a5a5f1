// Watches the operators of the training thread and of autograd's threads: notes their numbers and, while recording,
// their details.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "clock.h"

namespace memplug {

// The details recorded of each operator; each level includes the lower ones.
enum Detail : int32_t {
  SEQUENCE = 0, // the operator's number
  OPERATORS = 1, // also its phase, layer, time and the memory in use, for a trace
  TENSORS = 2, // also the storages that the operator reads and writes
};

// Same layout as OPERATOR, USE and TENSOR in memplug/profile/trace.py, but `phase` is a result of `pack`.
#pragma pack(push, 1)
struct OperatorRecord {
  int32_t name;
  int32_t phase;
  int32_t layer;
  int64_t time_ns;
  int64_t in_use_bytes;
  int16_t depth;
};
struct UseRecord {
  int32_t operator_index;
  int32_t tensor;
  uint8_t output;
};
struct TensorRecord {
  int64_t nbytes;
  int32_t dtype;
};
#pragma pack(pop)

struct Records {
  std::vector<OperatorRecord> operators;
  std::vector<UseRecord> uses;
  std::vector<TensorRecord> tensors;
};

// `claim` acquires the process's recorder for the calling thread and autograd's threads, and throws if the recorder is
// already claimed. The recorder watches nothing until `watch(true)`. `release` gives the recorder back, and removes
// torch's callbacks.
void claim();
void release();

// Releases the recorder in the child of a fork.
void release_in_child();
void watch(bool on);

// Returns the numbers of the operators that have begun since the last call, and how many they are. The count is larger
// than the vector if the sequence had no room for some of them.
std::pair<std::vector<int32_t>, int64_t> take_sequence();

// Records operators at a level of detail until `end_records`, which ends watching too. Records storages only on devices
// of `device_type` (c10::DeviceType).
void begin_records(Detail detail, int32_t device_type);
Records end_records();

// Returns the indices of these tensors' storages in `Records::tensors` of the current recording. The result leaves out
// tensors that no operator has used, and those whose memory torch cannot free, such as another process's.
std::vector<int32_t> recorded_numbers(const std::vector<at::Tensor>& tensors);

// Returns the index of the operator that runs now or ran last in the current recording, -1 before the first.
int64_t running_operator();

// Returns a place's pass and micro-batch as one integer.
inline int32_t pack(Place place) {
  return (place.micro_batch + 1) * 8 + place.pass;
}

void lock_records_for_fork();
void unlock_records_after_fork();

} // namespace memplug
