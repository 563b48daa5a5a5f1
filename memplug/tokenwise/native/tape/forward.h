// One forward of a region: it follows the tape of an earlier one for as long as it does the same, else it notes its own.
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

// A generator, and its state before an operator that draws from it.
struct Drawn {
  at::Generator generator;
  at::Tensor state;
};

// Memory that was there before the region, or that has Python's values (literals.cpp): the first tensor of each that it
// met, and how often that and others in it had been written to when the forward was over.
struct Given {
  at::Tensor tensor; // undefined: made by the region, or swapped
  c10::SmallVector<Count, 1> counts; // none where it is undefined
  bool had_gradient = false; // a leaf, when it was met
  bool noted = false; // what that was
};

// What else happens while operators run. It may run operators of its own, which are none of the forward's.
class Listener {
 public:
  virtual ~Listener() = default;

  // An operator is about to run on the current stream.
  virtual void note_stream() = 0;

  // It uses a tensor there.
  virtual void note_use(const at::Tensor& tensor) = 0;

  // An operator reads what it is given, on the current stream.
  virtual void note_reads(const Record& record) = 0;

  // An operator begins, or is over; where `is_timed`.
  virtual void time(size_t index, bool over) = 0;

  // Memory that is captured, or that was given and is not the forward's own yet, is about to be written to.
  virtual void before_write(int32_t storage, const at::Tensor& tensor) = 0;

  // Whether an operator is to be captured.
  virtual bool wants(size_t index, const Operator& op) const = 0;

  // Such an operator is over; an exchange with what it wrote to.
  virtual void capture(size_t index, c10::ArrayRef<c10::IValue> results) = 0;

  // Whether a subclass's own dispatch only calls other operators.
  virtual bool is_transparent(const at::Tensor& tensor) = 0;

  bool is_timed = false;
};

class Forward {
 public:
  // `known`: tapes that it may follow, the likeliest first. `regathered` may be null.
  Forward(
      std::vector<std::shared_ptr<const Tape>> known,
      Listener* listener,
      Storages::Regathered regathered,
      std::shared_ptr<Ledger> ledger);
  ~Forward();

  // A region input, before the first operator; its number. One that is captured is not kept.
  int32_t enter(const at::Tensor& tensor, bool captured);

  // Whether it is a storage of a region input.
  bool is_input(int32_t storage) const {
    return storage < entered_;
  }

  // An operator is about to run; nothing else begins before it ends.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // It has run.
  void end(c10::ArrayRef<c10::IValue> results);

  // A unit (unit.h) begins: nothing that runs inside is told of, but for what autograd saves.
  void begin_unit(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // It has run, and returned these tensors. Notes the memory that it made, and that is returned or saved, as operators
  // `part` that read the token; says where each of them comes from. What is `lasting` is not the unit's to free.
  std::vector<Source> end_unit(
      const Operator& part,
      const at::Tensor& token,
      const std::vector<at::Tensor>& returned,
      const std::vector<at::Tensor>& lasting);

  // It has raised.
  void fail_unit();

  // A time: how many operators had begun then, how many tensors were saved, and how often something was done past operators.
  struct Progress {
    size_t begun, saves, unobserved;
  };
  Progress progress() const {
    return {begun_, saved.size(), unobserved_};
  }

  // Whether what ran since then, was given and returned these tensors, did something that no operator showed.
  bool hides(
      const Progress& since, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) const;

  // Which of these tensors, given to what ran since so many operators had begun, no operator was seen to write to although
  // they have another version or other values than `before`, copies of some, or a kernel that no operator shows gave their
  // memory back in `returned`: it may have written there, which no version tells.
  std::vector<size_t> written_unseen(
      size_t begun,
      const std::vector<at::Tensor>& given,
      const std::vector<uint32_t>& versions,
      const std::vector<at::Tensor>& before,
      const std::vector<at::Tensor>& returned) const;

  // Whether an operator since then wrote to memory that was there before the region, and is that of none of these.
  bool writes_elsewhere(size_t begun, const std::vector<at::Tensor>& given) const;

  // What runs next may write to these past torch's operators: of memory that was there before, and of what is captured, the
  // values of now are remembered; not of what may be unfinished.
  void protect(const std::vector<at::Tensor>& given);

  // Whether another stream has made a tensor, as far as autograd tells, and no operator has read it here: what runs next may
  // be the first to wait for that stream, so that no copy can be made before.
  bool may_be_unfinished(const at::Tensor& tensor) const;

  // These were written to so: no tape tells of that, and what was captured of them may be stale. Throws where it was there
  // before, was not protected, and is not kept either.
  void blind_to_writes(const std::vector<at::Tensor>& given, const std::vector<size_t>& written);

  // Whether an operator since then talks to other ranks.
  bool communicates(size_t begun = 0) const;

  // All of a tensor's storage: itself, or else one row, in its dtype where that fits, so that a copy serves every view.
  static at::Tensor whole(const at::Tensor& tensor);

  // What a tensor's elements are made of, in their order: itself, or a copy.
  static at::Tensor bytes_of(const at::Tensor& tensor);

  // An operator is called with a tensor of a subclass.
  void meet_subclass(const at::Tensor& tensor) {
    opaque_ |= listener_->is_transparent(tensor) ? 0 : SUBCLASS;
    meet_wrapper(tensor);
  }

  // An operator or a function is about to be given one, such as a DTensor: writes to it count there, and not where its
  // memory is.
  void meet_wrapper(const at::Tensor& tensor) {
    if (tensor.is_leaf() && tensor.requires_grad()) { // else it may be the region's own
      read(tensor, begun_ + 1, false);
    }
  }

  // An operator that was looked through has run, since `before` operators had begun.
  void looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results);

