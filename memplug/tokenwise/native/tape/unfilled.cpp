#include "unfilled.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "exchange.h"

namespace memplug {
namespace {

constexpr int64_t MOST_SPANS = 1 << 18; // limit on the number of byte ranges of one view

struct Dimension {
  int64_t size, stride; // stride in bytes
};

// The bytes of a tensor within its storage. `dimensions`: those of more than one element, with the longest stride
// first. A dimension that lies densely within another one is merged with that one.
struct View {
  int64_t offset = 0; // in bytes
  c10::SmallVector<Dimension, 5> dimensions;

  static View of(const Geometry& geometry) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(geometry.dtype));
    View view{geometry.offset * itemsize, {}};
    for (size_t i = 0; i < geometry.size.size(); ++i) {
      view.dimensions.push_back({geometry.size[i], geometry.stride[i] * itemsize});
    }
    view.dimensions.push_back({itemsize, 1});
    view.simplify();
    return view;
  }

  void simplify() {
    const auto end = std::remove_if(dimensions.begin(), dimensions.end(), [](const Dimension& each) {
      return each.size == 1 || each.stride == 0;
    });
    dimensions.erase(end, dimensions.end());
    std::stable_sort(dimensions.begin(), dimensions.end(), [](const Dimension& one, const Dimension& other) {
      return one.stride > other.stride;
    });
    for (size_t i = dimensions.size(); i-- > 1;) {
      Dimension& outer = dimensions[i - 1];
      const Dimension& inner = dimensions[i];
      if (outer.stride == inner.size * inner.stride) {
        outer = {outer.size * inner.size, inner.stride};
        dimensions.erase(dimensions.begin() + static_cast<int64_t>(i));
      }
    }
  }

  bool is_all_of(int64_t nbytes) const {
    return offset == 0 && dimensions.size() == 1 && dimensions[0].size == nbytes && dimensions[0].stride == 1;
  }

  // Returns whether the view covers the same bytes in each piece, if a storage of `nbytes` is cut into pieces of
  // `piece` bytes.
  bool repeats(int64_t piece, int64_t nbytes) const {
    if (dimensions.empty() || dimensions[0].size * dimensions[0].stride != nbytes || piece % dimensions[0].stride != 0) {
      return false;
    }
    int64_t end = offset + 1;
    for (size_t i = 1; i < dimensions.size(); ++i) {
      end += (dimensions[i].size - 1) * dimensions[i].stride;
    }
    return end <= dimensions[0].stride;
  }
};

// An access to a view of a storage: a write to all of its elements (`fills`), or a read.
struct Access {
  View view;
  bool fills;
};

using Spans = std::vector<std::pair<int64_t, int64_t>>; // half-open ranges of bytes, in order

// Returns the byte ranges of a view, in order; none if there are more than `MOST_SPANS`.
std::optional<Spans> spans_of(const View& view) {
  auto outer = view.dimensions;
  int64_t length = 1, count = 1;
  if (!outer.empty() && outer.back().stride == 1) {
    length = outer.back().size;
    outer.pop_back();
  }
  Spans spans{{view.offset, view.offset + length}};
  for (const Dimension& dimension : outer) {
    count = spans.size() * dimension.size;
    if (count > MOST_SPANS) {
      return std::nullopt;
    }
    Spans all;
    all.reserve(count);
    for (const auto& [begin, end] : spans) {
      for (int64_t i = 0; i < dimension.size; ++i) {
        all.emplace_back(begin + i * dimension.stride, end + i * dimension.stride);
      }
    }
    spans = std::move(all);
  }
  std::sort(spans.begin(), spans.end());
  return spans;
}

bool overlap(const Spans& ones, const Spans& others) {
  auto other = others.begin();
  for (const auto& [begin, end] : ones) {
    while (other != others.end() && other->second <= begin) {
      ++other;
    }
    if (other != others.end() && other->first < end) {
      return true;
    }
  }
  return false;
}

// Returns the ranges of `ones` without the bytes of `others`.
Spans without(const Spans& ones, const Spans& others) {
  Spans rest;
  auto other = others.begin();
  for (auto [begin, end] : ones) {
    while (other != others.end() && other->second <= begin) {
      ++other;
    }
    for (auto each = other; each != others.end() && each->first < end && begin < end; ++each) {
      if (begin < each->first) {
        rest.emplace_back(begin, each->first);
      }
      begin = std::max(begin, each->second);
    }
    if (begin < end) {
      rest.emplace_back(begin, end);
    }
  }
  return rest;
}

// Reduces the accesses to the first row of a storage, if each access is the same in every row: a storage may have
// millions of rows. Returns the number of bytes that are left to examine, from the start of the storage.
int64_t narrow(std::vector<Access>& accesses, int64_t nbytes) {
  for (;;) {
    int64_t piece = 0;
    for (const Access& access : accesses) {
      if (!access.view.is_all_of(nbytes) && !access.view.dimensions.empty()) {
        piece = std::max(piece, access.view.dimensions[0].stride);
      }
    }
    const bool repeat = piece > 1 && std::all_of(accesses.begin(), accesses.end(), [&](const Access& access) {
      return access.view.is_all_of(nbytes) || access.view.repeats(piece, nbytes);
    });
    if (!repeat) {
      return nbytes;
    }
    for (Access& access : accesses) {
      Dimension& outer = access.view.dimensions[0];
      outer.size = piece / outer.stride;
      access.view.simplify();
    }
    nbytes = piece;
  }
}

