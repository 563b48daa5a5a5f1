// The operators that the training thread and autograd's threads run, as integers, and in detail while recording.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "clock.h"

namespace memplug {

// How much is noted of each operator; each level includes the ones before.
enum Detail : int32_t {
  SEQUENCE = 0, // its number
  OPERATORS = 1, // besides: its phase, layer, time and the memory in use, for a trace
  TENSORS = 2, // besides: the storages that it reads and writes
};

// Packed as OPERATOR, USE and TENSOR in memplug/profile/trace.py; `phase` still in the form that `pack` gives.
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

// Take the recorder of this process, for the calling thread and autograd's; throws where it is taken. Nothing is
// watched until `watch(true)`; `release` leaves no callback behind.
void claim();
void release();

// In the child of a fork.
void release_in_child();
void watch(bool on);

// Operators since the last call, and how many there were: more than fit where the two differ.
std::pair<std::vector<int32_t>, int64_t> take_sequence();

// Watch, and note more of each operator from now on until `end_records`, after which nothing is watched; `device_type` of the storages (c10::DeviceType).
void begin_records(Detail detail, int32_t device_type);
Records end_records();

// Which of the current recording's storages these tensors lie in, into `Records::tensors`; those that no operator has used are
// left out, and memory of others, such as another process, that torch cannot give back.
std::vector<int32_t> recorded_numbers(const std::vector<at::Tensor>& tensors);

// Index of the operator that runs now or ran last in the current recording, -1 before the first.
int64_t running_operator();

// A place's pass and micro-batch in one integer.
inline int32_t pack(Place place) {
  return (place.micro_batch + 1) * 8 + place.pass;
}

void lock_records_for_fork();
void unlock_records_after_fork();

} // namespace memplug
