// One forward of one region in one autograd graph: which outputs of its operators are captured, where the captures are,
// and how backward gets saved tensors.
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

  // Copies the present value, since an operator is about to write to it in place.
  void before_write();
  // Returns the tensor as it was captured. Throws `KEPT_WAS_WRITTEN` if it was written to without `before_write`.
  const at::Tensor& get() const;
  // Returns the tensor for a recompute pass. It is a copy if the forward wrote to the tensor, since the pass may do the
  // same.
  at::Tensor fresh() const;

  at::Tensor tensor;
  uint32_t version;
  bool written = false; // `before_write` was called
  bool viewed = false; // backward reads it directly
};

// A given tensor that a recompute pass has to find again: an input that is kept by reference, or a literal that the
// forward wrote to.
struct Held {
  // `itself`: hold `value` itself, for a parameter; else an alias without its graph. Code that shards or offloads
  // parameters exchanges the memory behind the tensor, which an alias would not follow.
  Held(const at::Tensor& value, bool itself);

  // Copies the present value, since an operator is about to write to it in place.
  void before_write();
  // Returns the tensor. Throws autograd's error if it was written to without `before_write`.
  const at::Tensor& get() const;
  // Returns a copy for a recompute pass, which writes to it as the forward did.
  at::Tensor fresh() const;

  at::Tensor tensor;
  uint32_t version;
  bool requires_grad;
  bool written = false; // `before_write` was called
};

// A captured tensor, either swapped or kept.
struct CapturedTensor {
  std::shared_ptr<Swapped> swapped;
  std::shared_ptr<KeptTensor> kept;

  bool whole() const {
    return kept != nullptr || swapped->whole();
  }
  // Returns whether backward reads it directly, without a recompute pass. Valid once its frame is closed.
  bool is_viewed() const {
    return kept != nullptr ? kept->viewed : swapped->uses > 0;
  }
};

// Copies a tensor with all of its storage. Returns a tensor with the same layout in the new storage, so that the
// geometry of any view fits both storages.
at::Tensor copy_of(const at::Tensor& tensor);

// One forward of one region in one autograd graph, with its captured tensors. A frame lives as long as its graph. So
// several frames can be in flight, in any order, and backward can run more than once. Guarded by Python's lock, except
// while the forward notes operators.
class Frame : public Listener, public std::enable_shared_from_this<Frame> {
 public:
  Frame(
      std::vector<std::shared_ptr<const Tape>> known,
      std::shared_ptr<Flow> flow,
      std::shared_ptr<Region> region,
      Storages::Regathered regathered);
  ~Frame() override;

  // -- forward

  // Registers an input of the region, before the first operator. `swaps`: offload it if possible. Returns the swapped
  // input; null if it is not swapped.
  std::shared_ptr<Swapped> enter(const at::Tensor& value, bool swaps);

  void note_stream() override;
  void note_use(const at::Tensor& tensor) override;
  void note_reads(const Record& record) override;
  bool wants(size_t index, const Operator& op) const override;
  void capture(size_t index, c10::ArrayRef<c10::IValue> results) override;
  void before_write(int32_t storage, const at::Tensor& tensor) override;

  // Ends the forward. Decides how backward gets each saved tensor, and counts how often backward will read each swapped
  // one. `direct`: backward takes a saved tensor straight from a capture of all of its rows, without a recompute pass.
  void close(bool direct);

  // -- between

  // Releases the device memory of all swapped tensors, ordered after their copies out.
  void release();

  // Releases as few swapped tensors as have `nbytes` or more, in the order in which their copies out end. No stream
  // waits for the copy of another tensor. Releases nothing and returns false if this would take all tensors, or if the
  // copies are not queued yet.
  bool release_first(int64_t nbytes);

  // -- backward

  // Takes the time at which backward asks for a saved tensor of a timed forward; only the first request counts.
  virtual void begin_backward() = 0;

  // Runs the recompute pass, which restores all tensors that have to be recomputed. Called when backward asks for such
  // a tensor and it is not there. In a further backward, the first such request runs the pass again.
  virtual void restore() = 0;

  // Runs the recompute pass for saved tensor `index` on the current stream. All restored tensors then belong to this
  // stream. A pass that runs the module again throws instead if memory that the tensor may be computed from was written
  // to after the forward.
  void restore_here(size_t index);

  // Returns a restored tensor for use on the current stream. Throws if it was written to after the pass.
  at::Tensor take(size_t index);

  // Adds what is known of the region to Python's pending error, which was raised while backward asked for a tensor.
  virtual void explain() = 0;

  // Returns a saved tensor that the forward itself needs for a gradient (again.cpp). Throws `ASKED_EARLY` if the tensor
  // is gone and cannot be recomputed.
  at::Tensor early(size_t index);

  // Recomputes the tensors of `uses`, as they were after the last operator of `own_tape`, from given memory alone:
  // captured outputs are neither read nor released. `own_tape`: a tape of this forward, which must not be opaque.
  // Returns none if a tensor cannot be recomputed: ranks would have to communicate, or no operator made it.
  std::optional<std::vector<at::Tensor>> again(
      const std::shared_ptr<const Tape>& own_tape, const std::vector<Use>& uses);

  // Returns a saved tensor that is a view of a captured one. It is a copy if backward's kernels may write to it while
  // the captured tensor is still needed.
  at::Tensor view(size_t index);

  // Returns a saved tensor that lies in given memory. It is a copy if backward's kernels may write to it while it may
  // still be read: by other regions, if it is an input, or by the recompute pass. A parameter is never copied.
  at::Tensor given(size_t index) const;

