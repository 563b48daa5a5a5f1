// One forward of a region. It follows the tape of an earlier one as long as it does the same; else it notes a tape of
// its own.
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

// A generator, and its state before an operator drew from it.
struct GeneratorDraw {
  at::Generator generator;
  at::Tensor state;
};

// Memory that existed before the region, or that has Python's values (literals.cpp): the first tensor of it that the
// forward met, and the counts of writes to this and other tensors of it at the end of the forward.
struct GivenMemory {
  at::Tensor tensor; // undefined if the region made it, or it was swapped
  c10::SmallVector<Count, 1> counts; // none if the tensor is undefined
  bool had_gradient = false; // a leaf that had one when it was met
  bool noted = false; // `before_accumulating` was called for that gradient
};

// The receiver of a forward's operators while they run. It may run operators of its own, which do not belong to the
// forward.
class Listener {
 public:
  virtual ~Listener() = default;

  // Takes note that an operator is about to run on the current stream.
  virtual void note_stream() = 0;

  // Takes note that this operator uses a tensor there.
  virtual void note_use(const at::Tensor& tensor) = 0;

  // Takes note that an operator reads its arguments on the current stream.
  virtual void note_reads(const Record& record) = 0;

  // Takes the time as an operator begins, or with `over` as it ends. Called if `is_timed`.
  virtual void time(size_t index, bool over) = 0;

  // Saves the present value of memory that is about to be written to. The memory is captured, or it was given and the
  // forward has not written to it before.
  virtual void before_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Returns whether an operator's results are to be captured.
  virtual bool wants(size_t index, const Operator& op) const = 0;

  // Captures such an operator once it has run; for an exchange, `results` are the tensors that it wrote to.
  virtual void capture(size_t index, c10::ArrayRef<c10::IValue> results) = 0;

  // Returns whether a subclass's own dispatch only calls other operators.
  virtual bool is_transparent(const at::Tensor& tensor) = 0;

  bool is_timed = false;
};

class Forward {
 public:
  // `known`: tapes that it may follow, the likeliest first. `regathered`: may be null.
  Forward(
      std::vector<std::shared_ptr<const Tape>> known,
      Listener* listener,
      Storages::Regathered regathered,
      std::shared_ptr<Ledger> ledger);
  ~Forward();

  // Registers a region input, before the first operator, and returns its number. A captured one is not kept by
  // reference.
  int32_t enter(const at::Tensor& tensor, bool captured);

  // Returns whether a storage is a region input's.
  bool is_input(int32_t storage) const {
    return storage < entered_;
  }

  // Notes an operator that is about to run. Nothing else begins before it ends.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Notes the results of that operator.
  void end(c10::ArrayRef<c10::IValue> results);