  // Autograd saves a tensor for backward; `held`: it is kept itself. An operator's own result is saved before the operator
  // ends.
  void save(const at::Tensor& tensor, bool held);

  // A storage has a copy, until it is written to.
  void set_captured(int32_t storage, bool whole, bool kept, at::ScalarType dtype);

  // The forward is over. Returns its tape.
  std::shared_ptr<const Tape> close();

  // Decides how each saved tensor is had back, when it is closed. `direct`: from a whole copy where there is one.
  void sort(bool direct);

  // What was held until now goes.
  void let_go();

  // The tape of what it has done until now; opaque where that is not all that it did.
  std::shared_ptr<const Tape> so_far() const;

  // A saved tensor that was made again while the forward runs: operators that read it read what was saved.
  void keep(size_t index, const at::Tensor& tensor);

  // A recompute pass gives a saved tensor.
  void restore(size_t index, const at::Tensor& tensor);

  // Backward takes it. Throws where it was written to since.
  at::Tensor take(size_t index);

  // What backward was given, for as long as it may ask for it again: a custom function may read `ctx.saved_tensors`
  // several times, and none of them is a further read of what it was made from.
  void hold(size_t index, const at::Tensor& tensor);

  // That again; undefined where there is none. Throws where it was written to since.
  at::Tensor held_again(size_t index) const;

  // Memory from outside, for a recompute pass. Throws where it is gone, or was written to since and does not change by
  // the region's own doing. The pass runs no operator from `end` on.
  at::Tensor given_again(int32_t storage, bool regathered, bool changes, size_t end) const;

  // What runs now reads a tensor of which no operator tells: its address was taken, or a function has it.
  void read(const at::Tensor& tensor) {
    read(tensor, begun_, false);
  }

  // The unit that is about to begin does so: a parameter.
  void read_in_unit(const at::Tensor& tensor) {
    read(tensor, begun_ + 1, true);
  }

  // The same of all that another forward, inside of this one, was given.
  void read(const Forward& inner);

  // Throws where one of those was written to since, for a pass that runs no operator from `end` on.
  void check_read(size_t end) const;

  // A count of what a saved tensor may have been computed from, and which has changed since, so that no pass that runs the
  // module gives that tensor; null: none. What the forward itself wrote to is put back for the pass.
  const Count* changed(size_t index) const;

  // Such a pass begins, and may write to some of it as the forward did: which saved tensors it does not give.
  void note_stale();

  // What was restored and not taken goes.
  void forget(size_t index);

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
  const Tape& tape() const { // all of it only where it is closed
    return followed_ != nullptr ? *followed_ : *noted_;
  }

  // How a saved tensor is had back.
  enum class Way : uint8_t { HELD, VIEW, RECOMPUTED };

