#include "server.h"

#include <atomic>

namespace memplug {
namespace {

std::atomic<bool> is_serving{false};
Server serves_nothing;
Server* the_server = &serves_nothing;

} // namespace

Server& server() {
  return *the_server;
}

void set_server(Server& server) {
  the_server = &server;
}

bool serving() {
  return is_serving.load(std::memory_order_relaxed);
}

void serve(bool on) {
  is_serving = on;
}

void give_back_served(void* block) {
  the_server->give_back(block);
}

} // namespace memplug
