// Rows of a table that Python has packed.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace memplug {

template <typename T>
std::vector<T> rows_of(const pybind11::bytes& bytes) {
  const std::string_view view = bytes;
  std::vector<T> rows(view.size() / sizeof(T));
  std::copy_n(view.data(), rows.size() * sizeof(T), reinterpret_cast<char*>(rows.data()));
  return rows;
}

} // namespace memplug
