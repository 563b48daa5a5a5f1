// Decides when the captured tensors of one executor's frames are released and prefetched, within a limit on their bytes
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

// The frames of one executor, over all of its regions. Guarded by Python's lock, which the caller holds.
class Flow {
 public:
  // `device`: the device that trains. `min_offload_bytes`: smaller tensors stay on the device. `buffers`: most frames
  // with captured tensors on the device at a time; also the number of rounding buffers. `regathers`: parameters are
  // gathered for each use (ZeRO 3), so every region runs its recompute pass on every rank, whatever each rank swaps.
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

  // Returns whether a tensor is on the device, large enough, and dense (`is_dense`).
  bool is_worth_swapping(const at::Tensor& tensor) const;

  // Offloads all rows of a region's input, once an operator has read it. If another region has swapped the same tensor,
  // returns the same object. Returns null if host memory is full. `later`: offload only when the input's device memory
  // has to be released.
  std::shared_ptr<Swapped> swap_input(const at::Tensor& value, bool later);

  // Releases the oldest frames, until fewer than `buffers` are left on the device, to make room for a new one.
  void make_room();

  // Registers a frame whose forward begins, as the newest on its thread.
  void begin(const std::shared_ptr<Frame>& frame);

  // Called before the forward of `by` writes to a tensor that existed before that forward. Lets all other frames in
  // flight save the tensor's value if they need it.
  void before_write(const Frame& by, const at::Tensor& tensor);
  // Counts the bytes of a frame whose forward has ended. If its region `offloads_late`, releases all other frames.
  void end(Frame& frame);

  // Begins a micro-batch: the next forward on this thread gets no `Frame::previous`.
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

  // Remembers a forward's tape as the likeliest for the region's next forward. Keeps at most `kTapes` for each class of
  // regions.
  void keep(Region& region, const std::shared_ptr<const Tape>& tape);

  // Counts a forward in `expected_bytes`, or in `unplanned` if the region has no `forward_bytes`.
  void expect(const Region& region);

  // Prefetches the tensors that backward needs next: all those of `frame`, then those of earlier frames while there is
  // room. Room means space in the rounding buffers if there are any, and otherwise bytes below `limit_bytes`.
  // `largest_bytes`: size of the largest saved tensor that the frame's backward has yet to read.
  void pump(Frame& frame, int64_t largest_bytes);

  // Reserves rounding buffers of `nbytes` each; see `Transfer::reserve`.
  bool reserve(int64_t nbytes) {
    return transfer->reserve(buffers_, nbytes);
  }

  // Releases the oldest frames while saved tensors on the device exceed `limit_bytes`. Does nothing before the first
  // forward has ended, since there is no limit yet. Counts the outputs that `frame` keeps, as it counts those that have
  // yet to be recomputed. So a plan that keeps outputs has no more bytes in flight than one that recomputes them.
  void trim(const Frame& frame);

  // Returns how many bytes of saved tensors may be on the device without raising the peak above that of full
  // recomputation.
  //
  // At its peak full recomputation holds every region's input, and all saved tensors of one region. When the backward
  // of that region needs memory for gradients, it has released some of these tensors. So the limit leaves room for
  // three gradients of `largest_bytes`, the size of the largest saved tensor that backward has yet to read. The plan in
  // force may have promised a lower limit (`most_held_bytes`). The swapped bytes that the plan allows on the device in
  // addition (`granted_bytes`) come on top.
  int64_t limit_bytes(int64_t largest_bytes) const {
    const int64_t limit = largest_region_bytes + peak_input_bytes - kTemporaries * largest_bytes;
    return std::min(limit, most_held_bytes.value_or(limit)) + granted_bytes;
  }

  // Returns the bytes of saved tensors on the device: captured and not released, prefetched, recomputed, or restored to
  // autograd.
  int64_t held_bytes() {
    return transfer->resident_bytes + transfer->prefetched_bytes + ledger->recomputed_bytes + ledger->restored.nbytes();
  }

  std::shared_ptr<Transfer> transfer;
  const c10::Device device;
  const bool regathers;
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  double share = 1; // factor on the number of rows that each decision swaps; below 1 once host memory has run out
  // most bytes of one forward's saved tensors, and of one saved tensor
  int64_t largest_region_bytes = 0, largest_saved_bytes = 0;
  int64_t peak_held_bytes = 0; // peak of `held_bytes` plus the bytes that the running frame had yet to recompute
  // most `held_bytes` that the plan in force has promised; none without a promise
  std::optional<int64_t> most_held_bytes;
  int64_t granted_bytes = 0; // swapped bytes that the plan allows on the device above the limit
  // most bytes of swapped tensors that the backward of one frame needs, each tensor rounded up to whole blocks
  int64_t largest_frame_bytes = 0;
  int64_t forwards = 0; // number of forwards so far
  std::unordered_set<Frame*> live; // frames in flight
  // bytes of swapped inputs of the forwards in flight at present, and their peak
  int64_t input_bytes = 0, peak_input_bytes = 0;
  int64_t expected_bytes = 0; // bytes that the forwards so far should have offloaded by their plans
  int64_t unplanned = 0; // number of forwards of regions without `forward_bytes`
  // number of forwards that raised an error, or whose tape differed from the one that their plan was made from
  int64_t strayed = 0;

 private:
  // most tapes for one class of regions, since input shapes may alternate (training, validation)
  static constexpr size_t kTapes = 4;
  // most large gradients that backward needs at a time: those of a gated MLP's product and of its two factors
  static constexpr int64_t kTemporaries = 3;

  void release_oldest();
  void release_others(const Frame& frame);
  void note_held(const Frame& frame);
  void number(const Frame& frame);
  bool has_room(const Swapped& part, int64_t pending_bytes, int64_t largest_bytes);

  int64_t min_offload_bytes_;
  size_t buffers_;
  int64_t over_ = 0; // number of forwards that have ended
  std::deque<std::weak_ptr<Frame>> resident_; // frames that are not released, oldest first
  // tapes of earlier forwards, by class of region
  std::map<std::string, std::vector<std::shared_ptr<const Tape>>> tapes_;
};

} // namespace memplug
