// The one device of this process.
#include "state.h"

#include <utility>

namespace cudasim {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

Stream* add_stream(State& s) {
  auto* stream = new Stream();
  stream->index = static_cast<int>(s.streams.size());
  s.streams.push_back(stream);
  return stream;
}

} // namespace

State& state() {
  static auto* instance = [] {
    auto* s = new State();
    s->random.seed(settings().seed);
    s->default_stream = add_stream(*s);
    s->default_stream->is_default = true;
    return s;
  }();
  return *instance;
}

Stream* new_stream() {
  return add_stream(state());
}

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return state().default_stream;
  }
  if (handle == cudaStreamPerThread) {
    thread_local Stream* const mine = new_stream();
    return mine;
  }
  return reinterpret_cast<Stream*>(handle);
}

cudaError_t fail(cudaError_t error) {
  return last_error = error;
}

} // namespace cudasim

CUDASIM_API cudaError_t cudaGetLastError() {
  return std::exchange(cudasim::last_error, cudaSuccess);
}
CUDASIM_API cudaError_t cudaPeekAtLastError() {
  return cudasim::last_error;
}
