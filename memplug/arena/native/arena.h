// Memory that is reserved once and handed out at planned addresses (STWeaver, section 6). Knows neither torch nor the
// kind of device: those are behind `Device`.
//
// A request is matched by its place in the program, its size and its stream. What is handed out is always free at that
// moment, whatever the plan says: a program that departs from its plan loses addresses, never bytes. Every size and every
// address is a multiple of BLOCK_BYTES.
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

// What the arena needs of a device, and whom it tells. Called with the arena locked, but for `reserve` and `release`.
class Device {
 public:
  virtual ~Device() = default;

  // Memory at an address that is a multiple of BLOCK_BYTES; throws where there is not as much. It belongs
  // to the current stream: only that one is ordered after its earlier uses, and before its uses after `release`.
  virtual char* reserve(size_t nbytes) = 0;
  virtual Stream current_stream() = 0;
  virtual void release(char* memory) = 0;

  // An event completes once all that was queued on its stream before it is done.
  virtual Event record(Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool is_done(Event event) = 0;
  virtual void drop(Event event) = 0;
  virtual void synchronize() = 0;

  // For the mode that checks: write a byte everywhere, and whether it is still everywhere; in the stream's order.
  virtual void fill(char* begin, size_t nbytes, int byte, Stream stream) = 0;
  virtual bool is_filled(const char* begin, size_t nbytes, int byte, Stream stream) = 0;

  // A block was handed out, and whether its end is wanted too; a block was freed, while there is a plan or after it.
  virtual bool handed_out(void* pointer, size_t nbytes, Stream stream) = 0;
  virtual void came_back(void* pointer, size_t nbytes, bool wanted, bool open) = 0;
};

// Packed as the dtypes of those names in memplug/arena/tables.py.
#pragma pack(push, 1)
struct PlannedRequest { // in program order within each place
  int64_t size; // rounded up to BLOCK_BYTES, with what surrounds it
  int64_t offset; // where `kept` is -1
  uint64_t crosses; // bit n: stream n uses some of these bytes at other times
  int32_t phase;
  int32_t layer;
  int32_t stream;
  int32_t kept; // outlives the step: any free slot of this number will do; -1: it does not
  int32_t spare; // group of reusable space to use where these bytes are not free; -1: none
};
struct KeptSlot {
  int64_t offset; // in the part of what is kept
  int32_t kept;
};
struct DynamicRequest { // in program order within each place; the last one stands for whatever else comes there
  int32_t phase;
  int32_t layer;
  int32_t group; // -1: none that is served
};
struct IdleSpace { // that requests of a group may use
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
  std::vector<uint64_t> crosses; // of each group
  std::vector<int32_t> reusable; // groups for requests outside of the program, in this order
  int64_t reused_bytes = 0;
  int64_t kept_bytes = 0;
  int32_t streams = 1; // of which 0 is the main one
};

// Since the arena was made, but for what is said to be now. A request is counted once.
struct ArenaCounters {
  int64_t planned = 0; // at their addresses
  int64_t planned_bytes = 0;
  int64_t dynamic = 0; // in reusable space of their group
  int64_t dynamic_bytes = 0;
  int64_t reusable = 0; // in other reusable space: of validations and the like, or as the address was in use
  int64_t reusable_bytes = 0;
  int64_t unplanned = 0; // left to the native allocator: there is no such request in the plan,
  int64_t occupied = 0; // its address was in use,
  int64_t dynamic_missed = 0; // or no reusable space of its group was large enough
  int64_t without_gradients = 0; // or it is a validation's, and no reusable space was large enough
  int64_t fallback_bytes = 0; // of all four
  int64_t lasting = 0; // left to the native allocator, as what such a request gets outlives its step
  int64_t lasting_bytes = 0;
  int64_t elsewhere = 0; // likewise, of threads that do not train, and of passes that are withheld
  int64_t written_freed = 0; // blocks that were written to after they were given back,
  int64_t written_beyond = 0; // or past their end
  int64_t reserved_bytes = 0; // now, with what is still in use of earlier plans
  int64_t live_bytes = 0; // now: in use, as asked for
  int64_t live_size = 0; // now: rounded up
  int64_t peak_size = 0; // the most of it since the last plan
  int64_t peak_bytes = 0; // likewise, as asked for
  int64_t leftover_bytes = 0; // now: of the part that is used again and again, held by blocks of earlier steps
  int64_t wanted_bytes = 0; // now: of blocks whose end is told, as their beginning was
  int64_t told_bytes = 0; // now: of blocks whose end is told to a recording, which are all of them while there is a plan

