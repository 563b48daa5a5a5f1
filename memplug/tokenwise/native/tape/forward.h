// One forward of a region, operator by operator. While the operators are the same as in an earlier forward, it follows
// the tape of that forward. Once they differ, or without an earlier tape, it notes a tape of its own.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <vector>

#include "ledger.h"
#include "source.h"
#include "storages.h"
#include "tape.h"
#include "torch_private.h"
#include "versions.h"

namespace memplug {

// A random generator, and its state before an operator drew from it.
struct GeneratorDraw {
  at::Generator generator;
  at::Tensor state;
};

// Given memory: it existed before the region's forward, or is a literal (literals.cpp).
struct GivenMemory {
  // the first tensor in this memory that the forward met; undefined if the storage is not given, or is swapped
  at::Tensor tensor;
  c10::SmallVector<Count, 1> counts; // version counters of tensors in this memory; none if `tensor` is undefined
  bool had_gradient = false; // `tensor` is a leaf, and had a gradient when the forward met it
  bool noted = false; // `before_accumulating` was called for that gradient
};

// The interface that a `Forward` calls while its operators run; `Frame` implements it. Operators that the listener
// itself runs do not belong to the forward.
class Listener {
 public:
  virtual ~Listener() = default;

  // Notes that an operator is about to run on the current stream.
  virtual void note_stream() = 0;

  // Notes that the operator of the last `note_stream` uses a tensor.
  virtual void note_use(const at::Tensor& tensor) = 0;

  // Notes that an operator reads its arguments on the current stream.
  virtual void note_reads(const Record& record) = 0;

  // Records the time at which operator `index` begins, or ends if `over`. Called only if `is_timed`.
  virtual void time(size_t index, bool over) = 0;

  // Saves the present value of memory that the forward is about to write to. Called before a write to captured memory,
  // and before the first write to given memory.
  virtual void before_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Returns whether an operator's results are to be captured.
  virtual bool wants(size_t index, const Operator& op) const = 0;

  // Captures the results of an operator that has run, and for which `wants` is true. For an exchange (exchange.h),
  // `results` are the arguments that it wrote to.
  virtual void capture(size_t index, c10::ArrayRef<c10::IValue> results) = 0;

  // Returns whether the `__torch_dispatch__` of a tensor's class only calls other operators.
  virtual bool is_transparent(const at::Tensor& tensor) = 0;

  bool is_timed = false;
};

class Forward {
 public:
  // `known`: tapes that the forward may follow, the likeliest first. `regathered`: see `Storages`.
  Forward(
      std::vector<std::shared_ptr<const Tape>> known,
      Listener* listener,
      Storages::Regathered regathered,
      std::shared_ptr<Ledger> ledger);
  ~Forward();

  // Registers an input of the region, before the first operator. Returns the number of its storage. `captured`: the
  // frame captures the input, so the forward holds no reference to it.
  int32_t enter(const at::Tensor& tensor, bool captured);

  // Returns whether a storage is that of an input of the region.
  bool is_input(int32_t storage) const {
    return storage < entered_;
  }

  // Notes an operator that is about to run. No other operator is noted before its `end`.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Notes the results of the operator that began last.
  void end(c10::ArrayRef<c10::IValue> results);

