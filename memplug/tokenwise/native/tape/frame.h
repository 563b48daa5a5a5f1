// Frames: capture outputs of a region's operators in forward, and give autograd the saved tensors in backward.
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

// A captured tensor that stays on the device: it is small, the plan keeps it, or host memory is full.
struct KeptTensor {
  explicit KeptTensor(const at::Tensor& tensor) : tensor(alias_of(tensor)), version(version_of(tensor)) {}

  // Replaces the tensor by a copy, since an operator is about to write to the original in place.
  void before_write();
  // Returns the tensor with its captured value. Throws `KEPT_WAS_WRITTEN` if it was written to without `before_write`.
  const at::Tensor& get() const;
  // Returns the tensor for a recompute pass: a copy if the forward wrote to the tensor, since the pass may write to it
  // too.
  at::Tensor fresh() const;

  at::Tensor tensor;
  uint32_t version;
  bool written = false; // `before_write` was called
  bool viewed = false; // backward reads the tensor without a recompute pass
};

// A tensor that a recompute pass needs with its value from the start of the forward: an input that is not swapped, or a
// literal that the forward wrote to.
struct Held {
  // `itself`: hold `value` itself (a parameter), and not an alias of it without a graph. Code that shards or offloads
  // parameters exchanges the memory behind the tensor, and an alias would keep the old memory.
  Held(const at::Tensor& value, bool itself);

  // Replaces the tensor by a copy, since an operator is about to write to the original in place.
  void before_write();
  // Returns the tensor. Throws autograd's error for in-place writes if it was written to without `before_write`.
  const at::Tensor& get() const;
  // Returns a copy that a recompute pass may write to, as the forward did.
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
  // Returns whether backward reads the tensor directly, without a recompute pass. Valid after `Frame::close`.
  bool is_viewed() const {
    return kept != nullptr ? kept->viewed : swapped->uses > 0;
  }
};

// Copies all of a tensor's storage, and returns the tensor with the same layout in the copy. The geometry of any view
// of the old storage is valid in the copy too.
at::Tensor copy_of(const at::Tensor& tensor);

