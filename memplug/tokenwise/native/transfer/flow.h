// The frames of one executor: in which order they are released and prefetched, and what of them is on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "ledger.h"
#include "region.h"
#include "transfer.h"

namespace memplug {

class Frame;

// Guarded by Python's lock: the caller holds it.
class Flow {
 public:
  // `device`: where the training runs. Tensors of fewer than `min_offload_bytes` stay there. `buffers`: how many frames'
  // tensors are resident at a time, and how many rounding buffers there are to be. `regathers`: parameters are gathered in
  // forward (ZeRO 3): every region recomputes on every rank, whatever is swapped.
  Flow(
      std::shared_ptr<Transfer> transfer,
      c10::Device device,
      int64_t min_offload_bytes,
      size_t buffers,
      bool regathers)
      : transfer(std::move(transfer)),
        device(device),
        regathers(regathers),
        min_offload_bytes_(std::max<int64_t>(1, min_offload_bytes)),
        buffers_(std::max<size_t>(1, buffers)) {}

  // What may leave the device: small tensors stay.
  bool is_large(int64_t nbytes) const {
    return nbytes >= min_offload_bytes_;
  }

  // Large enough, on this device, and laid out so that rows travel as they lie.
  bool is_worth_swapping(const at::Tensor& tensor) const;

  // Offloads a region input, whole, once something reads it, or `later`; a neighbour region's copy of the same tensor is
  // shared. Null: the host is full.
  std::shared_ptr<Swapped> swap_input(const at::Tensor& value, bool later);

  // A frame is about to be made: the oldest resident one is released, where there are `buffers`.
  void make_room();

  // A frame's forward begins, and is over.
  void begin(const std::shared_ptr<Frame>& frame);

  // A frame's forward is about to write to memory that was there before: others in flight may need it as it is now.
  void before_write(const Frame& by, const at::Tensor& tensor);
  void end(Frame& frame);

  // This thread's next forward follows none: a micro-batch begins.
  static void begin_micro_batch();

  // Tapes that a region's next forward may follow, the likeliest first.
  std::vector<std::shared_ptr<const Tape>> known(const Region& region) const;

  // How many there are, of all regions.
  size_t tapes() const {
    size_t count = 0;
    for (const auto& [kind, kept] : tapes_) {
      count += kept.size();
    }
    return count;
  }

  // A region's forward did what this tape says.
  void keep(Region& region, const std::shared_ptr<const Tape>& tape);

  // A forward sends its tensors to the host, as far as the plan says.
  void expect(const Region& region);

  // Fetches what backward needs next, the frame's tensors first, as far ahead as the rounding buffers have room; where
  // there are none, as the limit of bytes allows. `largest_bytes`: of the saved tensors that the frame's backward is yet to
  // read.
  void pump(Frame& frame, int64_t largest_bytes);

  // Has the rounding buffers, each of `nbytes`; see `Transfer::reserve`.
  bool reserve(int64_t nbytes) {
    return transfer->reserve(buffers_, nbytes);
  }

  // Releases the oldest resident frames where captured tensors exceed the limit, which one region's run tells. What this
  // frame keeps counts as if it were recomputed: a plan that keeps outputs has no more on its way than one without.
  void trim(const Frame& frame);

  // How many bytes of saved tensors may be on the device, so that the peak is that of full recomputation.
  //
  // Full recomputation holds one region's saved tensors at once, and every region's input. It has let some of the former
  // go by the time backward's own temporaries are there: three gradients as large as the largest of them, which is one of
  // `largest_bytes` towards the end of a region's backward. A plan may have been promised to stay below that.
  int64_t limit_bytes(int64_t largest_bytes) const {
    const int64_t limit = largest_region_bytes + peak_input_bytes - kTemporaries * largest_bytes;
    return std::min(limit, most_held_bytes.value_or(limit)) + granted_bytes;
  }

  // Bytes of saved tensors on the device: captured and not released, prefetched, recomputed, or with autograd.
  int64_t held_bytes() {
    return transfer->resident_bytes + transfer->prefetched_bytes + ledger->recomputed_bytes + ledger->restored.nbytes();
  }

  std::shared_ptr<Transfer> transfer;
  const c10::Device device;
  const bool regathers;
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  double share = 1; // of the rows that regions say, that are swapped: less where host memory has run out
  int64_t largest_region_bytes = 0, largest_saved_bytes = 0;
  int64_t peak_held_bytes = 0; // of saved tensors on the device, with what the frame at hand was still to recompute
  std::optional<int64_t> most_held_bytes; // of these, that a plan was promised not to exceed
  int64_t granted_bytes = 0; // that a plan has beyond that, for what is on its way
  int64_t largest_frame_bytes = 0; // of tensors that a forward swapped and its backward needs, with their rounding
  int64_t forwards = 0; // that there have been
  std::unordered_set<Frame*> live; // in flight
  int64_t input_bytes = 0, peak_input_bytes = 0; // of swapped inputs of the forwards in flight: now, and the most
  int64_t expected_bytes = 0; // that forwards so far were to send to the host, by their plans
  int64_t unplanned = 0; // forwards that no plan says so of
  int64_t strayed = 0; // that did something else than the one that their plan was made from

 private:
  static constexpr size_t kTapes = 4; // of a kind: a region's shapes change between a few, as in a validation
  static constexpr int64_t kTemporaries = 3; // of backward: gradients of a gated MLP's product and of its two factors

  void release_oldest();
  void release_others(const Frame& frame);
  void note_held(const Frame& frame);
  void number(const Frame& frame);
  bool has_room(const Swapped& part, int64_t pending_bytes, int64_t largest_bytes);

  int64_t min_offload_bytes_;
  size_t buffers_;
  int64_t over_ = 0; // forwards
  std::deque<std::weak_ptr<Frame>> resident_;
  std::map<std::string, std::vector<std::shared_ptr<const Tape>>> tapes_; // of earlier forwards, by kind of region
};

} // namespace memplug
