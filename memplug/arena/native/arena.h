// Memory that is reserved once and serves requests at planned addresses (STWeaver, section 6). Includes neither torch
// nor the kind of device, which `ArenaDevice` hides.
//
// A request is matched by its place in the program, its size and its stream. The arena hands out only bytes that are
// free at that moment, whatever the plan says: a program that departs from its plan loses addresses, never data. Every
// size and every address is a multiple of BLOCK_BYTES. The native allocator is torch's own, in front of which the arena
// stands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blocks.h"
#include "live_starts.h"
#include "pending_uses.h"

namespace memplug {

// A device as the arena uses it; it also observes the arena's blocks. The arena is locked during every call, except
// when it reserves or releases memory, or stops serving.
class ArenaDevice {
 public:
  virtual ~ArenaDevice() = default;

  // Returns memory at a multiple of BLOCK_BYTES; throws if there is too little. The memory belongs to the current
  // stream: only that stream is ordered after earlier uses of the memory, and before uses of it after `release`.
  virtual char* reserve(size_t nbytes) = 0;
  virtual Stream current_stream() = 0;
  virtual void release(char* memory) = 0;

  // Returns an event that completes once all work queued on the stream so far is done.
  virtual Event record(Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool is_done(Event event) = 0;
  virtual void drop(Event event) = 0;
  virtual void synchronize() = 0;

  // For an arena with checks, in the stream's order: fill memory with a byte, and return whether it is still filled.
  virtual void fill(char* begin, size_t nbytes, int byte, Stream stream) = 0;
  virtual bool is_filled(const char* begin, size_t nbytes, int byte, Stream stream) = 0;

  // Called when a block is handed out: returns whether a recording wants to be told of the block's end. Called when it
  // is freed: `wanted` is what `handed_out` returned; `open`: a plan is in force.
  virtual bool handed_out(void* pointer, size_t nbytes, Stream stream) = 0;
  virtual void came_back(void* pointer, size_t nbytes, bool wanted, bool open) = 0;
};

// Packed as the dtypes of these names in memplug/arena/tables.py.
#pragma pack(push, 1)
struct PlannedRequest { // in program order within each place
  int64_t size; // rounded up to BLOCK_BYTES; with checks, including the margin
  int64_t offset; // in the reused part, if `kept` is -1
  uint64_t crosses; // bit n: stream n uses some of these bytes at other times
  int32_t phase;
  int32_t layer;
  int32_t stream;
  int32_t kept; // if the block outlives the step: its slot class, of which any free slot serves; else -1
  int32_t spare; // group of reusable space to use if these bytes are not free; -1: none
};
struct KeptSlot {
  int64_t offset; // in the kept part
  int32_t kept; // its slot class: one for each size and stream
};
struct DynamicRequest { // in program order within each place; a place's last row stands for all further requests there
  int32_t phase;
  int32_t layer;
  int32_t group; // -1: not served
};
struct IdleSpace { // bytes that requests of a group may use
  int64_t begin;
  int64_t end;
  int32_t group;
};
#pragma pack(pop)

struct ArenaPlan {
  std::vector<PlannedRequest> requests;
  std::vector<KeptSlot> slots;
  std::vector<DynamicRequest> dynamic;
  std::vector<IdleSpace> spaces; // rising within each group
  std::vector<uint64_t> crosses; // of each group, as of a request
  std::vector<int32_t> reusable; // groups for requests outside of the program, to be tried in this order
  int64_t reused_bytes = 0; // of the reused part, for a step's blocks
  int64_t kept_bytes = 0; // of the kept part, for blocks that outlive the step
  int32_t streams = 1; // number of streams; 0 is the main one
};

// Counts since the arena was made; fields marked "now" hold current values. Each request is counted once.
struct ArenaCounters {
  int64_t planned = 0; // served at their addresses
  int64_t planned_bytes = 0;
  int64_t dynamic = 0; // served from reusable space of their group
  int64_t dynamic_bytes = 0;
  int64_t reusable = 0; // served from other reusable space or the annex: no planned request, or its address was in use
  int64_t reusable_bytes = 0;
  int64_t unplanned = 0; // left to the native allocator: the plan has no such request
  int64_t occupied = 0; // left to it: the planned address was in use
  int64_t dynamic_missed = 0; // left to it: no reusable space of the group was large enough
  int64_t without_gradients = 0; // left to it: of a validation, for which no reusable space was large enough
  int64_t fallback_bytes = 0; // of these four
  int64_t lasting = 0; // left to it: their blocks outlive the step
  int64_t lasting_bytes = 0;
  int64_t elsewhere = 0; // left to it: from threads that do not train, or in withheld passes
  int64_t written_freed = 0; // blocks that were written to after they were freed
  int64_t written_beyond = 0; // blocks that were written to beyond their end
  int64_t reserved_bytes = 0; // now, with memory of earlier plans that is still in use
  int64_t live_bytes = 0; // now: in use, as requested
  int64_t live_size = 0; // now: in use, rounded up
  int64_t peak_size = 0; // the largest live_size since the last plan
  int64_t peak_bytes = 0; // the largest live_bytes since the last plan
  int64_t leftover_bytes = 0; // now: bytes of the reused part and the annex that leftovers have held for a whole step
  int64_t wanted_bytes = 0; // now: bytes of blocks that a recording noted: it wants to be told of their end
  int64_t told_bytes = 0; // now: bytes of blocks whose end a recording is told: of all under a plan, else wanted_bytes

