// Streams, events and host functions.
#include "graphs.h"
#include "scheduler.h"

using namespace cudasim;

CUDASIM_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  const Lock lock(state().mutex);
  Stream* stream = new_stream();
  stream->flags = flags;
  stream->priority = priority;
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
CUDASIM_API cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, 0, 0);
}
CUDASIM_API cudaError_t cudaStreamDestroy(cudaStream_t) { // the stream's queued tasks still run
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaDeviceSynchronize() {
  const Lock lock(state().mutex);
  ++state().blocked;
  wait_for_all();
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock(state().mutex);
  Stream& stream = *stream_of(handle);
  if (invalidates_capture(stream)) {
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  ++state().blocked;
  wait_for(stream);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock(state().mutex);
  Stream& stream = *stream_of(handle);
  if (invalidates_capture(stream)) {
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  run_some();
  if (!stream.queue.empty() && ++stream.queries < settings().queries) {
    return fail(cudaErrorNotReady);
  }
  stream.queries = 0;
  wait_for(stream);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  const Lock lock(state().mutex);
  Stream& stream = *stream_of(handle);
  const MarkPtr mark = event_of(event)->mark;
  if (mark == nullptr) { // the event was never recorded
    return cudaSuccess;
  }
  if (mark->capture != nullptr) {
    return join_capture(stream, *mark);
  }
  if (invalidates_capture(stream)) {
    return fail(cudaErrorStreamCaptureIsolation);
  }
  Task task;
  task.kind = Task::WAIT;
  task.mark = mark;
  push(stream, std::move(task));
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const Lock lock(state().mutex);
  return run_on(*stream_of(stream), "host function", -1, {}, [=] { function(data); });
}
CUDASIM_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                              unsigned) {
  const Lock lock(state().mutex);
  return run_on(*stream_of(stream), "callback", -1, {}, [=] { function(stream, cudaSuccess, data); });
}

CUDASIM_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event();
  event->flags = flags;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, 0);
}
CUDASIM_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Lock lock(state().mutex);
  delete event_of(handle);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  const Lock lock(state().mutex);
  Stream& stream = *stream_of(on);
  const auto mark = std::make_shared<Mark>();
  event_of(handle)->mark = mark;
  if (stream.capture != nullptr) {
    mark->capture = stream.capture;
    mark->clock = stream.capture->clocks[&stream];
    return cudaSuccess;
  }
  Task task;
  task.kind = Task::RECORD;
  task.mark = mark;
  push(stream, std::move(task));
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  return cudaEventRecordWithFlags(handle, on, 0);
}

CUDASIM_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Lock lock(state().mutex);
  const MarkPtr mark = event_of(handle)->mark;
  if (mark == nullptr) {
    return cudaSuccess;
  }
  if (mark->capture != nullptr) {
    return fail(cudaErrorCapturedEvent);
  }
  run_some();
  if (!mark->done && ++mark->queries < settings().queries) {
    return fail(cudaErrorNotReady);
  }
  wait_for(*mark);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Lock lock(state().mutex);
  const MarkPtr mark = event_of(handle)->mark;
  if (mark == nullptr) {
    return cudaSuccess;
  }
  if (mark->capture != nullptr) {
    return fail(cudaErrorCapturedEvent);
  }
  ++state().blocked;
  wait_for(*mark);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const Lock lock(state().mutex);
  const Event *first = event_of(begin), *last = event_of(end);
  const bool untimed = ((first->flags | last->flags) & cudaEventDisableTiming) != 0;
  if (first->mark == nullptr || last->mark == nullptr || untimed) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (!first->mark->done || !last->mark->done) {
    return fail(cudaErrorNotReady);
  }
  *milliseconds = static_cast<float>(1e3 * (last->mark->time - first->mark->time));
  return cudaSuccess;
}

// Returns how often the host had to wait for the device.
CUDASIM_API long long cudasim_blocked() {
  return state().blocked;
}