  int64_t from_arena() const {
    return planned + dynamic + reusable;
  }
  // Requests of threads that train that the native allocator served.
  int64_t fallback() const {
    return unplanned + occupied + dynamic_missed + without_gradients;
  }
  // Requests that a plan of this program would have had an address for.
  int64_t mismatched() const {
    return unplanned + occupied;
  }
  // What happened since then, beside what is held now.
  ArenaCounters since(const ArenaCounters& before) const;
};

// Those that Python reads, by name.
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
  NOTHING, // it is part of what is trained
  BETWEEN, // it comes between two passes
  WITHOUT_GRADIENTS, // likewise, and may come in any step: a validation
};

class Arena {
 public:
  // `checks`: freed bytes and what surrounds a block have a pattern that is looked after.
  Arena(Device& device, bool checks) : device_(device), checks_(checks), pending_(device) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena(); // no block is used any more

  // Serve by this plan from now on; throws what `reserve` throws, and then serves nothing.
  void load(ArenaPlan plan);

  // Serve nothing. What is in use stays valid until it is given back.
  void close();

  // The program begins anew. Blocks of the part that is used again and again that are still in use are leftovers: where
  // they came from, the native allocator is asked next time.
  void begin_step();

  // So many bytes beside the plan's, for requests whose bytes leftovers hold; 0: none. While nothing is served. Throws what
  // `reserve` throws, and then has none.
  void extend(int64_t nbytes);

  // The bytes [begin, end) of the part that is used again and again that leftovers have held for a whole step.
  std::vector<std::pair<int64_t, int64_t>> leftovers() const;

  // Nothing is known of what outlives its step: another model trains.
  void forget_leftovers();

  // Of no block that is in use the end is wanted any more.
  void forget_wanted();

  // Memory for a request, null: ask the native allocator.
  void* request(int32_t phase, int32_t layer, size_t nbytes, Stream stream, Reuse reuse);

  // A request of a thread that does not train.
  void elsewhere(size_t nbytes);

  bool owns(const void* pointer) const;

  // False: it is not the arena's. A block ends with it; any thread.
  bool give_back(void* pointer);

  // The block is used on this stream too. False: it is not the arena's.
  bool use_on(void* pointer, Stream stream);

  // The beginning of what the pointer's block was reserved with, null: it is not the arena's.
  char* reserved_with(const void* pointer) const;

  // Planned requests, by their index, whose blocks were still in use when the plan had their bytes for another one; and
  // that one.
  std::vector<std::pair<int32_t, int32_t>> late() const;

  ArenaCounters counters() const;