// State of uninitialized memory after some accesses: filled, filled in part, or read where it was not filled.
enum class Contents : uint8_t { FILLED, IN_PART, READ_BEFORE };

Contents contents_after(std::vector<Access> accesses, int64_t nbytes) {
  nbytes = narrow(accesses, nbytes);
  Spans unfilled{{0, nbytes}};
  for (const Access& access : accesses) {
    const auto spans = spans_of(access.view);
    if (!access.fills && (!spans || overlap(unfilled, *spans))) {
      return Contents::READ_BEFORE;
    }
    if (access.fills && spans) {
      unfilled = without(unfilled, *spans);
      if (unfilled.empty()) {
        return Contents::FILLED;
      }
    }
  }
  return Contents::IN_PART;
}

bool reads_unfilled(const std::vector<Access>& accesses, int64_t nbytes) {
  const auto last = std::find_if(accesses.rbegin(), accesses.rend(), [](const Access& access) { return access.fills; });
  if (last == accesses.rend()) {
    return true;
  }
  // leave out, at first, all reads after the last write: `narrow` cannot reduce accesses if some of them read single
  // rows
  const Contents filled = contents_after({accesses.begin(), last.base()}, nbytes);
  return filled == Contents::READ_BEFORE ||
      (filled == Contents::IN_PART && contents_after(accesses, nbytes) == Contents::READ_BEFORE);
}

// How an operator writes to a tensor. READS: it also reads the tensor. PART: it overwrites some elements. ALL: it
// overwrites all of them.
enum class Write : uint8_t { READS, PART, ALL };

// Returns whether an operator is an in-place broadcast from another rank.
bool receives(const Record& record) {
  const bool is_functional = record.op->schema_name == "_c10d_functional::broadcast_";
  if (!is_functional && record.op->schema_name != "c10d::broadcast_") {
    return false;
  }
  const int64_t rank = rank_in(record.arguments[is_functional ? 2 : 1]);
  return rank >= 0 && rank != record.arguments[is_functional ? 1 : 2].toInt();
}

// Returns whether an operator that writes by indices overwrites the whole tensor. Compares the number of elements that
// it writes with that of the tensor, and assumes that the indices are distinct, as in a permutation.
bool scatters_to_all(const Record& record, const Use& written) {
  const auto counted = std::find_if(record.inputs.begin(), record.inputs.end(), [&](const Use& use) {
    return use.path.position == record.op->scattered;
  });
  return counted != record.inputs.end() &&
      c10::multiply_integers(c10::IntArrayRef(counted->geometry.size)) ==
      c10::multiply_integers(c10::IntArrayRef(written.geometry.size));
}

// Returns how an operator writes to `written`, one of its arguments.
Write write_of(const Record& record, const Use& written) {
  const Operator& op = *record.op;
  // a unit's kernels are assumed to fill the tensors that they write to
  if (op.has(FILLS) || op.has(UNIT) || receives(record)) {
    return Write::ALL;
  }
  if (!op.has(PARTIAL) || (op.accumulate >= 0 && record.arguments[op.accumulate].toBool())) {
    return Write::READS;
  }
  return scatters_to_all(record, written) ? Write::ALL : Write::PART;
}

bool is_empty(const Geometry& geometry) {
  return std::find(geometry.size.begin(), geometry.size.end(), 0) != geometry.size.end();
}

} // namespace

bool has_unfilled(const Tape& tape) {
  std::map<int32_t, std::vector<Access>> blank; // accesses to requested memory, by storage, in program order
  const auto add = [&](const Use& use, bool fills) {
    const auto found = blank.find(use.storage);
    if (found != blank.end() && !is_empty(use.geometry)) {
      found->second.push_back({View::of(use.geometry), fills});
    }
  };
  for (const Record& record : tape.records) {
    const Operator& op = *record.op;
    if (op.has(BLANK)) {
      for (const int32_t storage : record.made) {
        if (tape.nbytes[storage] > 0) {
          blank[storage];
        }
      }
    }
    if (blank.empty() || op.has(BLANK) || op.has(FACTORY) || record.form == Form::VIEW) {
      continue;
    }
    for (const bool writing : {false, true}) { // an operator reads before it writes
      for (const Use& use : record.inputs) {
        if (op.has(UNIT) && !op.writes_to(use.path.position) && record.writes(use.storage)) {
          continue; // a unit's operator also lists written tensors in its second list; only that counts
        }
        const Write write = op.writes_to(use.path.position) ? write_of(record, use) : Write::READS;
        if (write == (writing ? Write::ALL : Write::READS)) {
          add(use, writing);
        }
      }
    }
  }
  for (const Save& save : tape.saves) {
    add(save.use, false); // backward reads the tensor after all operators of the forward
  }
  return std::any_of(blank.begin(), blank.end(), [&](const auto& each) {
    return reads_unfilled(each.second, tape.nbytes[each.first]);
  });
}

} // namespace memplug