  int64_t from_arena() const {
    return planned + dynamic + reusable;
  }
  // Returns how many requests of training threads the native allocator served.
  int64_t fallback() const {
    return unplanned + occupied + dynamic_missed + without_gradients;
  }
  // Returns how many requests fell back because the plan does not fit the program.
  int64_t mismatched() const {
    return unplanned + occupied;
  }
  // Returns the counts since `before`; fields marked "now" keep their values.
  ArenaCounters since(const ArenaCounters& before) const;
};

// The counters that Python reads, by name.
struct ArenaCounter {
  const char* name;
  int64_t ArenaCounters::*value;
  bool is_now = false;
};
inline constexpr ArenaCounter ARENA_COUNTERS[] = {
    {"planned", &ArenaCounters::planned},
    {"planned_bytes", &ArenaCounters::planned_bytes},
    {"dynamic", &ArenaCounters::dynamic},
    {"dynamic_bytes", &ArenaCounters::dynamic_bytes},
    {"reusable", &ArenaCounters::reusable},
    {"reusable_bytes", &ArenaCounters::reusable_bytes},
    {"unplanned", &ArenaCounters::unplanned},
    {"occupied", &ArenaCounters::occupied},
    {"dynamic_missed", &ArenaCounters::dynamic_missed},
    {"without_gradients", &ArenaCounters::without_gradients},
    {"fallback_bytes", &ArenaCounters::fallback_bytes},
    {"lasting", &ArenaCounters::lasting},
    {"lasting_bytes", &ArenaCounters::lasting_bytes},
    {"elsewhere", &ArenaCounters::elsewhere},
    {"written_freed", &ArenaCounters::written_freed},
    {"written_beyond", &ArenaCounters::written_beyond},
    {"reserved_bytes", &ArenaCounters::reserved_bytes, true},
    {"leftover_bytes", &ArenaCounters::leftover_bytes, true},
    {"live_bytes", &ArenaCounters::live_bytes, true},
    {"live_size", &ArenaCounters::live_size, true},
    {"peak_bytes", &ArenaCounters::peak_bytes, true},
    {"peak_size", &ArenaCounters::peak_size, true},
};

// Whether a request that the plan does not know may use reusable space.
enum class Reuse {
  NOTHING, // no: it is part of a forward or backward with gradients, or of the optimizer
  BETWEEN, // yes: it comes between two passes
  WITHOUT_GRADIENTS, // yes: it may come in any step, as a validation does
};

class Arena {
 public:
  // `checks`: freed bytes and margins of blocks hold a pattern, to detect stray writes.
  Arena(ArenaDevice& device, bool checks) : device_(device), checks_(checks), pending_(device) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena(); // all blocks must have been freed

  // Serves this plan from now on; throws what `reserve` throws, and then serves nothing.
  void load(ArenaPlan plan);

  // Stops serving. Blocks in use stay valid until they are freed.
  void close();