  void lock() {
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  enum class Role { REUSED, KEPT, ANNEX }; // for a step's blocks, for those that outlive it, for those that leftovers displace
  struct Part { // memory that was reserved at once
    char* begin;
    int64_t nbytes;
    Stream stream; // that the memory is of, outside of the arena
    Role role;
    int64_t live = 0; // blocks
    bool retired = false;
  };
  struct Kind { // of requests: those of a row have its number within its place
    uint64_t place;
    int64_t size;
    int32_t stream;
    int32_t number;
    bool operator==(const Kind& other) const {
      return place == other.place && size == other.size && stream == other.stream && number == other.number;
    }
  };
  struct KindHash {
    size_t operator()(const Kind& kind) const {
      const uint64_t own = static_cast<uint64_t>(kind.size) << 20 ^ static_cast<uint64_t>(kind.number) << 6 ^ kind.stream;
      return (kind.place ^ own * 0x9E3779B97F4A7C15ull) * 0xC2B2AE3D27D4EB4Full >> 16;
    }
  };
  struct Mark { // of a kind
    int32_t held = 0; // leftovers
    int32_t live = 0; // blocks in reusable space that nothing planned for
    int32_t strikes = 0; // leftovers that stayed for a step or more, and went
    uint32_t until = 0; // the step in which the arena serves it again
  };
  struct Row { // a planned request
    int64_t size;
    int64_t offset;
    uint64_t crosses;
    int32_t start; // number of its offset among all offsets,
    int32_t end; // and of the first offset that is not below its end
    int32_t stream;
    int32_t kept;
    int32_t spare;
    uint32_t served_in = 0; // step
    const Mark* mark = nullptr; // null: its blocks never outlived a step
  };
  struct Spot { // of one place
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
  struct Other { // any other block
    char* end;
    int64_t nbytes;
    Stream stream;
    Part* part;
    Kind kind;
    bool wanted;
    int32_t steps = 0; // that began while it was in use
    bool counted = false; // among its kind's `live`
  };
  struct Kept { // a block in the part of what outlives the step
    char* end;
    int64_t nbytes;
    Stream stream;
    int32_t slot, slots_end; // that it holds of this plan
    bool wanted;
    uint32_t since; // step
  };
  struct Slot {
    int64_t offset;
    int64_t end;
    int32_t held = 0; // blocks in it
  };
  using Stretch = std::pair<int64_t, int64_t>;

  static constexpr int FREED = 0xFF; // reads as NaN in every floating-point type
  static constexpr int32_t NO_ROW = -1, ANY_SIZE = -2; // numbers of kinds: not planned; of a place, not planned, together

  static uint64_t key_of(int32_t phase, int32_t layer) {
    return static_cast<uint64_t>(static_cast<uint32_t>(phase)) << 32 | static_cast<uint32_t>(layer);
  }

  void stop();
  void retire(); // all parts
  std::vector<std::unique_ptr<Part>> take_empty();
  void release(std::vector<std::unique_ptr<Part>> parts);
  void keep_live_blocks();
  void build();
  void build_spots();
  void build_slots();
  Part* find_part(Role role, int64_t nbytes) const;
  bool is_pinned(const Part& part) const;
  Part* add_part(int64_t nbytes, Role role);
  Kind kind_of(int32_t row) const;
  void mark_rows();
  void note_leftovers();
  void note_leftover(const Other& other);
  void note_end(const Other& other);
  bool lasts(const Mark& mark) const {
    return mark.held > 0 || step_ < mark.until;
  }
  bool lasts(const Kind& kind) const;
  Spot* spot_of(int32_t phase, int32_t layer);
  Row* match(Spot& spot, int64_t size, Stream stream);
  bool is_stream(int32_t number, Stream stream);
  bool is_only_stream(Stream stream) const;
  bool is_free(const Row& row);
  Stretch next_live(int64_t from, int64_t end) const;
  Stretch fitting(int64_t begin, int64_t end, int64_t size, bool highest) const;
  void* take_planned(Row& row, size_t nbytes, Stream stream);
  void* take_kept(Row& row, size_t nbytes, Stream stream);
  void* take_dynamic(Spot& spot, const Kind& kind, size_t nbytes, Stream stream);
  void* take_reusable(int32_t group, const Kind& kind, size_t nbytes, Stream stream);
  void* serve_reusable(const Kind& kind, size_t nbytes, Stream stream);
  void* serve_between(const Kind& kind, size_t nbytes, Stream stream);
  void* take_annex(const Kind& kind, size_t nbytes, Stream stream);
  void* take_other(Part& part, int64_t offset, const Kind& kind, size_t nbytes, Stream stream, uint64_t crosses);
  bool hand_out(char* begin, int64_t size, size_t nbytes, Stream stream, uint64_t crosses);
  void take_in(Part& part, char* begin, char* end, int64_t nbytes, Stream stream, bool wanted, bool alone);
  int64_t start_at(int64_t offset) const;
  Part* part_of(const void* pointer) const;

  Device& device_;
  const bool checks_;
  mutable std::mutex mutex_;
  bool open_ = false;
  uint32_t step_ = 1;
  ArenaPlan plan_;
  std::vector<std::unique_ptr<Part>> parts_;
  Part* reused_ = nullptr;
  Part* kept_ = nullptr;
  Part* annex_ = nullptr;

  std::vector<Row> rows_;
  std::unordered_map<uint64_t, Spot> spots_;
  uint64_t last_place_ = 0;
  Spot* last_spot_ = nullptr;
  std::vector<std::vector<int32_t>> slots_of_; // of each number of `kept`
  std::vector<Slot> slots_;
  std::vector<std::pair<int32_t, int32_t>> spaces_of_; // of each group: first and end in the plan's spaces
  std::vector<std::pair<bool, Stream>> streams_; // known yet, and which

  std::vector<int64_t> offsets_; // of reused rows: distinct, rising
  std::vector<int32_t> start_table_; // hashed offset -> its number, -1
  LiveStarts live_starts_;
  std::vector<Live> live_; // by the number of its offset
  std::map<char*, Other> others_;
  std::map<char*, Kept> kept_blocks_;
  std::unordered_map<Kind, Mark, KindHash> marks_;
  PendingUses pending_;
  std::set<std::pair<int32_t, int32_t>> late_;
  ArenaCounters counters_;
};

} // namespace memplug
