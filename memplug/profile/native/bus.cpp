#include "bus.h"

namespace memplug {
namespace {

thread_local int pauses = 0;

} // namespace

void Pause::begin() {
  ++pauses;
}

void Pause::end() {
  --pauses;
}

int Pause::depth() {
  return pauses;
}

} // namespace memplug
