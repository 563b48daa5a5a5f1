// One forward of one region: which of its operators' outputs are captured, where they are, and how backward has them
// back.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "flow.h"
#include "forward.h"
#include "replay.h"
#include "versions.h"

namespace memplug {

// A captured tensor that stays on the device: small, or kept by plan.
struct Kept {
  explicit Kept(const at::Tensor& tensor) : tensor(alias_of(tensor)), version(version_of(tensor)) {}

  void before_write(); // an operator of the forward is about to write in place: remember the value of now
  const at::Tensor& get() const; // as it was captured; throws `KEPT_WAS_WRITTEN`
  at::Tensor fresh() const; // for a recompute pass, which may go on to write to it as the forward did

  at::Tensor tensor;
  uint32_t version;
  bool written = false; // by the forward, after it was captured
  bool viewed = false; // backward reads it itself
};

// Memory from outside of a region that a recompute pass finds again: an input that is kept by reference.
struct Held {
  // `itself`: a parameter, since what shards or offloads parameters exchanges their memory; else without its graph.
  Held(const at::Tensor& value, bool itself);

  void before_write(); // the forward is about to write to it in place: remember the value of now
  const at::Tensor& get() const; // an error where autograd would raise one too: it was written to since
  at::Tensor fresh() const; // for a recompute pass, which writes to it as the forward did

  at::Tensor tensor;
  uint32_t version;
  bool requires_grad;
  bool written = false; // by the forward
};

// A captured tensor: one of the two.
struct Part {
  std::shared_ptr<Swapped> swapped;
  std::shared_ptr<Kept> kept;

  bool whole() const {
    return kept != nullptr || swapped->whole();
  }
  // Backward reads it itself, once its frame is closed.
  bool is_viewed() const {
    return kept != nullptr ? kept->viewed : swapped->uses > 0;
  }
};

// A copy that lies in memory as the original does: views of the one fit the other.
at::Tensor copy_of(const at::Tensor& tensor);

// The frame lives as long as its graph does, so several can be in flight, in any order, and backward can run more than
// once. Guarded by Python's lock, but for what a forward notes of operators.
class Frame : public Listener, public std::enable_shared_from_this<Frame> {
 public:
  Frame(
      std::vector<std::shared_ptr<const Tape>> known,
      std::shared_ptr<Flow> flow,
      std::shared_ptr<Region> region,
      Storages::Regathered regathered);
  ~Frame() override;

  // -- forward

  // A region input, before the first operator. `swaps`: it leaves for the host if it can; returns its copy, or null.
  std::shared_ptr<Swapped> enter(const at::Tensor& value, bool swaps);

  void note_stream() override;
  void note_use(const at::Tensor& tensor) override;
  void note_reads(const Record& record) override;
  bool wants(size_t index, const Operator& op) const override;
  void capture(size_t index, c10::ArrayRef<c10::IValue> results) override;
  void before_write(int32_t storage, const at::Tensor& tensor) override;

  // The forward is over: decides how backward has each saved tensor, and counts who reads what was swapped. `direct`:
  // from a copy, where there is a whole one.
  void close(bool direct);

  // -- between

  // Waits for the copies out, and releases the device memory.
  void release();

  // The same of as few tensors as have so many bytes, those whose copies are over first: no wait for the others, which
  // were queued later. False, and nothing is released: all are needed, or its copies are not queued yet.
  bool release_first(int64_t nbytes);

  // -- backward

  // Backward asks for a saved tensor of a timed forward.
  virtual void begin_backward() = 0;

  // Runs the recompute pass: backward asks for a saved tensor that has to be recomputed, and that is not there. It gives
  // all of them, and the first that a further backward asks for does so again.
  virtual void restore() = 0;

  // The same for one of them, and notes the stream on which it runs, which what it restores belongs to. Throws where the
  // module would run again, and what that tensor may have been computed from was written to since.
  void restore_here(size_t index);

  // A restored tensor, for the current stream. Throws where it was written to since.
  at::Tensor take(size_t index);

  // What backward asked for raised an error, Python's of now.
  virtual void explain() = 0;

  // A saved tensor that the forward itself asks for, as it wants a gradient (again.cpp). Throws `ASKED_EARLY` where it is
  // neither there nor can be made again.
  at::Tensor early(size_t index);

  // Tensors as the operators of a tape of this forward left them, made again from what was there before the region: no
  // capture is read, or released. None where not all of them can be: ranks would have to communicate, or no operator shows
  // how one was made. Not for tapes of opaque forwards.
  std::optional<std::vector<at::Tensor>> again(
      const std::shared_ptr<const Tape>& own_tape, const std::vector<Use>& uses);

  // A saved tensor that is a view of a captured one; a copy, where a unit's backward gets it and others still read that one.
  at::Tensor view(size_t index);

  // A saved tensor that was there before the region; likewise a copy of an input, and where the recompute pass is still to
  // come.
  at::Tensor given(size_t index) const;

  // A recompute pass: which saved tensors it restores, from what. Parts of the graph may go while it runs.
  struct Pass {
    std::vector<size_t> indices;
    std::vector<const Use*> wanted;
    std::vector<std::shared_ptr<Swapped>> inputs; // that it reads
    Bases bases; // what was there before the region
  };

  Pass begin_pass();

  // It gave what was wanted.
  void end_pass(const Pass& pass, const std::vector<at::Tensor>& found);

  // The captured results of an operator.
  Substitute substitute(size_t index);

  // One read of a swapped tensor is done; after the last in this backward pass, its device memory goes, but for what a
  // graph that is kept needs again, and has nowhere else.
  void consume(const std::shared_ptr<Swapped>& part);

