// One forward of a region, operator by operator. While its operators are those of an earlier forward's tape, it follows
// that tape. Once they differ, or if there is no earlier tape, it notes a tape of its own.
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
  at::Tensor tensor; // the first one in this memory that the forward met; undefined if not given, or if swapped
  c10::SmallVector<Count, 1> counts; // of writes to tensors in this memory; none if `tensor` is undefined
  bool had_gradient = false; // `tensor` is a leaf, and had a gradient when the forward met it
  bool noted = false; // `before_accumulating` was called for that gradient
};

// The receiver of a forward's operators while they run. It may run operators of its own, which do not belong to the
// forward.
class Listener {
 public:
  virtual ~Listener() = default;

  // Takes note that an operator is about to run on the current stream.
  virtual void note_stream() = 0;

  // Takes note that the operator of the last `note_stream` uses a tensor.
  virtual void note_use(const at::Tensor& tensor) = 0;

  // Takes note that an operator reads its arguments on the current stream.
  virtual void note_reads(const Record& record) = 0;

  // Takes the time when an operator begins, or with `over` when it ends. Called only if `is_timed`.
  virtual void time(size_t index, bool over) = 0;

  // Saves the present value of memory that the forward is about to write to. The memory is captured, or it is given and
  // the forward has not written to it before.
  virtual void before_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Returns whether an operator's results are to be captured.
  virtual bool wants(size_t index, const Operator& op) const = 0;

  // Captures the results of an operator for which `wants` is true, once it has run. For an exchange, an operator of
  // c10d that writes to its arguments (exchange.h), `results` are these arguments.
  virtual void capture(size_t index, c10::ArrayRef<c10::IValue> results) = 0;

  // Returns whether a tensor's subclass only calls other operators in its own dispatch.
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

  // Registers an input of the region, before the first operator. Returns the number of its storage. If the input is
  // `captured`, no reference to it is kept.
  int32_t enter(const at::Tensor& tensor, bool captured);

  // Returns whether a storage is that of an input of the region.
  bool is_input(int32_t storage) const {
    return storage < entered_;
  }

  // Notes an operator that is about to run. No other operator is noted before its `end`.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Notes the results of the operator that began last.
  void end(c10::ArrayRef<c10::IValue> results);

  // Notes a unit (unit.h) that is about to run. Inside of it only saved tensors are noted.
  void begin_unit(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Notes a unit that has run. Each memory that the unit made, and returned or saved for backward, is noted as an
  // operator `part` that reads `token`. Returns the source of each such memory. `lasting`: tensors that outlive the
  // unit, and that memplug does not free.
  std::vector<Source> end_unit(
      const Operator& part,
      const at::Tensor& token,
      const std::vector<at::Tensor>& returned,
      const std::vector<at::Tensor>& lasting);

  // Ends the unit that began last, since it has raised.
  void fail_unit();

  // A point in a forward: the number of operators begun, tensors saved, and unobserved events so far.
  struct Progress {
    size_t begun, saves, unobserved;
  };
  Progress progress() const {
    return {begun_, saved.size(), unobserved_};
  }

  // Returns whether the code that ran since `since` did something that no operator showed. `given`, `returned`: the
  // tensors among its arguments and results.
  bool hides(
      const Progress& since, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) const;

  // Finds the tensors that code wrote to although no operator was seen to write to them. Returns their indices in
  // `given`, the code's arguments. A tensor counts as written to if its version differs from `versions`, if its bytes
  // differ from `before` (copies of some of the tensors), or if it is in `returned`: an unobserved kernel may have
  // written to it without raising its version. `begun`: number of operators begun before the code ran.
  std::vector<size_t> written_unseen(
      size_t begun,
      const std::vector<at::Tensor>& given,
      const std::vector<uint32_t>& versions,
      const std::vector<at::Tensor>& before,
      const std::vector<at::Tensor>& returned) const;

  // Returns whether an operator after the first `begun` wrote to given memory in which no tensor of `given` lies.
  bool writes_elsewhere(size_t begun, const std::vector<at::Tensor>& given) const;

  // Saves the present values of tensors that lie in given or captured memory, since the code that runs next may write
  // to them unobserved. Skips a tensor that may be unfinished.
  void protect(const std::vector<at::Tensor>& given);

  // Returns whether another stream may still be at work on a tensor: autograd shows that this stream made it, and no
  // operator of the forward has read it. The code that runs next may be the first to wait for that stream, so the
  // tensor cannot be copied before.
  bool may_be_unfinished(const at::Tensor& tensor) const;

  // Takes note of unobserved writes to the tensors at indices `written` of `given`. No tape shows such writes, and
  // captures of the tensors may be stale. Throws if a tensor lies in given memory that was not protected, unless the
  // forward `holds`.
  void blind_to_writes(const std::vector<at::Tensor>& given, const std::vector<size_t>& written);

  // Returns whether an operator after the first `begun` communicates with other ranks.
  bool communicates(size_t begun = 0) const;

  // Returns a tensor that covers all of a tensor's storage, so that one copy serves every view. It is the tensor itself
  // where that covers the storage, else a single row, of the same dtype if the storage is a multiple of it.
  static at::Tensor whole(const at::Tensor& tensor);

  // Returns the bytes of a tensor's elements, in the elements' order. They lie in the tensor's memory, or in a copy.
  static at::Tensor bytes_of(const at::Tensor& tensor);

  // Takes note of an operator's argument whose class is a tensor subclass with a dispatch of its own.
  void meet_subclass(const at::Tensor& tensor) {
    opaque_ |= listener_->is_transparent(tensor) ? 0 : SUBCLASS;
    meet_wrapper(tensor);
  }

  // Takes note of a wrapper, such as a DTensor, that an operator or a function is about to get. Writes raise the
  // wrapper's version counter, not that of the tensor inside, which has the memory.
  void meet_wrapper(const at::Tensor& tensor) {
    if (tensor.is_leaf() && tensor.requires_grad()) { // else the region may have made it
      read(tensor, begun_ + 1, false);
    }
  }

  // Checks an operator that was looked through (observer.h), after it has run. If no operator was noted inside of it,
  // its writes and its results are unobserved. `before`: number of operators begun before it ran.
  void looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results);