  // Notes a unit (unit.h) that is about to run. Inside of the unit the forward notes only saved tensors.
  void begin_unit(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Notes the end of a unit. `token`: the result of the unit's operator. For each memory that the unit made, and either
  // returned or saved for backward, notes an operator `part` that reads `token`. Returns the parts' sources. `lasting`:
  // tensors that outlive the unit's call, so that memplug must not free them.
  std::vector<Source> end_unit(
      const Operator& part,
      const at::Tensor& token,
      const std::vector<at::Tensor>& returned,
      const std::vector<at::Tensor>& lasting);

  // Ends the unit that began last, after it has raised.
  void fail_unit();

  // A point in a forward: the numbers of operators begun, of tensors saved, and of unobserved events (counted by
  // `blind`) so far.
  struct Progress {
    size_t begun, saves, unobserved;
  };
  Progress progress() const {
    return {begun_, saved.size(), unobserved_};
  }

  // Returns whether the code that ran since `since` launched kernels that no operator shows: it returned memory that no
  // operator made, used memory that no operator filled, or caused an unobserved event. `given`, `returned`: the tensors
  // among the code's arguments and results.
  bool hides(
      const Progress& since, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) const;

  // Returns the indices of the tensors in `given`, a function's arguments, that the function wrote to without an
  // operator. `begun`: number of operators begun before the function ran.
  //
  // Skips arguments to which an operator wrote. The function wrote to another argument if its version differs from that
  // in `versions`, or if its bytes differ from those in `before`, which has copies of some arguments. An argument that
  // is also in `returned`, the function's results, counts as written to, since an unobserved kernel may write without
  // raising the version.
  std::vector<size_t> written_unseen(
      size_t begun,
      const std::vector<at::Tensor>& given,
      const std::vector<uint32_t>& versions,
      const std::vector<at::Tensor>& before,
      const std::vector<at::Tensor>& returned) const;

  // Returns whether any operator but the first `begun` ones wrote to given memory other than that of the tensors in
  // `given`.
  bool writes_elsewhere(size_t begun, const std::vector<at::Tensor>& given) const;

  // Saves the present values of tensors that lie in given or captured memory, since the code that runs next may write
  // to them unobserved. Skips tensors for which `may_be_unfinished` is true.
  void protect(const std::vector<at::Tensor>& given);

  // Returns whether another stream may still be writing a tensor: autograd's graph says that another stream made it,
  // and no operator of the forward has read it. The code that runs next may be the first to wait for that stream, so
  // memplug cannot copy the tensor yet.
  bool may_be_unfinished(const at::Tensor& tensor) const;

  // Marks the forward as opaque, since code wrote to the tensors at indices `written` of `given` without an operator.
  // Captures of these tensors may be stale. Throws if one of them lies in given memory that `protect` has not saved,
  // unless the forward holds all saved tensors (`holds`).
  void blind_to_writes(const std::vector<at::Tensor>& given, const std::vector<size_t>& written);

  // Returns whether any operator but the first `begun` ones communicates with other ranks.
  bool communicates(size_t begun = 0) const;

  // Returns a tensor that covers all of `tensor`'s storage, so that one copy serves every view: `tensor` itself if it
  // covers the storage, else a single row. The row's dtype is that of `tensor` if its item size divides the storage,
  // else bytes.
  static at::Tensor whole(const at::Tensor& tensor);

  // Returns a tensor's elements as a 1-D tensor of bytes: a view if the tensor is contiguous, else a copy.
  static at::Tensor bytes_of(const at::Tensor& tensor);

  // Notes an operator's argument whose class is a tensor subclass with its own `__torch_dispatch__`.
  void meet_subclass(const at::Tensor& tensor) {
    opaque_ |= listener_->is_transparent(tensor) ? 0 : SUBCLASS;
    meet_wrapper(tensor);
  }

  // Notes a wrapper, such as a DTensor, that an operator or a function is about to read. memplug checks the wrapper's
  // own version counter, since a write does not raise that of the inner tensor, which has the memory.
  void meet_wrapper(const at::Tensor& tensor) {
    // skip all but parameters, since the region may have made the wrapper itself
    if (tensor.is_leaf() && tensor.requires_grad()) {
      read(tensor, begun_ + 1, false);
    }
  }

  // Checks a composite operator (`What::THROUGH` in observer.h) that has run. If no operator was noted inside of it,
  // its writes and results are unobserved. `before`: number of operators begun before it ran.
  void looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results);

  // Notes a tensor that autograd saves for backward. The tensor may be a result of the running operator, which has not
  // ended yet. `held`: hold the tensor itself, in `Saved::held`.
  void save(const at::Tensor& tensor, bool held);

  // Marks a storage as captured, until the forward writes to it. `whole`: all rows are captured. `kept`: the capture
  // stays on the device.
  void set_captured(int32_t storage, bool whole, bool kept, at::ScalarType dtype);

  // Ends the forward and returns its tape.
  std::shared_ptr<const Tape> close();

  // Decides how each saved tensor is restored. Called after `close`. `direct`: a tensor whose capture has all rows may
  // be restored as a view of that capture.
  void sort(bool direct);

  // Drops `Saved::kept` of all saved tensors.
  void let_go();

  // Returns the tape of the forward so far. It is opaque if the forward did more than its operators show.
  std::shared_ptr<const Tape> so_far() const;

  // Stores `tensor`, which is saved tensor `index` recomputed during the forward, as `Saved::kept`. From now on an
  // operator that reads `tensor` counts as a reader of the saved tensor's storage.
  void keep(size_t index, const at::Tensor& tensor);

  // Stores a saved tensor that a recompute pass restored.
  void restore(size_t index, const at::Tensor& tensor);

  // Returns a restored tensor for backward, and drops this forward's reference. Throws if the tensor was written to
  // after the recompute pass.
  at::Tensor take(size_t index);