  // Decides what a recompute pass does, with these captured, in program order, and launched; returns the operators whose
  // captured results it asks for.
  const std::vector<size_t>& decide(const std::vector<Captured>& captured, const std::vector<size_t>& launches);

  // Bytes of storages that backward asks for and that a recompute pass, still to come, will make.
  int64_t pending_bytes() const {
    return is_restored ? 0 : forward.pending_bytes;
  }

  // Its forward has ended.
  bool is_over() const {
    return is_over_;
  }

  // What was restored and not taken goes.
  void forget();

  // Another forward is about to write to memory of this tensor.
  virtual void before_write_elsewhere(const at::Tensor& tensor);

  using Inputs = std::vector<std::pair<int32_t, std::shared_ptr<Swapped>>>; // by storage

  std::shared_ptr<Flow> flow;
  std::shared_ptr<Region> region;
  std::shared_ptr<const Setting> setting; // the region's, when the forward began
  Forward forward;
  std::shared_ptr<const Tape> tape;
  std::shared_ptr<const Decisions> decisions; // null where it is opaque
  std::weak_ptr<Frame> previous; // of the same thread: its backward follows
  Inputs inputs; // that are swapped
  std::vector<std::shared_ptr<Swapped>> swapped; // in the order of their copies out; inputs too
  std::vector<std::shared_ptr<Swapped>> todo; // of them, what is away and needed in backward, the soonest last
  // inputs and literals that the forward wrote to: the value before, by storage
  std::map<int32_t, std::shared_ptr<Held>> written;
  std::set<int32_t> changing; // storages from outside whose contents a recompute pass need not find unchanged
  int64_t input_bytes = 0; // of inputs that have a copy, but for another region's
  int64_t offered = 0, offered_bytes = 0; // likewise, with those that the host had no room for
  const int64_t sent_before_bytes; // by all forwards before it
  bool writes_input = false;
  bool recomputes = false; // some saved tensor has to be recomputed
  bool communicates = false; // the recompute pass launches collectives
  bool is_opaque = false;
  bool is_unrepeatable = false; // its module depends on state that cannot be put back, so that it never runs again
  // What autograd saved stays as it is: it is opaque, and is unrepeatable, or ran inside of modes that changed it, or talks
  // to other ranks, where a region may be none. To run all of it again would launch what they do not.
  bool keeps = false;
  bool is_restored = false; // by a recompute pass
  std::set<size_t> spared; // collectives that no recompute pass launches again, and the waits for them
  // storages that such a collective filled, or a unit that communicates made, and a recompute pass has from their captures
  std::set<int32_t> received;
  bool has_launches() const {
    return !launches_.empty();
  }

 protected:
  bool has_unread() const {
    return !unread_.empty();
  }

  std::vector<size_t> recomputed() const; // saved tensors that a recompute pass gives
  std::shared_ptr<Swapped> input_of(int32_t storage) const; // null: it is none that was swapped

  // A tensor of the forward, or from before it, for the current stream, which may be none that an operator used it on.
  const at::Tensor& ordered(const at::Tensor& tensor) const;

  // An operator is about to write to memory that was there before the region, for the first time: a recompute pass must
  // find it as it is now, and leave no trace.
  virtual void before_foreign_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Runs a tape's operators by `decisions`, without captures. Throws as `memplug::replay`.
  virtual std::vector<at::Tensor> run_again(
      const Decisions& decisions, Bases bases, const std::vector<const Use*>& wanted) = 0;

  // Another thread is about to accumulate a leaf's gradient, which no operator shows.
  virtual void before_accumulating(const at::Tensor& gradient) = 0;

 private:
  void refill();
  void hold_so_far();
  void close_unread();
  void forget_read();
  // What a pass that runs no operator from `end` on finds of a storage that was there before the region; notes a swapped
  // input that it reads.
  at::Tensor base_of(int32_t storage, size_t end, std::vector<std::shared_ptr<Swapped>>& read);
  struct Capture {
    std::vector<Part> parts; // none: a collective whose result no backward asks for
    bool whole;
  };

  bool may_be_written(const Forward::Saved& saved) const;
  void capture_outputs(size_t index, const Record& record, c10::ArrayRef<c10::IValue> results, Decision decision);
  void capture_exchange(size_t index, const Record& record, c10::ArrayRef<c10::IValue> written);
  void leave_out(size_t index);
  std::optional<Part> part_of(const at::Tensor& value, std::optional<int64_t> rows, bool keep, const Operator& op);
  void add(const at::Tensor& tensor, const Part& part);
  int64_t launch_of(size_t index) const;
  std::vector<size_t> decide();
  std::set<size_t> asked_of_ranks() const;
  void learn(const std::vector<size_t>& substituted);
  std::vector<int32_t> storages_of(const std::vector<size_t>& indices) const; // of saved tensors
  std::vector<Captured> captured() const;
  std::vector<size_t> launches() const;

  std::map<size_t, Capture> captures_; // by operator
  std::map<size_t, size_t> launches_; // where a collective is launched -> where its result is there, captured
  std::map<int32_t, Part> parts_; // captured tensors by storage
  std::vector<StreamRef> streams_; // that its operators ran on
  int64_t newest_stream_ = 0; // number of the last one's
  std::vector<std::shared_ptr<Swapped>> unread_; // inputs
  StreamRef restored_on_; // the stream of the last recompute pass
  bool is_over_ = false;
  const std::thread::id thread_ = std::this_thread::get_id(); // that runs the forward
};

} // namespace memplug