  // Notes a tensor that autograd saves for backward. `held`: keep the tensor itself. Autograd saves an operator's own
  // result before the operator ends.
  void save(const at::Tensor& tensor, bool held);

  // Marks a storage as captured, until the forward writes to it. `whole`: all of its rows are captured. `kept`: on the
  // device.
  void set_captured(int32_t storage, bool whole, bool kept, at::ScalarType dtype);

  // Ends the forward and returns its tape.
  std::shared_ptr<const Tape> close();

  // Decides how each saved tensor is restored, after `close`. `direct`: as a view of its capture, if that has all rows.
  void sort(bool direct);

  // Drops `Saved::kept` of all saved tensors.
  void let_go();

  // Returns the tape of the forward so far. It is opaque if the forward did more than its operators show.
  std::shared_ptr<const Tape> so_far() const;

  // Keeps a saved tensor that was recomputed during the forward. From now on an operator that reads this tensor counts
  // as a reader of the original's storage.
  void keep(size_t index, const at::Tensor& tensor);

  // Stores a saved tensor that a recompute pass restored.
  void restore(size_t index, const at::Tensor& tensor);

  // Returns a restored tensor for backward, and drops it here. Throws if the tensor was written to after the pass.
  at::Tensor take(size_t index);

  // Holds a tensor that backward received, as long as backward may ask for it again. A custom function may read
  // `ctx.saved_tensors` several times. Only the first time takes the tensor from its capture or from the pass.
  void hold(size_t index, const at::Tensor& tensor);

  // Returns the tensor that `hold` holds; undefined if there is none. Throws if the tensor was written to since `hold`.
  at::Tensor held_again(size_t index) const;

  // Returns given memory for a recompute pass that runs no operator from `end` on. Throws if the memory is gone, or was
  // written to after the forward. `changes`: the region itself writes to the memory, so writes are no error.
  at::Tensor given_again(int32_t storage, bool regathered, bool changes, size_t end) const;

  // Takes note that the running code reads a tensor without an operator: it took the tensor's address, or a function
  // got the tensor as an argument.
  void read(const at::Tensor& tensor) {
    read(tensor, begun_, false);
  }

  // Takes note that the unit that is about to begin reads a parameter.
  void read_in_unit(const at::Tensor& tensor) {
    read(tensor, begun_ + 1, true);
  }

  // Takes note that `inner`, a nested forward that has run, may have read all memory given to it.
  void read(const Forward& inner);

  // Throws if a tensor that was read without an operator has been written to after the forward. Called for a pass that
  // runs no operator from `end` on; later reads do not matter to it.
  void check_read(size_t end) const;

