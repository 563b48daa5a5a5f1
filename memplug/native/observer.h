// Sees the operators of a region's forward, on the thread that runs it.
#pragma once

#include "tape.h"

namespace memplug {

// Observes this thread's operators until it is destroyed: notes them on a tape, or compares them with one.
//
// An operator that only calls others (composite, under autocast, with tensors of a subclass) is looked through: the
// operators that it calls are noted in its place. All others are leaves, and what runs inside of a leaf is not noted.
class Observer {
 public:
  explicit Observer(Tape& tape);
  explicit Observer(Verifier& verifier);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  // An operator was another than the tape's: nothing is compared any more.
  bool departed() const {
    return departed_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function);
  static void end(const at::RecordFunction& function, at::ObserverContext* context);
  void add_callback();
  void miss();

  Tape* tape_ = nullptr;
  Verifier* verifier_ = nullptr;
  Observer* outer_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  bool inside_ = false; // of a leaf
  bool departed_ = false;
};

} // namespace memplug
