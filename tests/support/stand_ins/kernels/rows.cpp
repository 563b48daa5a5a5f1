#include "rows.h"

#include <numeric>

namespace stand_ins {
namespace {

Tensor new_map(const Tensor& like, std::vector<int64_t> sizes) {
  return at::empty(sizes, like.options().dtype(at::kLong).requires_grad(false));
}

} // namespace

Tensor gather_rows(const Tensor& input, const Tensor& sources) {
  check_contiguous(sources, "the sources of rows");
  const Tensor out = at::empty({sources.size(0), input.size(-1)}, input.options().requires_grad(false));
  const Elements x = elements(input), y = elements(out);
  const int64_t* from = sources.const_data_ptr<int64_t>();
  const int64_t each = sources.dim() > 1 ? sources.size(1) : 1;
  launch("gather_rows", {input, sources}, {out}, [=] {
    const Floats values = x.read();
    Floats made(y.rows * y.columns, 0.0f);
    for (int64_t i = 0; i < y.rows * each; ++i) {
      for (int64_t j = 0; j < y.columns && from[i] >= 0; ++j) {
        made[i / each * y.columns + j] += values[from[i] * y.columns + j];
      }
    }
    y.write(made);
  });
  return out;
}

Tensor row_map(const Tensor& routing) {
  check_contiguous(routing, "the routing map");
  const int64_t rows = routing.size(0), experts = routing.size(1);
  const Tensor map = new_map(routing, {rows, experts});
  const auto* goes = static_cast<const uint8_t*>(routing.const_data_ptr());
  TORCH_CHECK(routing.element_size() == 1, "the routing map is not of bool or bytes");
  int64_t* places = map.data_ptr<int64_t>();
  launch("row_map", {routing}, {map}, [=] {
    int64_t place = 0;
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t t = 0; t < rows; ++t) {
        places[t * experts + e] = goes[t * experts + e] ? place++ : -1;
      }
    }
  });
  return map;
}

std::tuple<Tensor, Tensor> invert_row_map(const Tensor& map, int64_t count) {
  const Tensor rows = new_map(map, {count}), pairs = new_map(map, {count});
  const int64_t experts = map.size(1), all = map.numel();
  const int64_t* places = map.const_data_ptr<int64_t>();
  int64_t *to_rows = rows.data_ptr<int64_t>(), *to_pairs = pairs.data_ptr<int64_t>();
  launch("invert_row_map", {map}, {rows, pairs}, [=] {
    std::fill_n(to_rows, count, -1);
    std::fill_n(to_pairs, count, -1);
    for (int64_t i = 0; i < all; ++i) {
      if (places[i] >= 0 && places[i] < count) {
        to_rows[places[i]] = i / experts;
        to_pairs[places[i]] = i;
      }
    }
  });
  return {rows, pairs};
}

std::tuple<Tensor, Tensor> chunk_map(const Tensor& sizes, const Tensor& order, int64_t rows) {
  const Tensor sources = new_map(order, {rows}), reverse = new_map(order, {rows});
  const int64_t chunks = sizes.numel();
  const int64_t *lengths = sizes.const_data_ptr<int64_t>(), *which = order.const_data_ptr<int64_t>();
  int64_t *to_sources = sources.data_ptr<int64_t>(), *to_reverse = reverse.data_ptr<int64_t>();
  launch("chunk_map", {sizes, order}, {sources, reverse}, [=] {
    std::fill_n(to_sources, rows, -1);
    std::fill_n(to_reverse, rows, -1);
    int64_t place = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t begin = std::accumulate(lengths, lengths + which[c], int64_t{0});
      for (int64_t i = begin; i < begin + lengths[which[c]]; ++i) {
        to_reverse[i] = place;
        to_sources[place++] = i;
      }
    }
  });
  return {sources, reverse};
}

} // namespace stand_ins