  // Notes a unit (unit.h) that begins. Nothing inside of it is noted, except saved tensors.
  void begin_unit(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Notes a unit that has run. Each memory that it made, and that it returned or saved, is noted as an operator `part`
  // that reads the token. Returns where each of them comes from. `lasting`: tensors that outlive the unit, and are not
  // its own to free.
  std::vector<Source> end_unit(
      const Operator& part,
      const at::Tensor& token,
      const std::vector<at::Tensor>& returned,
      const std::vector<at::Tensor>& lasting);

  // Ends a unit that has raised.
  void fail_unit();

  // A point in a forward: the number of operators begun, of tensors saved, and of unobserved events.
  struct Progress {
    size_t begun, saves, unobserved;
  };
  Progress progress() const {
    return {begun_, saved.size(), unobserved_};
  }

  // Returns whether code that ran since then, with these arguments and results, did something that no operator showed.
  bool hides(
      const Progress& since, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) const;

  // Returns the indices of tensors in `given` (the arguments of code that ran since `begun` operators had begun) that
  // changed although no operator was seen to write to them: their version or values differ from `versions` and `before`
  // (copies of some of them). Tensors in `returned` count as changed: an unobserved kernel may have written to them
  // without raising their version.
  std::vector<size_t> written_unseen(
      size_t begun,
      const std::vector<at::Tensor>& given,
      const std::vector<uint32_t>& versions,
      const std::vector<at::Tensor>& before,
      const std::vector<at::Tensor>& returned) const;

  // Returns whether an operator since then wrote to memory from before the region that is not that of a tensor in
  // `given`.
  bool writes_elsewhere(size_t begun, const std::vector<at::Tensor>& given) const;

  // Saves the present values of `given` where they lie in memory from before the region or are captured: the code that
  // runs next may write to them unobserved. Skips a tensor that may be unfinished.
  void protect(const std::vector<at::Tensor>& given);

  // Returns whether another stream has made a tensor, as far as autograd shows, and no operator has read it here. The
  // code that runs next may be the first to wait for that stream, so that no copy can be made before.
  bool may_be_unfinished(const at::Tensor& tensor) const;

  // Takes note of unobserved writes to these tensors: no tape shows them, and captures of the tensors may be stale.
  // Throws if the memory existed before, was not protected, and is not kept either.
  void blind_to_writes(const std::vector<at::Tensor>& given, const std::vector<size_t>& written);

  // Returns whether an operator since then communicates with other ranks.
  bool communicates(size_t begun = 0) const;

  // Returns all of a tensor's storage: the tensor itself, or else one row, of the same dtype if that fits, so that one
  // copy serves every view.
  static at::Tensor whole(const at::Tensor& tensor);

  // Returns the bytes of a tensor's elements, in their order: the tensor's memory, or a copy.
  static at::Tensor bytes_of(const at::Tensor& tensor);

  // Takes note of an operator's argument of a tensor subclass.
  void meet_subclass(const at::Tensor& tensor) {
    opaque_ |= listener_->is_transparent(tensor) ? 0 : SUBCLASS;
    meet_wrapper(tensor);
  }

  // Takes note of a tensor such as a DTensor that an operator or a function is about to get: writes are counted there,
  // and not where its memory is.
  void meet_wrapper(const at::Tensor& tensor) {
    if (tensor.is_leaf() && tensor.requires_grad()) { // else the region may have made it
      read(tensor, begun_ + 1, false);
    }
  }

  // Checks an operator that was looked through and has run since `before` operators had begun. If no operator was noted
  // inside of it, its writes and its results are unobserved.
  void looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results);

  // Notes a tensor that autograd saves for backward. `held`: keep the tensor itself. An operator's own result is saved
  // before the operator ends.
  void save(const at::Tensor& tensor, bool held);

  // Marks a storage as captured, until it is written to.
  void set_captured(int32_t storage, bool whole, bool kept, at::ScalarType dtype);

  // Ends the forward and returns its tape.
  std::shared_ptr<const Tape> close();

  // Decides how each saved tensor is restored, after `close`. `direct`: from a whole copy where there is one.
  void sort(bool direct);

  // Drops the saved tensors that were kept until now.
  void let_go();

  // Returns the tape of the forward so far; opaque if that is not all that it did.
  std::shared_ptr<const Tape> so_far() const;

  // Keeps a saved tensor that was recomputed while the forward runs. Operators that read it count as reading the
  // original.
  void keep(size_t index, const at::Tensor& tensor);

  // Stores a saved tensor that a recompute pass restored.
  void restore(size_t index, const at::Tensor& tensor);

  // Returns a restored tensor for backward, and drops it here. Throws if it was written to since.
  at::Tensor take(size_t index);

  // Holds a tensor that backward received, as long as backward may ask for it again. A custom function may read
  // `ctx.saved_tensors` several times, and only the first time is a read of the tensor's source.
  void hold(size_t index, const at::Tensor& tensor);

  // Returns the tensor that `hold` holds; undefined if there is none. Throws if it was written to since.
  at::Tensor held_again(size_t index) const;

  // Returns memory from outside for a recompute pass that runs no operator from `end` on. Throws if it is gone, or was
  // written to since. `changes`: the region itself changes it, so that writes are no error.
  at::Tensor given_again(int32_t storage, bool regathered, bool changes, size_t end) const;

  // Takes note that running code reads a tensor without an operator: its address was taken, or a function got it.
  void read(const at::Tensor& tensor) {
    read(tensor, begun_, false);
  }

  // Takes note that the unit that is about to begin reads a parameter.
  void read_in_unit(const at::Tensor& tensor) {
    read(tensor, begun_ + 1, true);
  }

  // Takes note that all memory given to a forward inside of this one is read.
  void read(const Forward& inner);

  // Throws if a tensor of such a read was written to since, for a pass that runs no operator from `end` on.
  void check_read(size_t end) const;

  // Returns the count of memory that a saved tensor may have been computed from and that has changed since, so that no
  // pass that runs the module restores the tensor; null if there is none. Writes by the forward itself do not count:
  // they are undone for the pass.
  const Count* changed(size_t index) const;

