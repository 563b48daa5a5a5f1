// Uses of a freed block's bytes that streams have still to get to.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace memplug {

class Device;
using Stream = const void*;
using Event = void*;

// Guarded by the arena's lock.
class PendingUses {
 public:
  explicit PendingUses(Device& device) : device_(device) {}
  ~PendingUses();
  PendingUses(const PendingUses&) = delete;
  PendingUses& operator=(const PendingUses&) = delete;

  // The block that begins there is used on this stream besides its own.
  void use_on(char* block, Stream stream);

  // A block of `stream` ends; where not `alone`, others may use its bytes next by no plan. `waits`: it is ordered after the
  // other streams that use it.
  void end_block(char* begin, char* end, Stream stream, bool alone, bool waits);

  // The stream uses these bytes after the uses of others.
  void order(char* begin, char* end, Stream stream);

  // The stream is ordered after all uses.
  void order_after_all(Stream stream);

  // Forgets those that are done.
  void forget_done();

 private:
  struct Pending {
    char* begin;
    char* end;
    Stream stream;
    Event event;
  };

  Device& device_;
  std::unordered_multimap<char*, Stream> also_used_on_;
  std::vector<Pending> pending_;
};

} // namespace memplug
