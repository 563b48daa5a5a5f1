// The frames of one executor: the order in which they are released and prefetched, and their bytes on the device.
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
  // `device`: where the training runs. `min_offload_bytes`: smaller tensors stay on the device. `buffers`: how many
  // frames are resident at a time, and how many rounding buffers there are. `regathers`: parameters are gathered in
  // forward (ZeRO 3), so every region recomputes on every rank, whatever is swapped.
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

  // Returns whether a tensor is large enough to be offloaded.
  bool is_large(int64_t nbytes) const {
    return nbytes >= min_offload_bytes_;
  }

  // Returns whether a tensor is large enough, on this device, and laid out so that its rows can be copied as they lie.
  bool is_worth_swapping(const at::Tensor& tensor) const;

  // Offloads all rows of a region input once an operator reads it, or, if `later`, when its memory is to be released.
  // Returns the copy of another region that swapped the same tensor, if there is one; null if host memory is full.
  std::shared_ptr<Swapped> swap_input(const at::Tensor& value, bool later);

  // Releases the oldest resident frames until there are fewer than `buffers`, since a frame is about to be made.
  void make_room();

  // Registers a frame whose forward begins, as the newest of its thread.
  void begin(const std::shared_ptr<Frame>& frame);

  // Saves the tensor's present value in all other frames in flight that may need it: the forward of `by` is about to
  // write to memory that existed before it.
  void before_write(const Frame& by, const at::Tensor& tensor);
  // Counts the bytes of a frame whose forward has ended. Releases the other frames if its region offloads late.
  void end(Frame& frame);

  // Begins a micro-batch: this thread's next forward has no predecessor.
  static void begin_micro_batch();

  // Returns the tapes that a region's next forward may follow, the likeliest first.
  std::vector<std::shared_ptr<const Tape>> known(const Region& region) const;

  // Returns the number of known tapes, over all regions.
  size_t tapes() const {
    size_t count = 0;
    for (const auto& [kind, kept] : tapes_) {
      count += kept.size();
    }
    return count;
  }

  // Remembers a forward's tape as the likeliest for the region's next forward.
  void keep(Region& region, const std::shared_ptr<const Tape>& tape);

  // Adds the bytes that a forward of the region offloads by its plan to `expected_bytes`, or counts it as `unplanned`.
  void expect(const Region& region);

  // Prefetches the tensors that backward needs next, first those of `frame`, then those of earlier frames, as far ahead
  // as the rounding buffers have room or, if there are none, as the limit of bytes allows. `largest_bytes`: size of the
  // largest saved tensor that the frame's backward is yet to read.
  void pump(Frame& frame, int64_t largest_bytes);

  // Reserves the rounding buffers, of `nbytes` each; see `Transfer::reserve`.
  bool reserve(int64_t nbytes) {
    return transfer->reserve(buffers_, nbytes);
  }

  // Releases the oldest resident frames while captured tensors exceed the limit, which is known once a region has run.
  // Tensors that `frame` keeps count as if they were recomputed: a plan that keeps outputs has no more bytes in flight
  // than one that does not.
  void trim(const Frame& frame);

  // Returns how many bytes of saved tensors may be on the device, so that the peak stays at that of full recomputation.
  //
  // Full recomputation holds one region's saved tensors at once, and every region's input. It has released some of
  // these saved tensors by the time that backward needs memory of its own: three gradients as large as the largest
  // saved tensor, which has `largest_bytes` towards the end of a region's backward. A plan may have promised a lower
  // limit.
  int64_t limit_bytes(int64_t largest_bytes) const {
    const int64_t limit = largest_region_bytes + peak_input_bytes - kTemporaries * largest_bytes;
    return std::min(limit, most_held_bytes.value_or(limit)) + granted_bytes;
  }

  // Returns the bytes of saved tensors on the device: captured and not released, prefetched, recomputed, or given to
  // autograd.
  int64_t held_bytes() {
    return transfer->resident_bytes + transfer->prefetched_bytes + ledger->recomputed_bytes + ledger->restored.nbytes();
  }

  std::shared_ptr<Transfer> transfer;
  const c10::Device device;
  const bool regathers;
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  double share = 1; // fraction of each region's planned rows to swap: below 1 where host memory has run out
  int64_t largest_region_bytes = 0, largest_saved_bytes = 0;
  int64_t peak_held_bytes = 0; // of saved tensors on the device, and those that a frame still had to recompute
  std::optional<int64_t> most_held_bytes; // limit of `held_bytes` that a plan has promised
  int64_t granted_bytes = 0; // bytes in flight that a plan may have beyond that limit
  int64_t largest_frame_bytes = 0; // most bytes, in whole blocks, that one frame swapped and its backward needs
  int64_t forwards = 0; // all forwards so far
  std::unordered_set<Frame*> live; // in flight
  int64_t input_bytes = 0, peak_input_bytes = 0; // of swapped inputs of the forwards in flight: now, and at most
  int64_t expected_bytes = 0; // that the forwards so far were to offload by their plans
  int64_t unplanned = 0; // forwards without such a plan
  int64_t strayed = 0; // forwards that differed from the one that their plan was made from

 private:
  static constexpr size_t kTapes = 4; // of a kind: a region changes between a few shapes, as in a validation
  static constexpr int64_t kTemporaries = 3; // in backward: gradients of a gated MLP's product and of its two factors

  void release_oldest();
  void release_others(const Frame& frame);
  void note_held(const Frame& frame);
  void number(const Frame& frame);
  bool has_room(const Swapped& part, int64_t pending_bytes, int64_t largest_bytes);

  int64_t min_offload_bytes_;
  size_t buffers_;
  int64_t over_ = 0; // forwards that have ended
  std::deque<std::weak_ptr<Frame>> resident_;
  std::map<std::string, std::vector<std::shared_ptr<const Tape>>> tapes_; // of earlier forwards, by kind of region
};

} // namespace memplug
