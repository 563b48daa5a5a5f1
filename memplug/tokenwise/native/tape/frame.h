// One forward of one region: which outputs of its operators are captured, where they are, and how backward gets them.
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

// A captured tensor that stays on the device: it is small, the plan keeps it, or the host is full.
struct KeptTensor {
  explicit KeptTensor(const at::Tensor& tensor) : tensor(alias_of(tensor)), version(version_of(tensor)) {}

  // Copies the present value: an operator of the forward is about to write in place.
  void before_write();
  // Returns the tensor as it was captured. Throws `KEPT_WAS_WRITTEN`.
  const at::Tensor& get() const;
  // Returns the tensor for a recompute pass, which may write to it as the forward did.
  at::Tensor fresh() const;

  at::Tensor tensor;
  uint32_t version;
  bool written = false; // by the forward, after it was captured
  bool viewed = false; // backward reads it directly
};

// Memory from outside of a region that a recompute pass has to find again: an input that is kept by reference, or a
// literal that the forward wrote to.
struct Held {
  // `itself`: hold `value` itself, not an alias without its graph. This is for parameters: code that shards or offloads
  // them exchanges the memory behind the tensor.
  Held(const at::Tensor& value, bool itself);

  // Copies the present value: the forward is about to write to it in place.
  void before_write();
  // Returns the tensor. Throws autograd's error if it was written to since.
  const at::Tensor& get() const;
  // Returns a copy for a recompute pass, which writes to it as the forward did.
  at::Tensor fresh() const;

  at::Tensor tensor;
  uint32_t version;
  bool requires_grad;
  bool written = false; // by the forward
};

// A captured tensor, either swapped or kept.
struct CapturedTensor {
  std::shared_ptr<Swapped> swapped;
  std::shared_ptr<KeptTensor> kept;

  bool whole() const {
    return kept != nullptr || swapped->whole();
  }
  // Returns whether backward reads it directly. Valid once its frame is closed.
  bool is_viewed() const {
    return kept != nullptr ? kept->viewed : swapped->uses > 0;
  }
};

// Returns a copy of the tensor and all of its storage, with the same layout, so that views of one fit the other.
at::Tensor copy_of(const at::Tensor& tensor);

// One forward of one region in one autograd graph, and the captured tensors. A frame lives as long as its graph, so
// several can be in flight, in any order, and backward can run more than once. Guarded by Python's lock, except while a
// forward notes operators.
class Frame : public Listener, public std::enable_shared_from_this<Frame> {
 public:
  Frame(
      std::vector<std::shared_ptr<const Tape>> known,
      std::shared_ptr<Flow> flow,
      std::shared_ptr<Region> region,
      Storages::Regathered regathered);
  ~Frame() override;

  // -- forward

  // Registers a region input, before the first operator. `swaps`: offload it if possible. Returns the swapped input, or
  // null if it is not swapped.
  std::shared_ptr<Swapped> enter(const at::Tensor& value, bool swaps);

  void note_stream() override;
  void note_use(const at::Tensor& tensor) override;
  void note_reads(const Record& record) override;
  bool wants(size_t index, const Operator& op) const override;
  void capture(size_t index, c10::ArrayRef<c10::IValue> results) override;
  void before_write(int32_t storage, const at::Tensor& tensor) override;

  // Ends the forward: decides how backward gets each saved tensor, and counts the reads of swapped tensors. `direct`:
  // backward takes a saved tensor straight from a capture that has all of its rows, without a recompute pass.
  void close(bool direct);

  // -- between

  // Releases the device memory, ordered after the copies out.
  void release();

  // Releases `nbytes` or more, in the order in which the copies out end, and no more tensors than that takes. Waits for
  // no copy that was queued later. Returns false, and releases nothing, if that takes all tensors, or if the copies are
  // not queued yet.
  bool release_first(int64_t nbytes);

  // -- backward

  // Takes the time at which backward first asks for a saved tensor of a timed forward.
  virtual void begin_backward() = 0;

  // Runs the recompute pass, when backward asks for a saved tensor that has to be recomputed and is not there. The pass
  // restores all such tensors. In a further backward, the first such request runs it again.
  virtual void restore() = 0;

