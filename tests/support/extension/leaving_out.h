// Streams of a device that leave out one kind of wait everywhere: a test shows the errors that this wait prevents.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "streams.h"

namespace memplug {

class LeavingOut final : public Streams {
 public:
  LeavingOut(std::shared_ptr<Streams> streams, std::optional<Wait> missing)
      : streams_(std::move(streams)), missing_(missing) {}

  void wait(const StreamRef& stream, const EventRef& event, Wait why) override {
    ++waits.at(static_cast<size_t>(why));
    if (missing_ != why) {
      streams_->wait(stream, event, why);
    }
  }

  StreamRef make() override {
    return streams_->make();
  }
  StreamRef current() override {
    return streams_->current();
  }
  int64_t current_number() override {
    return streams_->current_number();
  }
  bool same(const StreamRef& one, const StreamRef& other) override {
    return streams_->same(one, other);
  }
  EventRef record(const StreamRef& stream) override {
    return streams_->record(stream);
  }
  EventRef mark(const StreamRef& stream) override {
    return streams_->mark(stream);
  }
  std::optional<double> seconds_between(const EventRef& begin, const EventRef& end) override {
    return streams_->seconds_between(begin, end);
  }
  bool is_immediate() override {
    return streams_->is_immediate();
  }
  bool is_capturing() override {
    return streams_->is_capturing();
  }
  void copy(const StreamRef& stream, const at::Tensor& destination, const at::Tensor& source) override {
    streams_->copy(stream, destination, source);
  }
  at::Tensor empty(const StreamRef& stream, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) override {
    return streams_->empty(stream, size, stride, dtype);
  }
  using Streams::use_on;
  void use_on(const StreamRef& stream, const c10::DataPtr& memory) override {
    streams_->use_on(stream, memory);
  }
  c10::DataPtr allocate(const StreamRef& stream, int64_t nbytes) override {
    return streams_->allocate(stream, nbytes);
  }
  at::Tensor host_memory(int64_t nbytes) override {
    return streams_->host_memory(nbytes);
  }
  void spend_forward(int64_t operators) override {
    streams_->spend_forward(operators);
  }
  void spend_backward() override {
    streams_->spend_backward();
  }

  std::array<int64_t, static_cast<size_t>(Wait::USE_FOR_COMPUTE) + 1> waits{}; // requests for each kind

 private:
  const std::shared_ptr<Streams> streams_;
  const std::optional<Wait> missing_;
};

} // namespace memplug