  // Marks the saved tensors that a pass that runs the module does not restore. Called before that pass, which may
  // repeat the forward's writes.
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
  const std::shared_ptr<const Tape>& followed() const { // null: it notes its own
    return followed_;
  }
  Ledger& ledger() {
    return *ledger_;
  }
  const Tape& tape() const { // complete once it is closed
    return followed_ != nullptr ? *followed_ : *noted_;
  }

  // How a saved tensor is restored: it is held, a view of a capture, or recomputed.
  enum class Way : uint8_t { HELD, VIEW, RECOMPUTED };

  // A saved tensor. `written`: it was written to in the forward after it was saved, which autograd forbids.
  struct Saved {
    Use use;
    at::Tensor held; // the tensor itself, if it is a subclass's or not the region's
    // The tensor itself, if the forward `holds` or `holds_meanwhile`. Used instead of a recompute pass if its frame
    // keeps it.
    at::Tensor kept;
    c10::VariableVersion counter;
    uint32_t version = 0;
    int64_t largest_bytes = 0; // of the storages saved up to it, which backward then still asks for
    bool alive = true; // backward may still ask for it
    bool in_unit = false; // saved by a unit, whose backward's kernels may write over it
    bool written = false;
    bool stale = false; // a pass that runs the module does not restore it
    Way way = Way::HELD;
    at::Tensor restored; // by a recompute pass, until backward takes it
    uint32_t restored_version = 0;
    int64_t restored_bytes = 0; // as counted in the ledger: a dying frame does not ask the tensor
    at::Tensor taken; // by a backward that does not keep its graph, until its node is done
    uint32_t taken_version = 0;
  };
  Storages storages;
  bool holds = false; // keeps each tensor that autograd saves
  bool holds_meanwhile = false; // likewise, until it is over, since it may ask for a gradient itself
  std::vector<Saved> saved;
  std::vector<GivenMemory> given; // by storage
  std::vector<std::vector<GeneratorDraw>> drawn; // for each operator that draws, in order

  // Bytes of the storages that backward asks for: all, those that are not captured, those that are captured and stay on
  // the device, and the largest.
  int64_t saved_bytes = 0, pending_bytes = 0, kept_bytes = 0, largest_saved_bytes = 0;

  // Returns whether memory has Python's values (literals.cpp): it is given, although an operator requested it.
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
  int32_t meet(const at::Tensor& tensor, size_t met); // as given, if it is new
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

  // Returns the operator that returned a storage, if no operator before `end` reads it; else null.
  const Record* only_user(int32_t storage, size_t end) const;
  // Returns whether an operator copies memory that no operator was seen to fill: such a copy may become a literal.
  bool copies_blank(size_t index) const;
  // Returns the operators that made the tensor that `index` returns; none if it has no values of Python's, or too many.
  std::vector<size_t> makers_of_literal(int32_t storage, size_t index) const;
  // Handles an operator that returns a tensor which torch made by itself.
  void lift(size_t index, const at::Tensor& tensor);
  // Corrects records of another tape: storages that became literals there, but not here, are made by operators.
  void unlift(std::vector<Record>& records) const;

  std::vector<std::shared_ptr<const Tape>> known_;
  Listener* listener_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<const Tape> followed_;
  std::shared_ptr<Tape> noted_;
  int32_t entered_ = 0; // number of storages of region inputs, which come first
  size_t begun_ = 0;
  bool running_ = false; // the last operator has begun, and not ended
  uint32_t opaque_ = 0;
  size_t unobserved_ = 0; // number of unobserved events that made it opaque

  std::vector<Count> read_; // reads of tensors that no operator shows
  std::vector<bool> own_, counted_; // by storage
  struct CapturedStorage {
    uint8_t rows = NOT;
    bool kept = false; // on the device
    at::ScalarType dtype = at::kFloat;
  };
  std::vector<CapturedStorage> captured_;
  std::vector<FoundTensor> found_;
  std::vector<int32_t> made_;
  std::vector<c10::IValue> exchanged_; // tensors that the running exchange writes to
  std::vector<std::pair<int32_t, at::Tensor>> saved_early_; // storages that the running operator has made
  std::vector<int32_t> literals_; // storages that are literals
  int64_t literal_bytes_ = 0; // of those
  std::vector<int32_t> stale_; // storages that an unobserved kernel may have changed after they were captured
  std::optional<size_t> unit_saves_; // number of tensors saved before the running unit began
};

} // namespace memplug