  // A recompute pass: the saved tensors that it restores, and the memory that it reads. Parts of the graph may die
  // while it runs.
  struct Restoration {
    std::vector<size_t> indices; // of the saved tensors
    std::vector<const Use*> wanted; // the same tensors on the tape
    std::vector<std::shared_ptr<Swapped>> inputs; // swapped inputs that the pass reads
    Bases bases; // given memory, swapped inputs included
  };

  Restoration begin_pass();

  // Stores the tensors that the pass restored, and counts its reads of swapped inputs.
  void end_pass(const Restoration& pass, const std::vector<at::Tensor>& found);

  // Returns the captured results of an operator.
  Substitute substitute(size_t index);

  // Counts one read of a swapped tensor. After the last read in this backward, drops the tensor's device memory, unless
  // backward keeps its graph and that memory is the only copy.
  void consume(const std::shared_ptr<Swapped>& part);

  // Decides what a recompute pass does. `captured`: the captured operators, in program order. `launches`: the operators
  // whose results these captures have (`actions_of`). Returns the operators whose captured results the pass needs.
  const std::vector<size_t>& decide(const std::vector<CapturedOperator>& captured, const std::vector<size_t>& launches);

  // Returns the bytes of the storages that a recompute pass has yet to make for backward.
  int64_t pending_bytes() const {
    return is_restored ? 0 : forward.pending_bytes;
  }

  // Returns whether its forward has ended.
  bool is_over() const {
    return is_over_;
  }

  // Drops restored tensors that backward has not taken.
  void forget();

  // Saves the captured values that lie in a tensor's memory, since another forward is about to write to that memory.
  virtual void before_write_elsewhere(const at::Tensor& tensor);

  using Inputs = std::vector<std::pair<int32_t, std::shared_ptr<Swapped>>>; // (storage, its swapped input)

  std::shared_ptr<Flow> flow;
  std::shared_ptr<Region> region;
  std::shared_ptr<const Setting> setting; // the region's setting when the forward began
  Forward forward;
  std::shared_ptr<const Tape> tape;
  std::shared_ptr<const PassActions> decisions; // null if the forward is opaque
  std::weak_ptr<Frame> previous; // the frame before this one on its thread, whose backward follows this one's
  Inputs inputs; // only swapped ones
  std::vector<std::shared_ptr<Swapped>> swapped; // captured outputs and inputs, in the order of their copies out
  // tensors of `swapped` that are away and that backward needs; the one needed first is last
  std::vector<std::shared_ptr<Swapped>> todo;
  // former values of held inputs and literals that the forward wrote to, by storage
  std::map<int32_t, std::shared_ptr<Held>> written;
  std::set<int32_t> changing; // given storages that a recompute pass may find changed, without an error
  int64_t input_bytes = 0; // of swapped inputs that no earlier region had swapped
  // number and bytes of the inputs that `input_bytes` counts, and of those that were not swapped since the host was
  // full
  int64_t offered = 0, offered_bytes = 0;
  const int64_t sent_before_bytes; // offloaded by all earlier forwards
  bool writes_input = false; // the forward wrote to a swapped input
  bool recomputes = false; // some saved tensor has to be recomputed
  bool communicates = false; // the recompute pass launches collectives
  bool is_opaque = false;
  bool is_unrepeatable = false; // the module depends on state that cannot be restored, so it never runs again
  // The forward's saved tensors stay on the device: the forward is opaque, and its module cannot run again for one of
  // three reasons. It is unrepeatable. Dispatch modes changed its operators. Or it would launch collectives in which
  // other ranks take no part, if the region is not opaque there.
  bool keeps = false;
  bool is_restored = false; // the recompute pass has run
  std::set<size_t> spared; // collectives, and waits for them, that no recompute pass repeats
  // storages that a recompute pass takes from captures, since a spared collective or a communicating unit filled them
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
  std::shared_ptr<Swapped> input_of(int32_t storage) const; // null if the storage is no swapped input's

  // Makes the current stream wait for the forward's streams, so that it may use `tensor`, which the forward made or
  // found. Returns `tensor`.
  const at::Tensor& ordered(const at::Tensor& tensor) const;

  // Saves the present value of given memory, since an operator is about to write to it for the first time. A recompute
  // pass must find that value in the memory, and must leave the memory as it was before the pass.
  virtual void before_foreign_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Runs a tape's operators by `decisions`, without captures. Throws what `memplug::replay` throws.
  virtual std::vector<at::Tensor> run_again(
      const PassActions& decisions, Bases bases, const std::vector<const Use*>& wanted) = 0;

  // Saves a leaf's gradient before another thread accumulates into it. No operator of the forward shows that write.
  virtual void before_accumulating(const at::Tensor& gradient) = 0;

 private:
  void refill();
  void hold_so_far();
  void close_unread();
  void forget_read();
  // Returns the memory of a given storage, for a pass that runs only operators before `end`. Adds a swapped input to
  // `read`.
  at::Tensor base_of(int32_t storage, size_t end, std::vector<std::shared_ptr<Swapped>>& read);
  struct Capture {
    std::vector<CapturedTensor> parts; // one for each output; none for a collective whose result no backward asks for
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
  // operator that launched a collective, or made the memory that it fills -> operator whose capture has the result
  std::map<size_t, size_t> launches_;
  std::map<int32_t, CapturedTensor> parts_; // captured tensors by storage
  std::vector<StreamRef> streams_; // streams that the forward's operators ran on
  int64_t newest_stream_ = 0; // number of the stream that its last operator ran on
  std::vector<std::shared_ptr<Swapped>> unread_; // swapped inputs that no operator has read
  StreamRef restored_on_; // stream of the last recompute pass
  bool is_over_ = false;
  const std::thread::id thread_ = std::this_thread::get_id(); // the thread that runs the forward
};

} // namespace memplug
