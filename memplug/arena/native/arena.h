// Memory that is reserved once and serves requests at planned addresses (STWeaver, section 6). This header includes
// neither torch nor CUDA: `ArenaDevice` hides the kind of device.
//
// The arena stands in front of torch's own allocator, here called the native allocator. It finds a request in the plan
// by its place in the program, its size and its stream. Whatever the plan says, the arena hands out only bytes that are
// free at that moment: a program that departs from its plan loses addresses, never data. Every size and every address
// is a multiple of BLOCK_BYTES.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena_counters.h"
#include "block_table.h"
#include "blocks.h"
#include "holes.h"
#include "input_sizes.h"
#include "lifetimes.h"
#include "pending_uses.h"
#include "planned_blocks.h"

namespace memplug {

// The device whose memory an arena reserves, and to which the arena reports its blocks. The arena holds its lock during
// each call, except when it reserves or releases memory, or stops serving.
class ArenaDevice {
 public:
  virtual ~ArenaDevice() = default;

  // `reserve` returns memory at a multiple of BLOCK_BYTES, and throws if the device has too little. Like a block of
  // torch's allocator, the memory belongs to the current stream. For all other streams, the arena itself has to order
  // their work after `reserve` and before `release`.
  virtual char* reserve(size_t nbytes) = 0;
  virtual Stream current_stream() = 0;
  virtual void release(char* memory) = 0;

  // Returns an event that completes once all work queued on the stream so far is done.
  virtual Event record(Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool is_done(Event event) = 0;
  virtual void drop(Event event) = 0;
  virtual void synchronize() = 0;

  // Called only with checks (see `Arena`), in the order of the stream's work. `fill` sets all bytes of the memory to
  // `byte`; `is_filled` returns whether all of them still have this value.
  virtual void fill(char* begin, size_t nbytes, int byte, Stream stream) = 0;
  virtual bool is_filled(const char* begin, size_t nbytes, int byte, Stream stream) = 0;

  // The arena calls `handed_out` for each block that it hands out. The result is whether a recording wants to be told
  // when the block is freed. At that time the arena calls `came_back`, with this result as `wanted`. `open`: whether a
  // plan is in force.
  virtual bool handed_out(void* pointer, size_t nbytes, Stream stream) = 0;
  virtual void came_back(void* pointer, size_t nbytes, bool wanted, bool open) = 0;
};

// Same layout as the dtypes of the same names in memplug/arena/tables.py. A slot is a range of bytes for one block that
// outlives steps; the slots of one size and stream form a slot class. A group is a list of byte ranges that no planned
// request uses during a part of the step.
#pragma pack(push, 1)
struct PlannedRequest { // sorted in program order within each place
  int64_t size; // the most bytes, rounded up to BLOCK_BYTES; with checks, including the margin
  int64_t offset; // bytes from the beginning of the reused part, if `kept` is -1
  int64_t base; // bytes as requested: base + factor * term; unless `term` is CONSTANT or BOUNDED
  int64_t factor;
  uint64_t crosses; // bit n: stream n uses some of these bytes at other times
  int32_t phase;
  int32_t layer;
  int32_t stream;
  int32_t kept; // slot class if the block outlives the step: any free slot of the class serves it; else -1
  int32_t spare; // group that serves the request if its planned bytes are not free; -1: none
  int32_t term; // index into ArenaPlan::terms; CONSTANT or BOUNDED
};
struct KeptSlot {
  int64_t offset; // bytes from the beginning of the kept part
  int32_t kept; // slot class
};
struct DynamicRequest { // sorted in program order within each place; a place's last row stands for all further requests
  int32_t phase;
  int32_t layer;
  int32_t group; // group that serves the request; -1: the native allocator serves it
};
struct IdleSpace { // one byte range of a group, in the reused part
  int64_t begin;
  int64_t end;
  int32_t group;
};
#pragma pack(pop)

// Values of PlannedRequest::term: the size never changes; it is at most `size`.
constexpr int32_t CONSTANT = 0, BOUNDED = -1;

struct ArenaPlan {
  std::vector<PlannedRequest> requests;
  std::vector<KeptSlot> slots;
  std::vector<DynamicRequest> dynamic;
  std::vector<IdleSpace> spaces; // sorted by group, then by address
  std::vector<uint64_t> crosses; // by group: bit n is set if stream n uses some of its bytes at other times
  // by group of dynamic requests, which come first: they lie as high as they fit below this offset; 0: as low as they fit
  std::vector<int64_t> ceilings;
  std::vector<int32_t> reusable; // groups to try, in this order, for a request outside of the program
  std::vector<std::vector<int32_t>> terms; // each a product: dimensions of a micro-batch's inputs (input_sizes.h)
  int64_t reused_bytes = 0; // size of the reused part, which holds a step's blocks
  int64_t kept_bytes = 0; // size of the kept part, which holds blocks that outlive the step
  int32_t streams = 1; // number of streams; stream 0 is the main one
};

// Whether a request that the plan does not know may use reusable space.
enum class Reuse {
  NOTHING, // no: it is part of a forward or backward with gradients (unless its inputs exceed the plan's), or of the
           // optimizer
  BETWEEN, // yes: it comes between two passes
  WITHOUT_GRADIENTS, // yes: it belongs to a pass without gradients, such as a validation
};

class Arena {
 public:
  // `checks`: fills freed bytes, and a margin behind each block, with a pattern. A changed pattern reveals a stray
  // write.
  Arena(ArenaDevice& device, bool checks) : device_(device), checks_(checks), pending_(device) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena(); // all blocks must have been freed

