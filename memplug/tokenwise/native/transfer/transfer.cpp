#include "transfer.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "replay.h"
#include "torch_private_csrc.h"
#include "versions.h"

namespace memplug {
namespace {

std::string text_of(at::IntArrayRef size) {
  std::ostringstream text;
  text << size;
  return text.str();
}

} // namespace

Failure::Failure(FailureKind kind, at::IntArrayRef size) : std::runtime_error(text_of(size)), kind(kind) {}

Swapped::Swapped(std::shared_ptr<Transfer> own, const at::Tensor& original, int64_t rows)
    : transfer(std::move(own)),
      tensor(alias_of(original)),
      geometry(Geometry::of(original)),
      nbytes(static_cast<int64_t>(original.storage().nbytes())),
      rows(rows),
      version(version_of(tensor)),
      stream(transfer->streams().current()),
      place(here()) {}

Swapped::~Swapped() {
  auto& held_bytes = resident ? transfer->resident_bytes : transfer->prefetched_bytes;
  const int64_t freed_bytes = tensor.defined() ? nbytes : 0;
  transfer->copies.abandon(
      {std::move(stream),
       std::move(prefetched),
       std::move(offloaded),
       slot ? slot : promised,
       [memory = std::move(tensor), &held_bytes, freed_bytes]() mutable {
         memory.reset();
         held_bytes -= freed_bytes;
       }});
}

at::Tensor Swapped::device_rows() const {
  Geometry rows_of = geometry;
  rows_of.size[0] = rows;
  return tensor_at(tensor, rows_of);
}

std::shared_ptr<Swapped> Transfer::offload(const at::Tensor& tensor, int64_t rows, bool later, bool unread) {
  copies.drain();
  std::optional<Slot> slot;
  if (!later) {
    slot = copies.take(static_cast<int64_t>(tensor.storage().nbytes()) / tensor.size(0) * rows);
    if (!slot) {
      return nullptr;
    }
  }
  auto swapped = std::make_shared<Swapped>(shared_from_this(), tensor, rows);
  copies.note_user(swapped->stream);
  resident_bytes += swapped->nbytes;
  if (unread) {
    swapped->ready = Ready::UNREAD;
    swapped->promised = slot;
  } else if (slot) {
    send(*swapped, *slot);
  }
  return swapped;
}

void Transfer::note_read(Swapped& swapped, Ready ready) {
  if (swapped.ready != Ready::UNREAD) {
    return;
  }
  swapped.ready = ready;
  copies.note_user(streams_.current());
  if (const auto slot = std::exchange(swapped.promised, std::nullopt)) {
    send(swapped, *slot);
  }
}

void Transfer::send(Swapped& swapped, Slot slot) {
  swapped.order = ++offloads;
  swapped.slot = slot;
  swapped.offloaded = copies.offload(swapped.device_rows(), slot, swapped.stream);
}

// Starts a copy out that `offload` has put off. Does nothing if host memory is full, or if no operator has read the
// tensor.
void Transfer::send_late(Swapped& swapped) {
  if (!swapped.slot && swapped.ready != Ready::UNREAD) {
    check_version(swapped);
    if (const auto slot = copies.take(swapped.nbytes / swapped.geometry.size[0] * swapped.rows)) {
      send(swapped, *slot);
    }
  }
}

void Transfer::release(std::vector<std::shared_ptr<Swapped>> group) {
  std::vector<Swapped*> leaving;
  for (const auto& swapped : group) {
    if (swapped->resident && swapped->tensor.defined()) {
      send_late(*swapped);
      if (swapped->slot) {
        leaving.push_back(swapped.get());
      }
    }
  }
  // all copies out run on one stream, so each owner waits only for the last copy of its tensors
  for (size_t i = 0; i < copies.users().size(); ++i) {
    const StreamRef stream = copies.users()[i];
    const Swapped* last = nullptr;
    for (const Swapped* swapped : leaving) {
      if (swapped->offloaded != nullptr && streams_.same(swapped->stream, stream) &&
          (last == nullptr || swapped->order > last->order)) {
        last = swapped;
      }
    }
    if (last != nullptr) {
      copies.wait(stream, last->offloaded, Wait::RELEASE_FOR_OFFLOAD);
    }
  }
  for (Swapped* swapped : leaving) {
    check_version(*swapped);
    swapped->offloaded = nullptr;
    leave(*swapped);
  }
}

void Transfer::before_write(Swapped& swapped) {
  swapped.mutated = true;
  note_read(swapped);
  if (!swapped.slot) {
    copy_on_device(swapped);
    return;
  }
  if (swapped.offloaded != nullptr) {
    copies.wait_on_its_streams(swapped.stream, swapped.offloaded, Wait::MUTATE_FOR_OFFLOAD);
    swapped.offloaded = nullptr;
  }
  leave(swapped);
}

// Copies the tensor to new device memory, before an operator on the current stream writes to it. The copy runs on the
// tensor's stream, which owns the new memory. If the two streams differ, the tensor's stream first waits for the work
// queued on the current stream, and the current stream then waits for the copy.
void Transfer::copy_on_device(Swapped& swapped) {
  check_version(swapped);
  const at::Tensor original = swapped.tensor;
  const Geometry& geometry = swapped.geometry;
  const StreamRef current = streams_.current();
  const bool elsewhere = !streams_.same(current, swapped.stream);
  if (elsewhere) {
    streams_.wait(swapped.stream, streams_.record(current), Wait::MUTATE_FOR_OFFLOAD);
  }
  ++allocations;
  swapped.tensor = tensor_at(streams_.empty(swapped.stream, geometry.size, geometry.stride, geometry.dtype), geometry);
  streams_.copy(swapped.stream, swapped.tensor, original);
  swapped.version = version_of(swapped.tensor);
  if (elsewhere) {
    streams_.wait(current, streams_.record(swapped.stream), Wait::MUTATE_FOR_OFFLOAD);
  }
}

void Transfer::prefetch(Swapped& swapped) {
  if (swapped.tensor.defined()) {
    return;
  }
  if (copies.is_closed()) {
    throw Failure(Failure::DETACHED, swapped.geometry.size);
  }
  if (!swapped.slot.has_value()) {
    throw Failure(Failure::SWAPPED_IS_GONE, swapped.geometry.size);
  }
  copies.drain();
  swapped.tensor = memory_for(swapped);
  set_lazy_bits(swapped.tensor, swapped.geometry.conj, swapped.geometry.neg);
  swapped.prefetched = copies.prefetch(swapped.device_rows(), *swapped.slot, swapped.stream);
  prefetched_bytes += swapped.nbytes;
}

at::Tensor Transfer::memory_for(const Swapped& swapped) {
  const Geometry& geometry = swapped.geometry;
  if (buffers_of(swapped) != nullptr) {
    if (at::Tensor found = rounding_->take(swapped.frame, geometry, swapped.nbytes); found.defined()) {
      for (size_t i = 0; i < readers_.size(); ++i) {
        const StreamRef reader = readers_[i];
        copies.prefetch_after(reader);
      }
      return found;
    }
  }
  buffer_misses += rounding_ != nullptr ? 1 : 0;
  ++allocations;
  const PrefetchPlace place(swapped.place);
  return streams_.empty(swapped.stream, geometry.size, geometry.stride, geometry.dtype);
}

const RoundingBuffers* Transfer::buffers_of(const Swapped& swapped) const {
  return rounding_ != nullptr && streams_.same(rounding_->stream, swapped.stream) ? rounding_.get() : nullptr;
}

void Transfer::discard_buffers() {
  if (rounding_ != nullptr) {
    for (const StreamRef& reader : readers_) {
      rounding_->use_on(streams_, reader);
    }
    rounding_.reset();
  }
}

bool Transfer::reserve(size_t count, int64_t nbytes) {
  discard_buffers();
  if (copies.is_closed() || count == 0 || nbytes == 0) {
    return true;
  }
  const StreamRef current = streams_.current(), stream = copies.users().empty() ? current : copies.users().front();
  // the free memory that the buffers get may last have been used on the current stream, so their stream waits for it
  if (!streams_.same(stream, current)) {
    streams_.wait(stream, streams_.record(current), Wait::PREFETCH_FOR_COMPUTE);
  }
  try {
    rounding_ = std::make_unique<RoundingBuffers>(streams_, stream, count, nbytes);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

std::pair<at::Tensor, int64_t> Transfer::acquire(Swapped& swapped) {
  prefetch(swapped);
  if (swapped.prefetched != nullptr) {
    copies.wait_on_its_streams(swapped.stream, swapped.prefetched, Wait::USE_FOR_PREFETCH);
    swapped.prefetched = nullptr;
  }
  order_use(swapped.tensor, swapped.stream);
  if (swapped.resident) {
    check_version(swapped);
  }
  return {swapped.tensor, swapped.resident ? swapped.geometry.size[0] : swapped.rows};
}

void Transfer::order_use(const at::Tensor& tensor, const StreamRef& owner) {
  const StreamRef current = streams_.current();
  if (!streams_.same(current, owner)) {
    streams_.wait(current, streams_.record(owner), Wait::USE_FOR_COMPUTE);
    streams_.use_on(current, tensor);
    streams_.number_among(readers_, current);
  }
}

void Transfer::drop(const std::shared_ptr<Swapped>& swapped) {
  if (swapped->resident && !swapped->slot) {
    leave(*swapped);
  } else if (swapped->resident) {
    release({swapped});
  } else if (swapped->tensor.defined()) {
    prefetched_bytes -= swapped->nbytes;
    swapped->tensor.reset();
  }
}

void Transfer::leave(Swapped& swapped) {
  if (swapped.resident && swapped.tensor.defined()) {
    resident_bytes -= swapped.nbytes;
  }
  swapped.tensor.reset();
  swapped.resident = false;
}

void Transfer::check_version(const Swapped& swapped) {
  if (swapped.tensor.defined() && version_of(swapped.tensor) != swapped.version) {
    throw Failure(Failure::SWAPPED_WAS_WRITTEN, swapped.geometry.size);
  }
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

bool is_dense(const at::Tensor& tensor) {
  if (tensor.dim() == 0 || tensor.storage_offset() != 0 || tensor.numel() == 0 ||
      tensor.storage().nbytes() != tensor.nbytes()) {
    return false;
  }
  return tensor.is_non_overlapping_and_dense();
}

at::Tensor alias_of(const at::Tensor& tensor) {
  // bypass dispatch modes, which might return another tensor than an alias
  std::optional<c10::impl::ExcludeDispatchKeyGuard> past_modes;
  if (!tensor.key_set().has(c10::DispatchKey::Python)) {
    past_modes.emplace(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  }
  return detached(tensor);
}

} // namespace memplug
