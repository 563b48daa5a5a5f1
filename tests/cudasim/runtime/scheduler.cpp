// One scheduler under the state's lock. Tasks run on a thread of their own, one at a time, so that nothing of the
// caller's thread (dispatch modes, autocast, the interpreter's lock) reaches them.
#include "scheduler.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <thread>

#include "races.h"

namespace cudasim {
namespace {

double real() {
  static const auto start = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double device_worked = 0, host_waited = 0;

// The thread that is the device.
class Worker {
 public:
  void run(std::function<void()>& job) {
    if (owner_ != getpid()) { // first use, or a forked child, which lacks the parent's thread
      new (&mutex_) std::mutex();
      new (&changed_) std::condition_variable();
      owner_ = getpid();
      job_ = nullptr;
      std::thread([this] { loop(); }).detach();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = &job;
    changed_.notify_all();
    changed_.wait(lock, [&] { return job_ == nullptr; });
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return job_ != nullptr; });
      (*job_)();
      job_ = nullptr;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()>* job_ = nullptr;
  pid_t owner_ = 0;
};

Worker& worker() {
  static auto* instance = new Worker();
  return *instance;
}

bool is_ready(const Stream& stream) {
  return !stream.queue.empty() && (stream.queue.front().kind != Task::WAIT || stream.queue.front().mark->done);
}

void run_next(Stream& stream) {
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  const double begin = std::max(stream.time, task.host_time);
  switch (task.kind) {
    case Task::WAIT:
      stream.time = std::max(begin, task.mark->time);
      break;
    case Task::RECORD:
      task.mark->done = true;
      task.mark->time = stream.time = begin;
      break;
    case Task::RUN: {
      const double started = real();
      worker().run(task.run);
      const double took = real() - started;
      device_worked += took;
      stream.time = begin + (task.seconds >= 0 ? task.seconds : took);
      break;
    }
  }
}

// Under COPY_FIRST, runs all ready tasks of other streams before the default stream's next task: copies run as early as
// events allow.
void run_others_first(const Stream& stream) {
  if (settings().policy != Policy::COPY_FIRST || !stream.is_default) {
    return;
  }
  for (bool any = true; any;) {
    any = false;
    for (Stream* other : state().streams) {
      while (!other->is_default && is_ready(*other)) {
        run_next(*other);
        any = true;
      }
    }
  }
}

void advance(Stream& stream) {
  if (stream.queue.front().kind == Task::WAIT && !stream.queue.front().mark->done) {
    const MarkPtr needed = stream.queue.front().mark;
    complete(*needed); // may have run tasks of this stream too
    return;
  }
  run_next(stream);
  run_others_first(stream);
}

// Runs the next task of any stream that is ready; returns false if none is.
bool run_any() {
  State& s = state();
  std::vector<Stream*> ready;
  std::copy_if(s.streams.begin(), s.streams.end(), std::back_inserter(ready), [](auto* x) { return is_ready(*x); });
  if (ready.empty()) {
    return false;
  }
  run_next(*ready[s.random() % ready.size()]);
  return true;
}

void progress(Stream& stream) {
  switch (settings().policy) {
    case Policy::EAGER:
      finish_all();
      break;
    case Policy::LAZY:
      break;
    case Policy::RANDOM:
      run_some();
      break;
    case Policy::COPY_FIRST:
      run_others_first(*state().default_stream);
      break;
    case Policy::COMPUTE_FIRST:
      while (is_ready(*state().default_stream)) {
        run_next(*state().default_stream);
      }
      break;
  }
  while (stream.queue.size() > settings().depth) {
    advance(stream);
  }
}

void seen(const Clock& clock, double time) {
  join(state().host, clock);
  host_waited += std::max(0.0, time - now());
}

} // namespace

double now() {
  return real() - device_worked + host_waited;
}

void complete(const Mark& mark) {
  while (!mark.done) {
    advance(*mark.stream);
  }
}

void finish(Stream& stream) {
  while (!stream.queue.empty()) {
    advance(stream);
  }
}

void finish_all() {
  if (settings().policy == Policy::RANDOM) {
    while (run_any()) {
    }
  }
  for (size_t i = 0; i < state().streams.size(); ++i) { // a task may make a stream
    finish(*state().streams[i]);
  }
}

void run_some() {
  State& s = state();
  if (settings().policy != Policy::RANDOM) {
    return;
  }
  for (uint64_t left = s.random() % 2 == 0 ? 0 : s.random() % 6; left > 0 && run_any(); --left) {
  }
}

void wait_for(const Mark& mark) {
  complete(mark);
  seen(mark.clock, mark.time);
}

void wait_for(Stream& stream) {
  finish(stream);
  seen(stream.clock, stream.time);
}

void wait_for_all() {
  finish_all();
  for (const Stream* stream : state().streams) {
    seen(stream->clock, stream->time);
  }
}

bool push(Stream& stream, Task task) {
  State& s = state();
  task.host_time = now();
  ++s.tasks;
  if (stream.capture != nullptr) {
    Clock& clock = stream.capture->clocks[&stream];
    clock.resize(std::max(clock.size(), s.streams.size()));
    ++clock[stream.index];
    stream.capture->tasks.push_back(std::move(task));
    return true;
  }
  join(stream.clock, s.host);
  bool ordered = true;
  if (task.kind == Task::WAIT) {
    join(stream.clock, task.mark->clock);
  } else {
    ++stream.position;
    stream.clock.resize(std::max(stream.clock.size(), s.streams.size()));
    stream.clock[stream.index] = stream.position;
    ordered = note_accesses(stream, task.name, task.ranges);
    if (task.kind == Task::RECORD) {
      task.mark->stream = &stream;
      task.mark->clock = stream.clock;
    }
  }
  stream.queue.push_back(std::move(task));
  progress(stream);
  return ordered || settings().races != Races::RAISE;
}

cudaError_t run_on(Stream& stream, const char* name, double seconds, Ranges ranges, std::function<void()> run) {
  Task task;
  task.name = name;
  task.seconds = seconds;
  task.ranges = std::move(ranges);
  task.run = std::move(run);
  return push(stream, std::move(task)) ? cudaSuccess : fail(cudaErrorIllegalAddress);
}

} // namespace cudasim

CUDASIM_API bool cudasim_enqueue(cudaStream_t stream, const char* name, std::function<void()>* run,
                                 cudasim::Ranges* ranges) {
  const cudasim::Lock lock(cudasim::state().mutex);
  return cudasim::run_on(*cudasim::stream_of(stream), name, -1, std::move(*ranges), std::move(*run)) == cudaSuccess;
}
CUDASIM_API long long cudasim_tasks() {
  return cudasim::state().tasks;
}
CUDASIM_API size_t cudasim_pending() {
  const cudasim::Lock lock(cudasim::state().mutex);
  size_t all = 0;
  for (const cudasim::Stream* stream : cudasim::state().streams) {
    all += stream->queue.size();
  }
  return all;
}
CUDASIM_API int cudasim_set_policy(const char* name, unsigned long long seed) {
  const cudasim::Lock lock(cudasim::state().mutex);
  cudasim::finish_all();
  cudasim::state().random.seed(seed);
  return cudasim::set_policy(name) ? 0 : 1;
}