  // Begins a step: each place expects its first request. Blocks of the reused part that are still in use become
  // leftovers: the native allocator serves their requests from now on.
  void begin_step();

  // Reserves an annex of so many bytes, for requests whose bytes leftovers hold; 0: none. Must not be called while
  // serving. Throws what `reserve` throws, and then there is no annex.
  void extend(int64_t nbytes);

  // Returns the bytes [begin, end) of the reused part that leftovers have held for a whole step.
  std::vector<std::pair<int64_t, int64_t>> leftovers() const;

  // Forgets which requests outlive their step: another model trains.
  void forget_leftovers();

  // Forgets that a recording wants to be told of the end of blocks in use.
  void forget_wanted();

  // Returns memory for a request; null: the native allocator has to serve it.
  void* request(int32_t phase, int32_t layer, size_t nbytes, Stream stream, Reuse reuse);

  // Counts a request that the arena leaves alone: of a thread that does not train, or in a withheld pass.
  void elsewhere(size_t nbytes);

  // Returns whether the arena has reserved this address.
  bool owns(const void* pointer) const;

  // Frees a block, on any thread. False: it is not the arena's.
  bool give_back(void* pointer);

  // Notes that the block is used on this stream too. False: it is not the arena's.
  bool use_on(void* pointer, Stream stream);

  // Returns the beginning of the reserved memory that the pointer lies in; null: it is not the arena's.
  char* reserved_with(const void* pointer) const;

  // Returns pairs (late, displaced) of planned requests, by index: the block of the late one was still in use when the
  // displaced one came, whose planned bytes overlap the block.
  std::vector<std::pair<int32_t, int32_t>> late() const;

  ArenaCounters counters() const;