  // What was saved: `written` since then, in a way that autograd forbids.
  struct Saved {
    Use use;
    at::Tensor held; // of a subclass, or where it is no tensor of the region's: itself
    at::Tensor kept; // itself too, where the forward `holds`, or `holds_meanwhile`, and instead of a recompute pass where its frame keeps it
    c10::VariableVersion counter;
    uint32_t version = 0;
    int64_t largest_bytes = 0; // of the storages that were saved up to it, which backward still asks for then
    bool alive = true; // backward may still ask for it
    bool in_unit = false; // by a unit, whose backward may have kernels that write over it
    bool written = false;
    bool stale = false; // a pass that runs the module does not give it
    Way way = Way::HELD;
    at::Tensor restored; // by a recompute pass, until backward takes it
    uint32_t restored_version = 0;
    int64_t restored_bytes = 0; // in the ledger; a frame that dies asks no tensor for them
    at::Tensor taken; // by a backward that does not keep its graph, until its node is done
    uint32_t taken_version = 0;
  };
  Storages storages;
  bool holds = false; // what autograd saves
  bool holds_meanwhile = false; // likewise, until it is over: it may ask for a gradient itself
  std::vector<Saved> saved;
  std::vector<Given> given; // by storage
  std::vector<std::vector<Drawn>> drawn; // by operators that draw, in their order

  // Bytes of storages that backward asks for: of all, of those that are not captured, and of those that are and stay.
  int64_t saved_bytes = 0, pending_bytes = 0, kept_bytes = 0, largest_saved_bytes = 0;

  // Memory that has Python's values (literals.cpp): given, although an operator asked for it.
  bool is_literal(int32_t storage) const;

  bool is_captured(int32_t storage) const {
    return static_cast<size_t>(storage) < captured_.size() && captured_[storage].rows != NOT;
  }
  uint32_t opaque() const {
    return opaque_ | tape().opaque;
  }

 private:
  // A tensor among the arguments or results at hand.
  struct Found {
    ArgumentPath path;
    int32_t storage;
    const at::Tensor* tensor;
  };
  enum : uint8_t { NOT, PART, WHOLE };

  int32_t number(const at::Tensor& tensor, bool given);
  int32_t meet(const at::Tensor& tensor, size_t met); // given, if it is new
  void count(Given& memory, const at::Tensor& tensor, size_t met);
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

  // The operator that returned a storage, where none before `end` reads it; else null.
  const Record* only_user(int32_t storage, size_t end) const;
  // Whether it copies memory that no operator was seen to fill: what that becomes is not known yet.
  bool copies_blank(size_t index) const;
  // Those that made what `index` hands out; none where it has no values of Python's, or too many.
  std::vector<size_t> makers_of_literal(int32_t storage, size_t index) const;
  // An operator hands out what torch has made by itself.
  void lift(size_t index, const at::Tensor& tensor);
  // Of the records of another tape: what has become a literal there, and not here, is made by operators.
  void unlift(std::vector<Record>& records) const;

  std::vector<std::shared_ptr<const Tape>> known_;
  Listener* listener_;
  std::shared_ptr<Ledger> ledger_;
  std::shared_ptr<const Tape> followed_;
  std::shared_ptr<Tape> noted_;
  int32_t entered_ = 0; // storages of region inputs, which have the first numbers
  size_t begun_ = 0;
  bool running_ = false; // the last operator has begun, and not ended
  uint32_t opaque_ = 0;
  size_t unobserved_ = 0; // how often it became opaque as something was done past operators

  std::vector<Count> read_; // of what no operator tells
  std::vector<bool> own_, counted_; // by storage
  struct Captured {
    uint8_t rows = NOT;
    bool kept = false; // on the device
    at::ScalarType dtype = at::kFloat;
  };
  std::vector<Captured> captured_;
  std::vector<Found> found_;
  std::vector<int32_t> made_;
  std::vector<c10::IValue> exchanged_; // what the running exchange writes to
  std::vector<std::pair<int32_t, at::Tensor>> saved_early_; // of storages that the running operator has made
  std::vector<int32_t> literals_; // storages
  int64_t literal_bytes_ = 0; // of those
  std::vector<int32_t> stale_; // what was captured of these may be what a kernel wrote over
  std::optional<size_t> unit_saves_; // how many tensors were saved when the unit began that runs
};

} // namespace memplug
