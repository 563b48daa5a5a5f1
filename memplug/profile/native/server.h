// Interface of a technique that serves requests for device memory from memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace memplug {

// Base class of servers; serves no request itself.
class Server {
 public:
  virtual ~Server() = default;

  // Returns memory for a request of the calling thread; null leaves the request to the native allocator.
  virtual void* serve(size_t /*nbytes*/, const void* /*stream*/) {
    return nullptr;
  }

  // Release a block, or note that another stream uses it; both are called on any thread. Return false if the block is
  // not the server's.
  virtual bool give_back(void* /*block*/) {
    return false;
  }
  virtual bool use_on(void* /*block*/, const void* /*stream*/) {
    return false;
  }

  // Returns the beginning of the reserved memory that contains the block; null if the block is not the server's.
  virtual char* reserved_with(const void* /*block*/) {
    return nullptr;
  }

  // Returns the bytes of live blocks whose free the server would report to a recording that begins now. Such a
  // recording counts these blocks as in use from its beginning, as it does with the native allocator's blocks.
  virtual int64_t told_bytes() {
    return 0;
  }
  // Returns the bytes of live blocks whose free the server must report, since it has reported their malloc to a
  // recording.
  virtual int64_t wanted_bytes() {
    return 0;
  }

  // Tells the server that the recorder has forgotten all blocks. The server then need not report their frees.
  virtual void forget_wanted() {}

  // The server's bytes on its device. `reserved`: from the native allocator. `live`: of blocks in use, as requested.
  // `live_size`: the same, rounded up.
  struct Bytes {
    int64_t reserved, live, live_size;
  };
  virtual std::optional<Bytes> bytes() {
    return std::nullopt;
  }
};

// The process's server. It is set when the library is loaded, and must never be destroyed.
Server& server();
void set_server(Server& server);

// Returns whether requests go to the server first, at the cost of one atomic load.
bool serving();
void serve(bool on);

// Deleter of the server's blocks.
void give_back_served(void* block);

} // namespace memplug
