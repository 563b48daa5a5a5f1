// Records the operators that the training thread and autograd's threads run: as integers, and in detail while
// recording.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "clock.h"

namespace memplug {

// How much is recorded of each operator; each level includes the ones before.
enum Detail : int32_t {
  SEQUENCE = 0, // its number
  OPERATORS = 1, // also its phase, layer, time and the memory in use, for a trace
  TENSORS = 2, // also the storages that it reads and writes
};

// Packed as OPERATOR, USE and TENSOR in memplug/profile/trace.py; `phase` is still in the form that `pack` returns.
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

// Acquires the process's recorder for the calling thread and autograd's threads; throws if it is taken. Nothing is
// watched until `watch(true)`; `release` leaves no callback behind.
void claim();
void release();

// Releases the recorder in the child of a fork.
void release_in_child();
void watch(bool on);

// Returns the operators' numbers since the last call, and their count. The count is larger than the vector if not all
// operators fitted.
std::pair<std::vector<int32_t>, int64_t> take_sequence();

// Watches in more detail until `end_records`; after that nothing is watched. Storages are recorded only on devices of
// `device_type` (c10::DeviceType).
void begin_records(Detail detail, int32_t device_type);
Records end_records();

// Returns the indices of these tensors' storages in `Records::tensors` of the current recording. Tensors that no
// operator has used are left out, and so is foreign memory, such as another process's, that torch cannot free.
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
