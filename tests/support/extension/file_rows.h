// Stores rows in a file, for streams that run in program order. Any other store of rows needs only a class like this.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "row_store.h"

namespace memplug {

class FileRows final : public RowStore {
 public:
  explicit FileRows(const std::string& path)
      : file_(path, std::ios::in | std::ios::out | std::ios::binary | std::ios::trunc) {}

  std::optional<Slot> take(int64_t nbytes) override {
    used_bytes += nbytes;
    return Slot{0, std::exchange(end_, end_ + nbytes), nbytes, nbytes};
  }
  void give(const Slot& slot) override {
    used_bytes -= slot.nbytes;
  }
  void copy_out(Streams&, const StreamRef&, const Slot& slot, const at::Tensor& rows) override {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor packed = rows.resolve_conj().resolve_neg().contiguous();
    file_.seekp(slot.offset);
    file_.write(static_cast<const char*>(packed.const_data_ptr()), slot.nbytes);
  }
  void copy_in(Streams&, const StreamRef&, const at::Tensor& rows, const Slot& slot) override {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor packed = at::empty_like(rows, at::MemoryFormat::Contiguous);
    file_.seekg(slot.offset);
    file_.read(static_cast<char*>(packed.mutable_data_ptr()), slot.nbytes);
    rows.copy_(packed);
  }

  int64_t used_bytes = 0;

 private:
  std::fstream file_;
  int64_t end_ = 0;
};

} // namespace memplug
