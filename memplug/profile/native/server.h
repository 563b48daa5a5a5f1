// Whose memory is served in front of a device's allocator: a technique's that places requests by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace memplug {

// This one serves nothing.
class Server {
 public:
  virtual ~Server() = default;

  // Memory for a request of the calling thread, null: the native allocator's.
  virtual void* serve(size_t /*nbytes*/, const void* /*stream*/) {
    return nullptr;
  }

  // A block ends, or is used on this stream too; any thread. False: it is not the server's.
  virtual bool give_back(void* /*block*/) {
    return false;
  }
  virtual bool use_on(void* /*block*/, const void* /*stream*/) {
    return false;
  }

  // The beginning of what the block was reserved with, null: it is not the server's.
  virtual char* reserved_with(const void* /*block*/) {
    return nullptr;
  }

  // The bytes in use whose end a recording is told of, and those of which it was told the beginning too; what a former plan
  // left is as unknown to it as what the native allocator gave out before.
  virtual int64_t told_bytes() {
    return 0;
  }
  virtual int64_t wanted_bytes() {
    return 0;
  }

  // The recorder has forgotten all blocks: of none that is in use the end is wanted any more.
  virtual void forget_wanted() {}

  // Of the device that is served: bytes reserved of its allocator, and what is in use of them, as asked for and rounded up.
  struct Bytes {
    int64_t reserved, live, live_size;
  };
  virtual std::optional<Bytes> bytes() {
    return std::nullopt;
  }
};

// The process's. One that is set lives for ever, and is set as the library is loaded.
Server& server();
void set_server(Server& server);

// Whether requests are asked of it; one atomic read.
bool serving();
void serve(bool on);

// What deletes a block of the server's.
void give_back_served(void* block);

} // namespace memplug