  // Looks for memory that saved tensor `index` may have been computed from and that was written to after the forward. A
  // pass that runs the module again cannot restore such a tensor. Returns the memory's count of writes; null if there
  // is no such memory. The forward's own writes do not matter: they are undone for the pass.
  const Count* changed(size_t index) const;

  // Marks each saved tensor that a pass that runs the module again cannot restore (`changed`). Called before the pass,
  // which may repeat the forward's writes.
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
    at::Tensor held; // the tensor itself, if `save` was told so or no tape can describe it
    // The tensor itself, if the forward `holds` or `holds_meanwhile`. If the frame `keeps`, backward gets this tensor
    // instead of a recomputed one.
    at::Tensor kept;
    c10::VariableVersion counter;
    uint32_t version = 0;
    int64_t largest_bytes = 0; // of the largest storage saved up to this tensor; backward still has to read these
    bool alive = true; // backward may still ask for it
    bool in_unit = false; // a unit saved it, and kernels of the unit's backward may write over it
    bool written = false;
    bool stale = false; // a pass that runs the module cannot restore it
    Way way = Way::HELD;
    at::Tensor restored; // from a recompute pass, until backward takes it
    uint32_t restored_version = 0;
    int64_t restored_bytes = 0; // as added to the ledger; a dying frame subtracts it without asking the tensor
    at::Tensor taken; // what a backward that does not keep its graph got, until its autograd node is done
    uint32_t taken_version = 0;
  };
  Storages storages;
  bool holds = false; // keeps each tensor that autograd saves, in `Saved::kept`
  bool holds_meanwhile = false; // keeps them until the forward is over, since it may ask for a gradient itself
  std::vector<Saved> saved;
  std::vector<GivenMemory> given; // by storage
  std::vector<std::vector<GeneratorDraw>> drawn; // for each operator that draws random numbers, in order

  // Bytes of the storages that backward asks for: of all, of those not captured, of captured ones that stay on the
  // device, and of the largest one.
  int64_t saved_bytes = 0, pending_bytes = 0, kept_bytes = 0, largest_saved_bytes = 0;

  // Returns whether a storage is a literal (literals.cpp). Literals are given, although an operator requested them.
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
  int32_t meet(const at::Tensor& tensor, size_t met); // a storage without a number becomes a given one
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

  // Returns the operator that returned a storage, if no operator before `end` reads the storage; else null.
  const Record* only_user(int32_t storage, size_t end) const;
  // Returns whether operator `index` copies memory that no operator was seen to fill. The copy may become a literal.
  bool copies_blank(size_t index) const;
  // Returns the operators that made the literal which operator `index` returns in `storage`. Returns none if it is no
  // literal, or if literals would then exceed their limit.
  std::vector<size_t> makers_of_literal(int32_t storage, size_t index) const;
  // Handles operator `index`, which returns a tensor that torch made by itself: it may be a literal.
  void lift(size_t index, const at::Tensor& tensor);
  // Corrects records copied from another forward's tape. Where a literal of that forward is none in this one, an
  // operator made the storage.
  void unlift(std::vector<Record>& records) const;

  std::vector<std::shared_ptr<const Tape>> known_;
  Listener* listener_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<const Tape> followed_;
  std::shared_ptr<Tape> noted_;
  int32_t entered_ = 0; // number of storages of region inputs, which come first
  size_t begun_ = 0;
  bool running_ = false; // the last operator has begun, and not ended
  uint32_t opaque_ = 0; // bits of `Opaque`
  size_t unobserved_ = 0; // number of unobserved events that made the forward opaque

  std::vector<Count> read_; // of tensors that were read without an operator
  // by storage: whether `Listener::before_write` was called for it; whether `saved_bytes` counts it
  std::vector<bool> own_, counted_;
  struct CapturedStorage {
    uint8_t rows = NOT;
    bool kept = false; // on the device
    at::ScalarType dtype = at::kFloat;
  };
  std::vector<CapturedStorage> captured_;
  std::vector<FoundTensor> found_;
  std::vector<int32_t> made_;
  std::vector<c10::IValue> exchanged_; // tensors that the running exchange writes to
  // tensors, and their storages, that autograd saved while the operator that makes them was running
  std::vector<std::pair<int32_t, at::Tensor>> saved_early_;
  std::vector<int32_t> literals_; // storages that are literals
  int64_t literal_bytes_ = 0; // of all literals
  std::vector<int32_t> stale_; // storages that an unobserved kernel may have changed after they were captured
  std::optional<size_t> unit_saves_; // number of tensors saved before the running unit began
};

} // namespace memplug