  // Holds a tensor that backward has received, as long as backward may ask for it again. A custom function may read
  // `ctx.saved_tensors` several times; only the first read gets the tensor from its capture or from the recompute pass.
  void hold(size_t index, const at::Tensor& tensor);

  // Returns the tensor that `hold` holds; undefined if there is none. Throws if the tensor was written to after `hold`.
  at::Tensor held_again(size_t index) const;

  // Returns given memory for a recompute pass that runs only operators before `end`. Throws if the memory is gone, or
  // was written to after the forward. `changes`: the region itself writes to the memory, so writes are no error.
  at::Tensor given_again(int32_t storage, bool regathered, bool changes, size_t end) const;

  // Notes that the running code may read a tensor without an operator: it took the tensor's address, read its values
  // from Python, or passed it to a function that may launch hidden kernels.
  void read(const at::Tensor& tensor) {
    read(tensor, begun_, false);
  }

  // Notes that the unit that is about to begin reads a parameter.
  void read_in_unit(const at::Tensor& tensor) {
    read(tensor, begun_ + 1, true);
  }

  // Notes that `inner`, a nested forward that has run, may have read all of its own given memory.
  void read(const Forward& inner);

  // Throws if a tensor that was read without an operator has been written to after the forward. Ignores reads after
  // operator `end`, where the recompute pass stops.
  void check_read(size_t end) const;

  // Looks for memory from which saved tensor `index` may have been computed, and that was written to after the forward.
  // Returns the version counter of such memory, or null. If there is any, a pass that runs the module again cannot
  // restore the tensor. Ignores the forward's own writes, which are undone for the pass.
  const Count* changed(size_t index) const;

  // Marks as `stale` the saved tensors for which `changed` finds a write. Called before a pass that runs the module
  // again, since the pass may repeat the forward's writes, which `changed` would find too.
  void note_stale();

  // Drops a restored tensor that backward has not taken.
  void forget(size_t index);

  // Marks the forward as opaque.
  void blind(uint32_t reasons) {
    opaque_ |= reasons;
    unobserved_ += (reasons & (UNOBSERVED | NESTED)) != 0 ? 1 : 0;
  }
  size_t begun() const {
    return begun_;
  }
  const std::shared_ptr<const Tape>& followed() const { // null if the forward notes its own tape
    return followed_;
  }
  Ledger& ledger() {
    return *ledger_;
  }
  const Tape& tape() const { // complete only after `close`
    return followed_ != nullptr ? *followed_ : *noted_;
  }

  // How a saved tensor is restored: it was held all the time, is a view of a capture, or is recomputed.
  enum class Way : uint8_t { HELD, VIEW, RECOMPUTED };

  // A saved tensor. `written`: the forward wrote to it after it was saved, which autograd forbids.
  struct Saved {
    Use use;
    at::Tensor held; // the tensor itself, if `save` was called with `held`, or if no tape can describe the tensor
    // The tensor itself, if the forward `holds` or `holds_meanwhile`. If `Frame::keeps` is set, backward gets this
    // tensor instead of a recomputed one.
    at::Tensor kept;
    c10::VariableVersion counter;
    uint32_t version = 0;
    // bytes of the largest storage among this saved tensor and all earlier ones: backward goes in reverse, so when it
    // asks for this tensor, it has yet to read all of them
    int64_t largest_bytes = 0;
    bool alive = true; // backward may still ask for the tensor
    bool in_unit = false; // a unit saved the tensor, and kernels of the unit's backward may write over it
    bool written = false;
    bool stale = false; // a pass that runs the module again cannot restore it (`note_stale`)
    Way way = Way::HELD;
    at::Tensor restored; // the tensor from a recompute pass, until backward takes it
    uint32_t restored_version = 0;
    // bytes that were added to the ledger for `restored`, so that the same number is subtracted later
    int64_t restored_bytes = 0;
    // the tensor that backward received, until the autograd node that saved it has run (see `hold`); undefined if
    // backward keeps its graph
    at::Tensor taken;
    uint32_t taken_version = 0;
  };
  Storages storages;
  bool holds = false; // store in `Saved::kept` each tensor that autograd saves
  bool holds_meanwhile = false; // the same until the forward ends, since it may ask for a gradient itself
  std::vector<Saved> saved;
  std::vector<GivenMemory> given; // for each storage; empty if the storage is not given
  std::vector<std::vector<GeneratorDraw>> drawn; // for each operator that draws random numbers, in program order