  void lock() {
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  enum class Role { REUSED, KEPT, ANNEX }; // of a step's blocks; blocks that outlive it; displaced requests
  struct Reservation { // memory that was reserved in one piece
    char* begin;
    int64_t nbytes;
    Stream stream; // the stream that the memory belongs to outside of the arena
    Role role;
    int64_t live = 0; // blocks in use
    bool retired = false;
  };
  struct RequestKind { // by which a request is recognised in later steps
    uint64_t place;
    int64_t size;
    int32_t stream;
    int32_t number; // of a planned request within its place; else NO_ROW
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
  struct LeftoverHistory { // leftovers of one kind
    int32_t held = 0; // leftovers in use
    int32_t live = 0; // unplanned blocks in use in reusable space
    int32_t strikes = 0; // leftovers that lasted for a step or more before they were freed
    uint32_t until = 0; // the step from which the arena serves the kind again
  };
  struct Row { // a planned request
    int64_t size;
    int64_t offset;
    uint64_t crosses;
    int32_t start; // number of its offset among all offsets
    int32_t end; // number of the first offset that is not below its end
    int32_t stream;
    int32_t kept;
    int32_t spare;
    uint32_t served_in = 0; // the step that it was last served in
    const LeftoverHistory* mark = nullptr; // null: none of its blocks outlived a step
  };
  struct Spot { // one place of the program
    int32_t begin = 0, end = 0, next = 0; // rows
    int32_t dynamic_begin = 0, dynamic_end = 0, dynamic_next = 0;
    uint32_t step = 0;
  };
  struct Live { // a block at a planned offset
    int64_t end;
    int64_t nbytes;
    Stream stream;
    int32_t row;
    bool wanted;
  };
  struct Other { // a block elsewhere in the reused part or in the annex
    char* end;
    int64_t nbytes;
    Stream stream;
    Reservation* part;
    RequestKind kind;
    bool wanted;
    int32_t steps = 0; // steps that began while it was in use
    bool counted = false; // whether it counts in its kind's `live`
  };
  struct KeptBlock { // a block in the kept part
    char* end;
    int64_t nbytes;
    Stream stream;
    int32_t slot, slots_end; // slots of this plan that it holds
    bool wanted;
    uint32_t since; // the step that it was handed out in
  };
  struct LoadedSlot {
    int64_t offset;
    int64_t end;
    int32_t held = 0; // blocks in use that reach into it
  };
  using Stretch = std::pair<int64_t, int64_t>;

  static constexpr int FREED = 0xFF; // reads as NaN in every floating-point type
  static constexpr int32_t NO_ROW = -1, ANY_SIZE = -2; // as numbers: unplanned; all unplanned ones of a place

  static uint64_t key_of(int32_t phase, int32_t layer) {
    return static_cast<uint64_t>(static_cast<uint32_t>(phase)) << 32 | static_cast<uint32_t>(layer);
  }

  void stop();
  void retire(); // retires all parts
  std::vector<std::unique_ptr<Reservation>> take_empty();
  void release(std::vector<std::unique_ptr<Reservation>> parts);
  void keep_live_blocks();
  void build();
  void build_spots();
  void build_slots();
  Reservation* find_part(Role role, int64_t nbytes) const;
  bool is_pinned(const Reservation& part) const;
  Reservation* add_part(int64_t nbytes, Role role);
  RequestKind kind_of(int32_t row) const;
  void mark_rows();
  void note_leftovers();
  void note_leftover(const Other& other);
  void note_end(const Other& other);
  bool lasts(const LeftoverHistory& mark) const {
    return mark.held > 0 || step_ < mark.until;
  }
  bool lasts(const RequestKind& kind) const;
  Spot* spot_of(int32_t phase, int32_t layer);
  Row* match(Spot& spot, int64_t size, Stream stream);
  bool is_stream(int32_t number, Stream stream);
  bool is_only_stream(Stream stream) const;
  bool is_free(const Row& row);
  Stretch next_live(int64_t from, int64_t end) const;
  Stretch fitting(int64_t begin, int64_t end, int64_t size, bool highest) const;
  void* take_planned(Row& row, size_t nbytes, Stream stream);
  void* take_kept(Row& row, size_t nbytes, Stream stream);
  void* take_dynamic(Spot& spot, const RequestKind& kind, size_t nbytes, Stream stream);
  void* take_reusable(int32_t group, const RequestKind& kind, size_t nbytes, Stream stream);
  void* serve_reusable(const RequestKind& kind, size_t nbytes, Stream stream);
  void* serve_between(const RequestKind& kind, size_t nbytes, Stream stream);
  void* take_annex(const RequestKind& kind, size_t nbytes, Stream stream);
  void* take_other(
      Reservation& part, int64_t offset, const RequestKind& kind, size_t nbytes, Stream stream, uint64_t crosses);
  bool hand_out(char* begin, int64_t size, size_t nbytes, Stream stream, uint64_t crosses);
  void take_in(Reservation& part, char* begin, char* end, int64_t nbytes, Stream stream, bool wanted, bool alone);
  int64_t start_at(int64_t offset) const;
  Reservation* part_of(const void* pointer) const;

  ArenaDevice& device_;
  const bool checks_;
  mutable std::mutex mutex_;
  bool open_ = false;
  uint32_t step_ = 1;
  ArenaPlan plan_;
  std::vector<std::unique_ptr<Reservation>> parts_;
  Reservation* reused_ = nullptr;
  Reservation* kept_ = nullptr;
  Reservation* annex_ = nullptr;

  std::vector<Row> rows_;
  std::unordered_map<uint64_t, Spot> spots_;
  uint64_t last_place_ = 0;
  Spot* last_spot_ = nullptr;
  std::vector<std::vector<int32_t>> slots_of_; // by slot class
  std::vector<LoadedSlot> slots_;
  std::vector<std::pair<int32_t, int32_t>> spaces_of_; // by group: first and end in the plan's spaces
  std::vector<std::pair<bool, Stream>> streams_; // by number: whether it is known yet, and its handle

  std::vector<int64_t> offsets_; // of rows in the reused part: distinct, rising
  std::vector<int32_t> start_table_; // hash table from an offset to its number; -1: empty
  LiveStarts live_starts_;
  std::vector<Live> live_; // by number of the offset
  std::map<char*, Other> others_;
  std::map<char*, KeptBlock> kept_blocks_;
  std::unordered_map<RequestKind, LeftoverHistory, RequestKindHash> marks_;
  PendingUses pending_;
  std::set<std::pair<int32_t, int32_t>> late_;
  ArenaCounters counters_;
};

} // namespace memplug
