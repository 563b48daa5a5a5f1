// Bindings for Python: functions that torch does not know.
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "eight_bits.h"
#include "matmul.h"
#include "rows.h"

// pybind holds torch.dtype as a Python object
#include <torch/csrc/Dtype.h>

namespace py = pybind11;
using namespace stand_ins;

namespace {

at::ScalarType type_of(const py::object& dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

// Unpacks (tensor, scale_inv or None, block, transposed).
Operand operand_of(const py::tuple& parts) {
  return {parts[0].cast<Tensor>(), parts[1].cast<std::optional<Tensor>>(), parts[2].cast<int64_t>(),
          parts[3].cast<bool>()};
}

} // namespace

PYBIND11_MODULE(stand_in_kernels, module) {
  module.def("gemm", [](const py::tuple& a, const py::tuple& b, const std::string& layout, const py::object& dtype,
                        std::optional<Tensor> out, std::optional<Tensor> bias, bool accumulate, bool with_bias_grad) {
    return gemm(operand_of(a), operand_of(b), layout, type_of(dtype), out, bias, accumulate, with_bias_grad);
  });
  module.def("norm_forward", norm_forward);
  module.def("norm_backward", norm_backward);
  module.def("activation_forward", activation_forward);
  module.def("activation_backward", activation_backward);

  py::class_<Attention>(module, "Attention")
      .def(py::init([](const std::string& format, double scale, bool causal, bool bottom_right, int64_t left,
                       double dropout, std::optional<Tensor> query_starts, std::optional<Tensor> key_starts) {
             return Attention{format, scale, causal, bottom_right, left, dropout, query_starts, key_starts};
           }),
           py::arg("format"), py::arg("scale"), py::arg("causal"), py::arg("bottom_right") = false,
           py::arg("left") = -1, py::arg("dropout") = 0.0, py::arg("query_starts") = py::none(),
           py::arg("key_starts") = py::none());
  module.def("attention_forward", attention_forward);
  module.def("attention_backward", attention_backward);
  module.def("next_random", next_random);
  module.def("seeds", seeds);
  module.def("rotate", rotate);
  module.def("gather_rows", gather_rows);
  module.def("row_map", row_map);
  module.def("invert_row_map", invert_row_map);
  module.def("chunk_map", chunk_map);

  py::enum_<Scaling>(module, "Scaling")
      .value("delayed", Scaling::delayed)
      .value("current", Scaling::current)
      .value("block", Scaling::block)
      .value("power_of_two_block", Scaling::power_of_two_block);
  module.def("quantize", [](const Tensor& input, std::optional<Tensor> scale, std::optional<Tensor> amax,
                            const py::object& dtype, Scaling scaling, int64_t block, bool transposed,
                            std::optional<std::tuple<Tensor, Tensor>> out) {
    return quantize(input, scale, amax, type_of(dtype), scaling, block, transposed, out);
  });
  module.def("dequantize", [](const py::tuple& operand, const py::object& dtype) {
    return dequantize(operand_of(operand), type_of(dtype));
  });
  module.def("transpose", transpose);
  module.def("update_scales", update_scales);
}