// One forward of one region in one autograd graph, with its captured tensors. A frame lives as long as its graph, so
// several frames can be in flight, and backward can run more than once. Guarded by Python's lock, except while the
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
  // tensor. `direct`: backward gets a saved tensor straight from its capture, without a recompute pass, if the capture
  // has all rows.
  void close(bool direct);

  // -- between

  // Releases the device memory of all swapped tensors, ordered after their copies out.
  void release();

  // Releases swapped tensors, in the order in which their copies out end, until `nbytes` are free. So no stream waits
  // for the copy of a tensor that stays. Returns false, and releases nothing, if it would have to release all tensors,
  // or if their copies have not been queued.
  bool release_first(int64_t nbytes);

  // -- backward

  // Records the time at which backward first asks for a saved tensor. Called only for a timed forward; later calls do
  // nothing.
  virtual void begin_backward() = 0;

  // Runs the recompute pass, which restores all saved tensors that have to be recomputed. Called once in each backward,
  // when autograd first asks for such a tensor.
  virtual void restore() = 0;

  // Runs the recompute pass for saved tensor `index` on the current stream, which then owns all restored tensors.
  // Throws for an opaque region if memory that the tensor may be computed from was written to after the forward.
  void restore_here(size_t index);

  // Returns a restored tensor for use on the current stream. Throws if it was written to after the recompute pass.
  at::Tensor take(size_t index);

  // Adds the region's name and advice to Python's pending error. The error, such as an in-place write or out of memory,
  // was raised while backward asked for a tensor.
  virtual void explain() = 0;

  // Returns a saved tensor that the forward itself needs for a gradient (again.cpp). Throws `ASKED_EARLY` if memplug
  // neither holds the tensor nor can recompute it.
  at::Tensor early(size_t index);

  // Returns the tensors of `uses` as they were after the last operator of `own_tape`, recomputed from given memory
  // (forward.h) alone: captured outputs are neither read nor released. Returns none if a tensor cannot be recomputed,
  // for instance because ranks would have to communicate. `own_tape`: a tape of this forward, which must not be opaque.
  std::optional<std::vector<at::Tensor>> again(
      const std::shared_ptr<const Tape>& own_tape, const std::vector<Use>& uses);

  // Returns a saved tensor as a view of its capture. Returns a copy instead if backward's kernels may write to it while
  // the capture is still needed.
  at::Tensor view(size_t index);

  // Returns a saved tensor that lies in given memory. Returns a copy instead if backward's kernels may write to the
  // memory while the recompute pass, or another region with the same input, may still read it. Never copies a
  // parameter.
  at::Tensor given(size_t index) const;

  // A recompute pass: the saved tensors that it restores, and the memory that it reads. Parts of the autograd graph,
  // with their saved tensors, may die while the pass runs.
  struct Restoration {
    std::vector<size_t> indices; // indices of the saved tensors that the pass restores
    std::vector<const Use*> wanted; // the same tensors, as the tape describes them
    std::vector<std::shared_ptr<Swapped>> inputs; // swapped inputs that the pass reads
    Bases bases; // given memory, swapped inputs included
  };

  Restoration begin_pass();

  // Stores the tensors that the pass restored, and counts its reads of swapped inputs.
  void end_pass(const Restoration& pass, const std::vector<at::Tensor>& found);

  // Returns the captured results of an operator.
  Substitute substitute(size_t index);

  // Counts one read of a swapped tensor. After the last read in this backward, drops the tensor's device memory. If
  // backward keeps its graph, a tensor without a copy on the host stays.
  void consume(const std::shared_ptr<Swapped>& part);

  // Decides the recompute pass's action for each operator (`decisions`). Returns the operators whose captured results
  // the pass needs. `captured`, `launches`: as in `actions_of`, in program order.
  const std::vector<size_t>& decide(const std::vector<CapturedOperator>& captured, const std::vector<size_t>& launches);

  // Returns the bytes of the saved storages that a recompute pass has yet to make.
  int64_t pending_bytes() const {
    return is_restored ? 0 : forward.pending_bytes;
  }

  bool is_over() const {
    return is_over_;
  }

  // Drops restored tensors that backward has not taken.
  void forget();

  // Saves the values of captured tensors that lie in the memory of `tensor`, since another forward is about to write to
  // it.
  virtual void before_write_elsewhere(const at::Tensor& tensor);

  using Inputs = std::vector<std::pair<int32_t, std::shared_ptr<Swapped>>>; // (storage, its swapped input)

  std::shared_ptr<Flow> flow;
  std::shared_ptr<Region> region;
  std::shared_ptr<const Setting> setting; // the region's setting at the start of the forward
  Forward forward;
  std::shared_ptr<const Tape> tape;
  std::shared_ptr<const PassActions> decisions; // null if the forward is opaque
  // the frame whose forward ran before this one's on the same thread; its backward comes next
  std::weak_ptr<Frame> previous;
  Inputs inputs; // swapped inputs
  std::vector<std::shared_ptr<Swapped>> swapped; // captured outputs and inputs, in the order of their copies out
  // tensors of `swapped` that only the host has and that backward needs; the one needed first is last
  std::vector<std::shared_ptr<Swapped>> todo;
  // former values of held inputs and literals that the forward wrote to, by storage
  std::map<int32_t, std::shared_ptr<Held>> written;
  std::set<int32_t> changing; // given storages whose versions are not checked, since the forward wrote to them
  int64_t input_bytes = 0; // bytes of swapped inputs that no earlier region had swapped
  // number and bytes of the inputs that the frame tried to swap and that no earlier region had swapped
  int64_t offered = 0, offered_bytes = 0;
  const int64_t sent_before_bytes; // bytes offloaded before this forward began
  bool writes_input = false; // the forward wrote to a swapped input
  bool recomputes = false; // some saved tensor has to be recomputed
  bool communicates = false; // the recompute pass launches collectives
  bool is_opaque = false;
  bool is_unrepeatable = false; // the module depends on state that cannot be restored, so it never runs again
  // The forward's saved tensors stay on the device: the forward is opaque, and its module cannot run again. There are
  // three possible reasons: the module is unrepeatable; dispatch modes changed its operators; or it launches
  // collectives, which ranks where the region is not opaque would not launch again.
  bool keeps = false;
  bool is_restored = false; // the recompute pass has run
  std::set<size_t> spared; // operators that launch a collective, or wait for one, and that no recompute pass repeats
  // storages that a collective of `spared`, or a communicating unit, has filled; a recompute pass gets them from
  // captures
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
  std::shared_ptr<Swapped> input_of(int32_t storage) const; // null if the storage is not that of a swapped input

  // Makes the current stream wait for all streams of the forward, which have used `tensor`. Returns `tensor`.
  const at::Tensor& ordered(const at::Tensor& tensor) const;

  // Saves the present value of given memory before the forward's first write to it. A recompute pass puts this value
  // back into the memory, and at its end restores the value that it found there.
  virtual void before_foreign_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Runs a tape's operators by `decisions`, which substitutes no captures. Throws like `memplug::replay`.
  virtual std::vector<at::Tensor> run_again(
      const PassActions& decisions, Bases bases, const std::vector<const Use*>& wanted) = 0;

  // Saves a leaf's gradient before another thread accumulates into it. No operator of the forward shows that write.
  virtual void before_accumulating(const at::Tensor& gradient) = 0;

 private:
  void refill();
  void hold_so_far();
  void close_unread();
  void forget_read();
  // Returns the memory of a given storage, for a pass that runs only operators before `end`. If the storage is that of
  // a swapped input, adds the input to `read`.
  at::Tensor base_of(int32_t storage, size_t end, std::vector<std::shared_ptr<Swapped>>& read);
  struct Capture {
    std::vector<CapturedTensor> parts; // one for each output; empty for a collective whose result no backward asks for
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
  std::vector<int32_t> storages_of(const std::vector<size_t>& indices) const;
  std::vector<CapturedOperator> captured() const;
  std::vector<size_t> launches() const;

  std::map<size_t, Capture> captures_; // captured outputs, by index of their operator
  // (index of an operator that a pass skips, index of the operator whose capture has the result). The skipped one
  // launched a collective, or made the memory that an exchange (exchange.h) fills.
  std::map<size_t, size_t> launches_;
  std::map<int32_t, CapturedTensor> parts_; // captured tensors by storage
  std::vector<StreamRef> streams_; // streams that the forward's operators ran on
  int64_t newest_stream_ = 0; // number of the stream that the forward's last operator ran on
  std::vector<std::shared_ptr<Swapped>> unread_; // swapped inputs that no operator has read
  StreamRef restored_on_; // stream of the last recompute pass
  bool is_over_ = false;
  const std::thread::id thread_ = std::this_thread::get_id(); // the thread that runs the forward
};

} // namespace memplug
