// Converts rows of a table to and from the bytes that Python packs and unpacks.
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

template <typename T>
pybind11::bytes bytes_of(const std::vector<T>& rows) {
  return pybind11::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(T));
}

} // namespace memplug
