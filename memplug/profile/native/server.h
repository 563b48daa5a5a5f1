// Interface of a technique that serves requests from its own memory, in front of a device's allocator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace memplug {

// The base class serves nothing.
class Server {
 public:
  virtual ~Server() = default;

  // Returns memory for a request of the calling thread; null: the native allocator serves it.
  virtual void* serve(size_t /*nbytes*/, const void* /*stream*/) {
    return nullptr;
  }

  // Releases a block, or notes that another stream uses it; both on any thread. Return false if the block is not the
  // server's.
  virtual bool give_back(void* /*block*/) {
    return false;
  }
  virtual bool use_on(void* /*block*/, const void* /*stream*/) {
    return false;
  }

  // Returns the beginning of the reserved memory that contains the block; null: the block is not the server's.
  virtual char* reserved_with(const void* /*block*/) {
    return nullptr;
  }

  // Returns the bytes of live blocks whose free is reported to a recording. A recording counts blocks of earlier plans
  // as from before its beginning, like those of the native allocator.
  virtual int64_t told_bytes() {
    return 0;
  }
  // Returns the bytes of live blocks whose malloc was reported to a recording: it wants their free reported too.
  virtual int64_t wanted_bytes() {
    return 0;
  }

  // Tells the server that the recorder has forgotten all blocks, and no longer wants their frees reported.
  virtual void forget_wanted() {}

  // Bytes on the served device: reserved from its allocator; in use, as requested; in use, rounded up.
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

// Returns whether requests go to the server first, by one atomic load.
bool serving();
void serve(bool on);

// Deleter of the server's blocks.
void give_back_served(void* block);

} // namespace memplug
