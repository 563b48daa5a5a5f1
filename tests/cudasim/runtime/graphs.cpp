// A graph has the tasks that were queued while its streams were captured. It is replayed in program order, on one
// stream, so the order between its own tasks is not checked. A capture fails unless every stream joins the origin
// again, the stream on which the capture began.
#include "graphs.h"

#include "scheduler.h"

namespace cudasim {

bool invalidates_capture(Stream& stream) {
  if (stream.capture == nullptr) {
    return false;
  }
  stream.capture->invalid = true;
  return true;
}

cudaError_t join_capture(Stream& stream, const Mark& mark) {
  if (stream.capture != nullptr && stream.capture != mark.capture) {
    stream.capture->invalid = mark.capture->invalid = true;
    return fail(cudaErrorStreamCaptureMerge);
  }
  stream.capture = mark.capture;
  join(mark.capture->clocks[&stream], mark.clock);
  return cudaSuccess;
}

namespace {

// Returns whether the origin has waited for all tasks of the other streams.
bool is_joined(const Graph& graph) {
  const Clock& known = graph.clocks.at(graph.origin);
  return std::all_of(graph.clocks.begin(), graph.clocks.end(), [&](const auto& each) {
    const auto index = static_cast<size_t>(each.first->index);
    const uint64_t tasks = index < each.second.size() ? each.second[index] : 0;
    return tasks == 0 || (index < known.size() && known[index] >= tasks);
  });
}

Graph* graph_of(cudaGraph_t handle) {
  return reinterpret_cast<Graph*>(handle);
}

} // namespace
} // namespace cudasim

using namespace cudasim;

CUDASIM_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const Lock lock(state().mutex);
  Stream& stream = *stream_of(handle);
  if (&stream == state().default_stream || stream.capture != nullptr) {
    return fail(stream.capture != nullptr ? cudaErrorIllegalState : cudaErrorStreamCaptureUnsupported);
  }
  auto* graph = new Graph();
  graph->id = ++state().captures;
  graph->origin = &stream;
  graph->clocks[&stream];
  stream.capture = graph;
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* result) {
  const Lock lock(state().mutex);
  Stream& stream = *stream_of(handle);
  Graph* graph = stream.capture;
  *result = nullptr;
  if (graph == nullptr) {
    return fail(cudaErrorIllegalState);
  }
  if (graph->origin != &stream) {
    return fail(cudaErrorStreamCaptureUnmatched);
  }
  for (const auto& [each, clock] : graph->clocks) {
    each->capture = each->capture == graph ? nullptr : each->capture;
  }
  if (graph->invalid || !is_joined(*graph)) {
    return fail(graph->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined);
  }
  *result = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Lock lock(state().mutex);
  const Graph* graph = stream_of(handle)->capture;
  *status = graph == nullptr ? cudaStreamCaptureStatusNone
      : graph->invalid      ? cudaStreamCaptureStatusInvalidated
                            : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                                 unsigned long long* id, cudaGraph_t* graph,
                                                 const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                                 size_t* count) {
  const Lock lock(state().mutex);
  cudaStreamIsCapturing(handle, status);
  Graph* captured = stream_of(handle)->capture;
  if (id != nullptr) {
    *id = captured != nullptr ? captured->id : 0;
  }
  if (graph != nullptr) {
    *graph = reinterpret_cast<cudaGraph_t>(captured);
  }
  if (nodes != nullptr) {
    *nodes = nullptr;
  }
  if (edges != nullptr) {
    *edges = nullptr;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode mine = cudaStreamCaptureModeGlobal;
  std::swap(mine, *mode);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const Lock lock(state().mutex);
  for (const Task& task : reinterpret_cast<Graph*>(exec)->tasks) {
    push(*stream_of(stream), task);
  }
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph_of(graph)->tasks.size();
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                                     size_t* count) {
  *count = 0;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGraphDestroy(cudaGraph_t) { // its instances stay valid
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return cudaSuccess;
}