  // Serves requests by this plan from now on. Earlier plans stay loaded, for `turn`: all share memory that is as large
  // as the largest plan needs. A plan that was loaded under the same number is replaced. Throws if
  // `ArenaDevice::reserve` throws; the arena then serves nothing, and no plan is loaded.
  void load(ArenaPlan plan, int64_t number = 0);

  // Serves requests by the plan of this number from now on. Neither waits for the device nor reserves memory, so it may
  // be called within a step too. Returns false, with nothing changed, if no such plan is loaded.
  bool turn(int64_t number);

  // Forgets a plan that requests are not served by.
  void unload(int64_t number);

  // Stops serving, and forgets all plans. Blocks in use stay valid until they are freed.
  void close();

  // Begins a step: each place expects its first request. Blocks of the reused part and the annex that are still in use
  // become leftovers: the native allocator serves their requests from now on.
  void begin_step();

  // Replaces the annex, from which the arena serves requests whose planned bytes leftovers hold, by one of `nbytes`; 0:
  // no annex. Call it between two steps. Throws if `ArenaDevice::reserve` throws; then there is no annex.
  void extend(int64_t nbytes);

  // Returns the byte ranges [begin, end) of the reused part that leftovers have held for a whole step.
  std::vector<std::pair<int64_t, int64_t>> leftovers() const;

  // Forgets which requests have left leftovers, since another model will train.
  void forget_leftovers();

  // Clears `wanted` of all blocks in use, since the recorder has forgotten them.
  void forget_wanted();

  // Returns memory for a request; null: the native allocator has to serve it.
  void* request(int32_t phase, int32_t layer, size_t nbytes, Stream stream, Reuse reuse);

  // Counts a request that the arena does not serve: from a thread that does not train, or in a withheld pass.
  void elsewhere(size_t nbytes);

  // Returns whether the address is in memory that the arena has reserved.
  bool owns(const void* pointer) const;

  // Frees a block, on any thread. Returns false if the block is not the arena's.
  bool give_back(void* pointer);

  // Notes that the block is used on this stream too. Returns false if the block is not the arena's.
  bool use_on(void* pointer, Stream stream);

  // Returns the beginning of the reserved memory that contains `pointer`, or null if `pointer` is not the arena's.
  char* reserved_with(const void* pointer) const;

  Lifetimes lifetimes() const; // of this step's planned requests

  // Returns pairs (index of a planned request, size): requests of this step that the plan does not have, each with the
  // planned request that has not come in its stead.
  std::vector<std::pair<int32_t, int64_t>> resized() const;

  ArenaCounters counters() const;

