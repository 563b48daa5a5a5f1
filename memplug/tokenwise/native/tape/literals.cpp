// Literals: tensors of Python values, such as `torch.tensor([1, 2])`. torch makes one in four steps: it requests CPU
// memory (`empty`), writes the values without an operator, copies the memory to the tensor's device or dtype
// (`_to_copy`), and returns the copy (`lift_fresh`). No recompute pass could repeat the second step. So the forward
// treats the tensor as given from then on, and marks the operators that made it as never to run again.
#include <algorithm>

#include "forward.h"
#include "layouts.h"

namespace memplug {
namespace {

// limit for one forward, since literals stay until backward, and no plan counts their bytes
constexpr int64_t MOST_LITERAL_BYTES = 1 << 20;

bool makes_by_itself(const Record& record) {
  return record.outputs.size() == 1 && !record.reads(record.outputs.front().storage);
}

bool asks_for_memory(const Record& record) {
  return record.op->has(BLANK) && record.inputs.empty() && makes_by_itself(record);
}

bool copies_elsewhere(const Record& record) {
  return record.op->schema_name == "aten::_to_copy" && record.inputs.size() == 1 && makes_by_itself(record);
}

} // namespace

const Record* Forward::only_user(int32_t storage, size_t end) const {
  const auto& records = tape().records;
  for (size_t i = end; i-- > 0;) {
    const bool returned = std::any_of(records[i].outputs.begin(), records[i].outputs.end(), [&](const Use& use) {
      return use.storage == storage;
    });
    if (records[i].reads(storage)) {
      return nullptr;
    }
    if (returned) {
      return &records[i];
    }
  }
  return nullptr;
}

bool Forward::copies_blank(size_t index) const {
  const Record& record = tape().records[index];
  const Record* const made =
      copies_elsewhere(record) ? only_user(record.inputs.front().storage, index) : nullptr;
  return made != nullptr && asks_for_memory(*made);
}

std::vector<size_t> Forward::makers_of_literal(int32_t storage, size_t index) const {
  const Record* const made = only_user(storage, index);
  if (made == nullptr || is_captured(storage) || counted_[storage] ||
      literal_bytes_ + storages.nbytes[storage] > MOST_LITERAL_BYTES) {
    return {};
  }
  const auto number = static_cast<size_t>(made - tape().records.data());
  if (asks_for_memory(*made)) {
    return {number};
  }
  if (!copies_blank(number)) {
    return {};
  }
  const Record* const asked = only_user(made->inputs.front().storage, number);
  return {static_cast<size_t>(asked - tape().records.data()), number};
}

void Forward::lift(size_t index, const at::Tensor& tensor) {
  const int32_t storage = is_plain(tensor) ? storages.find(tensor) : -1;
  if (storage < 0 || storages.given[storage]) {
    return;
  }
  const auto makers = makers_of_literal(storage, index);
  if (followed_ != nullptr && followed_->given[storage] == makers.empty()) {
    depart(begun_);
  }
  for (const size_t maker : makers) {
    const Record& record = tape().records[maker];
    storages.given[record.outputs.front().storage] = true;
    if (followed_ == nullptr) {
      noted_->records[maker].form = Form::VIEW;
      noted_->records[maker].made.clear();
    }
  }
  if (!makers.empty()) {
    literal_bytes_ += storages.nbytes[storage];
    literals_.push_back(storage);
    give(storage, tensor, begun_);
  }
}

void Forward::unlift(std::vector<Record>& records) const {
  for (Record& record : records) {
    if (asks_for_memory(record) || copies_elsewhere(record)) {
      // if the operator has not run in this forward, its output may have no number here yet
      const auto storage = static_cast<size_t>(record.outputs.front().storage);
      if (storage >= storages.size() || !storages.given[storage]) {
        record.form = Form::PURE;
        record.made = {record.outputs.front().storage};
      }
    }
  }
}

bool Forward::is_literal(int32_t storage) const {
  return std::find(literals_.begin(), literals_.end(), storage) != literals_.end();
}

} // namespace memplug