  // Runs the recompute pass for saved tensor `index` on the current stream, to which all restored tensors then belong.
  // Throws if the pass would run the module again, and memory that the tensor may be computed from was written to since
  // the forward.
  void restore_here(size_t index);

  // Returns a restored tensor for the current stream. Throws if it was written to since.
  at::Tensor take(size_t index);

  // Adds what is known of the region to Python's pending error, which was raised while backward asked for a tensor.
  virtual void explain() = 0;

  // Returns a saved tensor that the forward itself needs for a gradient (again.cpp). Throws `ASKED_EARLY` if the tensor
  // is gone and cannot be recomputed.
  at::Tensor early(size_t index);

  // Recomputes tensors, as the operators of `own_tape` left them, from memory that existed before the region. It is a
  // tape of this forward, which must not be opaque. Neither reads nor releases captured outputs. Returns none if a
  // tensor cannot be recomputed, such as when ranks would have to communicate or no operator shows how it was made.
  std::optional<std::vector<at::Tensor>> again(
      const std::shared_ptr<const Tape>& own_tape, const std::vector<Use>& uses);

  // Returns a saved tensor that is a view of a captured one. It is a copy if backward's kernels may write to it while
  // the captured tensor is still needed.
  at::Tensor view(size_t index);

  // Returns a saved tensor that existed before the region. It is a copy if backward's kernels may write to it while
  // others may still read it: other regions (if it is an input) or the recompute pass. A parameter is never copied.
  at::Tensor given(size_t index) const;

  // A recompute pass: the saved tensors that it restores, and what it reads. Parts of the graph may die while it runs.
  struct Restoration {
    std::vector<size_t> indices;
    std::vector<const Use*> wanted;
    std::vector<std::shared_ptr<Swapped>> inputs; // swapped inputs that it reads
    Bases bases; // memory that existed before the region
  };

  Restoration begin_pass();

  // Stores the tensors that the pass restored, and counts its reads of inputs.
  void end_pass(const Restoration& pass, const std::vector<at::Tensor>& found);

  // Returns the captured results of an operator.
  Substitute substitute(size_t index);

  // Counts one read of a swapped tensor. After the last read of this backward pass, drops its device memory, unless the
  // graph is kept and that memory is the only copy.
  void consume(const std::shared_ptr<Swapped>& part);

  // Decides what a recompute pass does, given the captured operators, in program order, and the launches of collectives
  // that they replace. Returns the operators whose captured results the pass needs.
  const std::vector<size_t>& decide(const std::vector<CapturedOperator>& captured, const std::vector<size_t>& launches);

  // Returns the bytes of the storages that a recompute pass is still to make for backward.
  int64_t pending_bytes() const {
    return is_restored ? 0 : forward.pending_bytes;
  }

  // Returns whether its forward has ended.
  bool is_over() const {
    return is_over_;
  }

  // Drops restored tensors that backward has not taken.
  void forget();

  // Saves the captured values that lie in this tensor's memory: another forward is about to write to it.
  virtual void before_write_elsewhere(const at::Tensor& tensor);

  using Inputs = std::vector<std::pair<int32_t, std::shared_ptr<Swapped>>>; // by storage