  void lock() {
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  // REUSED: for a step's blocks. KEPT: for blocks that outlive the step. ANNEX: for requests whose planned bytes
  // leftovers hold.
  enum class Role { REUSED, KEPT, ANNEX };
  struct Reservation { // memory that was reserved in one piece
    char* begin;
    int64_t nbytes;
    Stream stream; // the current stream when the memory was reserved; see `ArenaDevice::reserve`
    Role role;
    Holes holes; // bytes outside of `others_`; a plan's blocks and kept blocks lie in holes
    int64_t live = 0; // number of blocks in use
    bool retired = false;
  };
  struct RequestKind { // identifies a request in later steps
    uint64_t place;
    int64_t size;
    int32_t stream;
    int32_t number; // number of a planned request within its place; else NO_ROW or ANY_SIZE
    bool operator==(const RequestKind& other) const {
      return place == other.place && size == other.size && stream == other.stream && number == other.number;
    }
  };
  struct RequestKindHash {
    size_t operator()(const RequestKind& kind) const {
      const uint64_t own = static_cast<uint64_t>(kind.size) << 20 ^ static_cast<uint64_t>(kind.number) << 6 ^ kind.stream;
      return (kind.place ^ own * 0x9E3779B97F4A7C15ull) * 0xC2B2AE3D27D4EB4Full >> 16;
    }
  };
  struct LeftoverHistory { // the leftovers of one kind of request
    int32_t held = 0; // number of leftovers in use
    int32_t live = 0; // number of blocks in use that serve unplanned requests of this kind
    int32_t strikes = 0; // number of leftovers that have stayed in use for a whole step or longer
    uint32_t until = 0; // the step from which the arena serves this kind again
  };
  struct Row { // a planned request
    int64_t size; // of this step, by the sizes of its inputs
    int64_t most; // bytes that it has in the plan
    int64_t offset;
    uint64_t crosses;
    int32_t start; // number of its offset in `Loaded::planned`; -1: kept
    int32_t end; // number in `Loaded::planned` of the first offset at or behind its end; -1: kept
    int32_t stream;
    int32_t kept;
    int32_t spare;
    int32_t term;
    int64_t base;
    int64_t factor;
    uint32_t served_in = 0; // the step in which it was last served
    const LeftoverHistory* mark = nullptr; // null: no block of this request has outlived its step
  };
  struct Spot { // one place of the program
    int32_t begin = 0, end = 0, next = 0; // indices into `Loaded::rows`; `next` is the row expected next
    int32_t dynamic_begin = 0, dynamic_end = 0, dynamic_next = 0;
    uint32_t step = 0;
    int32_t micro_batch = -1;
    bool scales = false; // whether the size of any of its rows follows from the inputs
    uint32_t version = 0; // of the inputs that the sizes of its rows follow from
    bool exceeds = false; // whether the inputs make most of these sizes larger than planned
  };
  struct UnknownRequest { // a request of the main stream that the plan does not have
    const Spot* spot;
    int32_t expected; // index into `Loaded::rows`
    int64_t size;
  };
  struct SearchedSpace { // one byte range of a group, in the reused part
    int64_t begin;
    int64_t end;
    int32_t first, last; // numbers in `Loaded::planned`: the offsets in the range are [first, last)
  };
  struct Other { // a block elsewhere in the reused part or in the annex
    char* end;
    int64_t nbytes;
    Stream stream;
    Reservation* part;
    RequestKind kind;
    bool wanted;
    int32_t steps = 0; // number of steps that began while the block was in use
    bool counted = false; // whether `LeftoverHistory::live` counts the block
  };
  struct KeptBlock { // a block in the kept part
    char* end;
    int64_t nbytes;
    Stream stream;
    int32_t slot, slots_end; // indices [slot, slots_end) of the current plan's slots that the block overlaps
    bool wanted;
    uint32_t since; // the step in which the block was handed out
  };
  struct LoadedSlot {
    int64_t offset;
    int64_t end;
    int32_t held = 0; // number of blocks in use that overlap the slot
  };
  struct Loaded { // a plan, and all that changes with it
    int64_t number = NO_PLAN;
    ArenaPlan plan;
    std::vector<Row> rows;
    std::unordered_map<uint64_t, Spot> spots;
    std::vector<int64_t> class_bytes; // by slot class: size of its slots
    std::vector<std::vector<int32_t>> slots_of; // by slot class: indices of its slots
    std::vector<LoadedSlot> slots;
    std::vector<std::vector<SearchedSpace>> spaces_of; // by group
    // by the plan's stream number: whether the stream is known yet, and the stream
    std::vector<std::pair<bool, Stream>> streams;
    PlannedBlocks planned; // blocks in use at their planned offsets
    Lifetimes lifetimes; // of this step
    std::vector<UnknownRequest> unknown; // of this step
    uint64_t marked = 0; // `marks_changed_` when the marks of the rows were last set
  };
  static constexpr int64_t NO_PLAN = -1;
  static constexpr int FREED = 0xFF; // the byte that fills freed memory: NaN in every floating-point type
  // `RequestKind::number` of an unplanned request, and of all unplanned requests of a place together
  static constexpr int32_t NO_ROW = -1, ANY_SIZE = -2;

  static uint64_t key_of(int32_t phase, int32_t layer) {
    return static_cast<uint64_t>(static_cast<uint32_t>(phase)) << 32 | static_cast<uint32_t>(layer);
  }

  void stop();
  void park();
  void resume(Loaded& loaded);
  bool has_right_size(const Reservation* part, int64_t wanted) const;
  void retire(); // marks all reserved memory as retired, which is released once no block is in it
  std::vector<std::unique_ptr<Reservation>> take_empty();
  void release(std::vector<std::unique_ptr<Reservation>> parts);
  void move_planned();
  void build();
  void build_spots();
  void build_slots();
  Reservation* find_part(Role role, int64_t nbytes) const;
  bool is_pinned(const Reservation& part) const;
  Reservation* add_part(int64_t nbytes, Role role);
  RequestKind kind_of(int32_t row) const;
  int32_t row_of(const RequestKind& kind) const;
  void mark_rows();
  void note_leftovers();
  void note_leftover(const Other& other);
  void note_end(const Other& other);
  bool lasts(const LeftoverHistory& mark) const {
    return mark.held > 0 || step_ < mark.until;
  }
  bool lasts(const RequestKind& kind) const;
  Spot* spot_of(int32_t phase, int32_t layer);
  void scale(Spot& spot);
  Row* match(Spot& spot, int64_t size, Stream stream);
  bool take_exceeding_kept(const Spot& spot, int64_t size);
  void note_unknown(const Spot& spot, int64_t size, Stream stream);
  bool is_stream(int32_t number, Stream stream);
  bool is_only_stream(Stream stream) const;
  bool is_free(const Row& row) const;
  SearchedSpace space_of(int64_t begin, int64_t end) const;
  bool has_planned(const SearchedSpace& space) const;
  Stretch first_planned(int64_t begin, int64_t end) const;
  Stretch last_planned(int64_t begin, int64_t end) const;
  int64_t lowest(const SearchedSpace& space, int64_t size);
  int64_t highest(const SearchedSpace& space, int64_t size);
  int64_t lowest_of(int32_t group, int64_t size);
  int64_t highest_of(int32_t group, int64_t size, int64_t ceiling);
  void* take_planned(Row& row, size_t nbytes, Stream stream);
  void* take_kept(Row& row, size_t nbytes, Stream stream);
  void* take_dynamic(Spot& spot, const RequestKind& kind, size_t nbytes, Stream stream);
  void* take_reusable(int32_t group, const RequestKind& kind, size_t nbytes, Stream stream);
  void* serve_reusable(const RequestKind& kind, size_t nbytes, Stream stream);
  void* serve_between(const RequestKind& kind, size_t nbytes, Stream stream);
  void* take_annex(const RequestKind& kind, size_t nbytes, Stream stream);
  void* take_other(
      Reservation& part, int64_t offset, const RequestKind& kind, size_t nbytes, Stream stream, uint64_t crosses);
  void add_other(char* begin, const Other& other);
  bool hand_out(char* begin, int64_t size, size_t nbytes, Stream stream, uint64_t crosses);
  void take_in(Reservation& part, char* begin, char* end, int64_t nbytes, Stream stream, bool wanted, bool alone);
  Reservation* part_of(const void* pointer) const;

  ArenaDevice& device_;
  const bool checks_;
  mutable std::mutex mutex_;
  bool open_ = false;
  uint32_t step_ = 1;
  Loaded now_; // the plan that requests are served by
  std::map<int64_t, Loaded> parked_; // all other plans that are loaded, by number
  std::vector<std::unique_ptr<Reservation>> parts_;
  Reservation* reused_ = nullptr;
  Reservation* kept_ = nullptr;
  Reservation* annex_ = nullptr;

  uint64_t last_place_ = 0;
  Spot* last_spot_ = nullptr;

  BlockTable<Other> others_;
  std::map<char*, KeptBlock> kept_blocks_;
  std::unordered_map<RequestKind, LeftoverHistory, RequestKindHash> marks_;
  uint64_t marks_changed_ = 0; // counts changes of the keys of `marks_` that planned requests may have
  PendingUses pending_;
  ArenaCounters counters_;
};

} // namespace memplug
