// The frames of one executor: in which order their tensors are released and prefetched, and how many bytes of them are
// on the device.
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

// The frames of one executor. Guarded by Python's lock, which the caller holds.
class Flow {
 public:
  // `device`: where the training runs. `min_offload_bytes`: smaller tensors stay on the device. `buffers`: how many
  // frames have their captured tensors on the device at a time, and how many rounding buffers there are. `regathers`:
  // parameters are gathered for each use (ZeRO 3), so every region recomputes on every rank, whatever is swapped.
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

  // Returns whether a tensor is on the device, is large enough, and has rows that can be copied as they lie in memory.
  bool is_worth_swapping(const at::Tensor& tensor) const;

  // Offloads all rows of a region's input once an operator reads it. `later`: only when its memory is to be released.
  // If another region has swapped the same tensor, returns that region's object instead. Returns null if host memory is
  // full.
  std::shared_ptr<Swapped> swap_input(const at::Tensor& value, bool later);

  // Releases the oldest frames until fewer than `buffers` are left on the device, since a new frame is about to begin.
  void make_room();

  // Registers a frame whose forward begins, as the newest of its thread.
  void begin(const std::shared_ptr<Frame>& frame);

  // Lets all other frames in flight save a tensor's present value if they need it, since the forward of `by` is about
  // to write to the tensor. The tensor existed before that forward.
  void before_write(const Frame& by, const at::Tensor& tensor);
  // Counts the bytes of a frame whose forward has ended. Releases all other frames if the frame's region
  // `offloads_late`.
  void end(Frame& frame);

  // Begins a micro-batch on this thread: its next forward gets no `Frame::previous`.
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

  // Adds the region's `forward_bytes` to `expected_bytes`; if it has none, adds one to `unplanned`.
  void expect(const Region& region);

  // Prefetches the tensors that backward needs next: first those of `frame`, then those of earlier frames. Goes ahead
  // while the rounding buffers have room, or without such buffers while `limit_bytes` allows. `largest_bytes`: size of
  // the largest saved tensor that the frame's backward has yet to read.
  void pump(Frame& frame, int64_t largest_bytes);

  // Reserves rounding buffers of `nbytes` each; see `Transfer::reserve`.
  bool reserve(int64_t nbytes) {
    return transfer->reserve(buffers_, nbytes);
  }

  // Releases the oldest frames while the saved tensors on the device exceed the limit, which is known once a region has
  // run. Tensors that `frame` keeps count as if they were still to be recomputed, so that a plan that keeps outputs has
  // no more bytes in flight than another.
  void trim(const Frame& frame);

  // Returns how many bytes of saved tensors may be on the device, so that the peak stays at that of full recomputation.
  //
  // The peak of full recomputation is every region's input, and all saved tensors of one region. By the time that
  // backward needs memory for gradients, full recomputation has released some of these tensors. So the limit leaves
  // room for such gradients: three, as large as the largest saved tensor that backward has yet to read
  // (`largest_bytes`). A plan may have promised a lower limit.
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
  double share = 1; // fraction of each region's planned rows to swap: below 1 if host memory has run out
  int64_t largest_region_bytes = 0, largest_saved_bytes = 0; // of the saved tensors of one forward, of one tensor
  int64_t peak_held_bytes = 0; // most bytes of saved tensors on the device, and of those that a frame had to recompute
  std::optional<int64_t> most_held_bytes; // limit of `held_bytes` that a plan has promised
  int64_t granted_bytes = 0; // bytes in flight that a plan may have beyond that limit
  int64_t largest_frame_bytes = 0; // most bytes of swapped tensors that one frame's backward needs, in whole blocks
  int64_t forwards = 0; // number of forwards so far
  std::unordered_set<Frame*> live; // frames in flight
  int64_t input_bytes = 0, peak_input_bytes = 0; // of swapped inputs of the forwards in flight: now, and at most
  int64_t expected_bytes = 0; // bytes that the forwards so far were to offload by their plans
  int64_t unplanned = 0; // number of forwards of regions without `forward_bytes`
  int64_t strayed = 0; // number of forwards that differed from the one that their plan was made from

 private:
  static constexpr size_t kTapes = 4; // most tapes for one kind of region: input shapes alternate, as with a validation
  static constexpr int64_t kTemporaries = 3; // in backward: gradients of a gated MLP's product and of its two factors

  void release_oldest();
  void release_others(const Frame& frame);
  void note_held(const Frame& frame);
  void number(const Frame& frame);
  bool has_room(const Swapped& part, int64_t pending_bytes, int64_t largest_bytes);

  int64_t min_offload_bytes_;
  size_t buffers_;
  int64_t over_ = 0; // number of forwards that have ended
  std::deque<std::weak_ptr<Frame>> resident_; // frames that are not released, the oldest first
  std::map<std::string, std::vector<std::shared_ptr<const Tape>>> tapes_; // of earlier forwards, by kind of region
};

} // namespace memplug
