// Remembers uses of freed bytes that streams may not have completed yet, so that the next users of the bytes wait for
// them.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace memplug {

class ArenaDevice;
using Stream = const void*;
using Event = void*;

// Guarded by the arena's lock.
class PendingUses {
 public:
  explicit PendingUses(ArenaDevice& device) : device_(device) {}
  ~PendingUses();
  PendingUses(const PendingUses&) = delete;
  PendingUses& operator=(const PendingUses&) = delete;

  // Notes that the block that begins at `block` is used on this stream besides its own.
  void use_on(char* block, Stream stream);

  // Notes that a block of `stream` was freed. `alone`: only uses by other streams are pending, since the plan orders
  // the next users of the bytes after `stream`. `waits`: makes `stream` wait now for all other streams that use the
  // block.
  void end_block(char* begin, char* end, Stream stream, bool alone, bool waits);

  // Notes that work that is queued on this stream may use these bytes.
  void add(char* begin, char* end, Stream stream);

  // Makes the stream wait for pending uses of these bytes by other streams.
  void order(char* begin, char* end, Stream stream);

  // Makes the stream wait for all pending uses.
  void order_after_all(Stream stream);

  // Forgets uses that have completed.
  void forget_done();

 private:
  struct PendingUse {
    char* begin;
    char* end;
    Stream stream;
    Event event;
  };

  ArenaDevice& device_;
  std::unordered_multimap<char*, Stream> also_used_on_;
  std::vector<PendingUse> pending_;
};

} // namespace memplug