  std::shared_ptr<Flow> flow;
  std::shared_ptr<Region> region;
  std::shared_ptr<const Setting> setting; // the region's, as the forward began
  Forward forward;
  std::shared_ptr<const Tape> tape;
  std::shared_ptr<const PassActions> decisions; // null if the forward is opaque
  std::weak_ptr<Frame> previous; // of the same thread: its backward follows this one's
  Inputs inputs; // those that are swapped
  std::vector<std::shared_ptr<Swapped>> swapped; // in the order of their copies out, including inputs
  // those of `swapped` that are away and that backward needs, the first needed last
  std::vector<std::shared_ptr<Swapped>> todo;
  // inputs and literals that the forward wrote to: their former values, by storage
  std::map<int32_t, std::shared_ptr<Held>> written;
  std::set<int32_t> changing; // storages from outside that a recompute pass may find changed
  int64_t input_bytes = 0; // of swapped inputs that no earlier region had swapped
  int64_t offered = 0, offered_bytes = 0; // number and bytes of these inputs, and of those that found the host full
  const int64_t sent_before_bytes; // offloaded by all earlier forwards
  bool writes_input = false;
  bool recomputes = false; // some saved tensor has to be recomputed
  bool communicates = false; // the recompute pass launches collectives
  bool is_opaque = false;
  bool is_unrepeatable = false; // its module depends on state that cannot be restored, so it never runs again
  // Autograd's saved tensors stay on the device: the region is opaque and its module cannot run again. Either it is
  // unrepeatable, or dispatch modes changed its operators, or it would launch collectives that other ranks, on which
  // the region may not be opaque, do not.
  bool keeps = false;
  bool is_restored = false; // by a recompute pass
  std::set<size_t> spared; // collectives, and waits for them, that no recompute pass repeats
  // storages that a recompute pass takes from captures because such a collective, or a communicating unit, filled them
  std::set<int32_t> received;
  bool has_launches() const {
    return !launches_.empty();
  }

 protected:
  bool has_unread() const {
    return !unread_.empty();
  }

  // Returns the indices of the saved tensors that a recompute pass restores.
  std::vector<size_t> recomputed() const;
  std::shared_ptr<Swapped> input_of(int32_t storage) const; // null if it was not swapped

  // Returns `tensor`, made by the forward or before it, for use on the current stream, which waits for the forward's
  // streams first.
  const at::Tensor& ordered(const at::Tensor& tensor) const;

  // Saves the present value of memory from before the region, which an operator is about to write to for the first
  // time. A recompute pass must find that value, and leave no trace.
  virtual void before_foreign_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Runs a tape's operators by `decisions`, without captures. Throws what `memplug::replay` throws.
  virtual std::vector<at::Tensor> run_again(
      const PassActions& decisions, Bases bases, const std::vector<const Use*>& wanted) = 0;

  // Saves a leaf's gradient before another thread accumulates into it, a write that no operator shows.
  virtual void before_accumulating(const at::Tensor& gradient) = 0;

 private:
  void refill();
  void hold_so_far();
  void close_unread();
  void forget_read();
  // Returns the memory of a storage from before the region, for a pass that runs only operators before `end`. A swapped
  // input is added to `read`.
  at::Tensor base_of(int32_t storage, size_t end, std::vector<std::shared_ptr<Swapped>>& read);
  struct Capture {
    std::vector<CapturedTensor> parts; // none for a collective whose result no backward asks for
    bool whole;
  };

  bool may_be_written(const Forward::Saved& saved) const;
  void capture_outputs(size_t index, const Record& record, c10::ArrayRef<c10::IValue> results, Decision decision);
  void capture_exchange(size_t index, const Record& record, c10::ArrayRef<c10::IValue> written);
  void leave_out(size_t index);
  std::optional<CapturedTensor> part_of(const at::Tensor& value, std::optional<int64_t> rows, bool keep, const Operator& op);
  void add(const at::Tensor& tensor, const CapturedTensor& part);
  int64_t launch_of(size_t index) const;
  std::vector<size_t> decide();
  std::set<size_t> asked_of_ranks() const;
  void learn(const std::vector<size_t>& substituted);
  // Returns the storages of saved tensors.
  std::vector<int32_t> storages_of(const std::vector<size_t>& indices) const;
  std::vector<CapturedOperator> captured() const;
  std::vector<size_t> launches() const;

  std::map<size_t, Capture> captures_; // by operator
  std::map<size_t, size_t> launches_; // operator that launches a collective -> operator whose capture has its result
  std::map<int32_t, CapturedTensor> parts_; // captured tensors by storage
  std::vector<StreamRef> streams_; // those that its operators ran on
  int64_t newest_stream_ = 0; // number of the newest of these
  std::vector<std::shared_ptr<Swapped>> unread_; // swapped inputs that no operator has read
  StreamRef restored_on_; // stream of the last recompute pass
  bool is_over_ = false;
  const std::thread::id thread_ = std::this_thread::get_id(); // the thread that runs the forward
};

} // namespace memplug