  // Bytes of storages that backward needs. A given storage counts only if it is captured. `saved_bytes`: all these
  // storages. `pending_bytes`: those that are not captured. `kept_bytes`: those that are captured and kept on the
  // device. `largest_saved_bytes`: the largest one.
  int64_t saved_bytes = 0, pending_bytes = 0, kept_bytes = 0, largest_saved_bytes = 0;

  // Returns whether a storage is a literal (literals.cpp), which counts as given although an operator requested it.
  bool is_literal(int32_t storage) const;

  bool is_captured(int32_t storage) const {
    return static_cast<size_t>(storage) < captured_.size() && captured_[storage].rows != NOT;
  }
  uint32_t opaque() const {
    return opaque_ | tape().opaque;
  }

 private:
  // A tensor among the present operator's arguments or results.
  struct FoundTensor {
    ArgumentPath path;
    int32_t storage;
    const at::Tensor* tensor;
  };
  enum : uint8_t { NOT, PART, WHOLE };

  int32_t number(const at::Tensor& tensor, bool given);
  // Returns the number of a tensor's storage. A storage that has none gets one, as given memory.
  int32_t meet(const at::Tensor& tensor, size_t met);
  void count(GivenMemory& memory, const at::Tensor& tensor, size_t met);
  void give(int32_t storage, const at::Tensor& tensor, size_t met);
  void close_counts();
  void read(const at::Tensor& tensor, size_t met, bool in_unit);
  void find_arguments(c10::ArrayRef<c10::IValue> arguments);
  bool find_results(c10::ArrayRef<c10::IValue> results, const Record& record);
  bool is_same(const Operator& op, c10::ArrayRef<c10::IValue> arguments, const Record& record) const;
  bool is_same_uses(const std::vector<Use>& uses) const;
  void check_writes(const Record& record) const;
  Record note(const Operator& op, c10::ArrayRef<c10::IValue> arguments) const;
  void note_results(Record& record) const;
  void classify(Record& record);
  bool follow_another(const Operator& op, c10::ArrayRef<c10::IValue> arguments);
  std::shared_ptr<Tape> copied(size_t records) const;
  void describe(Tape& own) const;
  void depart(size_t records);
  void count(int32_t storage);

  // -- literals.cpp

  // Returns the last operator before `end` that returned a storage. Returns null if it, or any operator between it and
  // `end`, reads the storage.
  const Record* only_user(int32_t storage, size_t end) const;
  // Returns whether operator `index` copies memory that no operator has filled. The copy may become a literal.
  bool copies_blank(size_t index) const;
  // If operator `index` returns a literal in `storage`, returns the operators that made it. Returns none if the storage
  // is no literal, or if the forward's literals would exceed their limit.
  std::vector<size_t> makers_of_literal(int32_t storage, size_t index) const;
  // Marks `tensor`, which operator `index` returned, as a literal if torch made it from Python values.
  void lift(size_t index, const at::Tensor& tensor);
  // Corrects records that were copied from another forward's tape. Lets recompute passes run operators that made a
  // literal in that forward, but do not make one in this forward.
  void unlift(std::vector<Record>& records) const;

  std::vector<std::shared_ptr<const Tape>> known_;
  Listener* listener_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<const Tape> followed_;
  std::shared_ptr<Tape> noted_;
  int32_t entered_ = 0; // number of storages of the region's inputs, which are numbered first
  size_t begun_ = 0;
  bool running_ = false; // the last operator has not ended
  uint32_t opaque_ = 0; // bits of `Opaque`
  size_t unobserved_ = 0; // number of unobserved events that made the forward opaque

  std::vector<Count> read_; // version counters of tensors that were read without an operator
  // by storage. `own_`: `Listener::before_write` was called for it. `counted_`: `saved_bytes` includes it.
  std::vector<bool> own_, counted_;
  struct CapturedStorage {
    uint8_t rows = NOT;
    bool kept = false; // the capture stays on the device
    at::ScalarType dtype = at::kFloat;
  };
  std::vector<CapturedStorage> captured_;
  std::vector<FoundTensor> found_;
  std::vector<int32_t> made_;
  std::vector<c10::IValue> exchanged_; // tensors that the running exchange writes to
  // (storage, tensor) of each tensor that autograd saved while an operator was running, and that this operator may have
  // made
  std::vector<std::pair<int32_t, at::Tensor>> saved_early_;
  std::vector<int32_t> literals_;
  int64_t literal_bytes_ = 0;
  std::vector<int32_t> stale_; // storages that an unobserved kernel may have changed after they were captured
  std::optional<size_t> unit_saves_; // number of tensors saved before the running unit began
};

} // namespace memplug
