// What memplug's C++ uses of torch/csrc, which torch may change; see torch_private.h.
#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "torch_private.h"

namespace memplug {

// -- backward --

static_assert(std::is_same_v<decltype(torch::autograd::get_current_graph_task_id()), int>, "backwards have no numbers");
static_assert(
    std::is_same_v<decltype(torch::autograd::get_current_graph_task_keep_graph()), bool>, "backward hides what it keeps");
static_assert(
    std::is_convertible_v<decltype(*torch::autograd::get_current_node()), const torch::autograd::Node&>,
    "backward hides the node that it runs");
static_assert(
    std::is_convertible_v<decltype(std::declval<torch::autograd::Node&>().stream()), std::optional<c10::Stream>>,
    "torch::autograd::Node::stream does not say where a tensor is made");
static_assert(
    std::is_same_v<
        decltype(torch::autograd::impl::gradient_edge(std::declval<const at::Tensor&>())),
        torch::autograd::Edge> &&
        std::is_void_v<decltype(torch::autograd::impl::set_gradient_edge(
            std::declval<const at::Tensor&>(), std::declval<torch::autograd::Edge>()))>,
    "a tensor's place in the graph cannot be put back");

// -- Python's tensors --

static_assert(
    std::is_same_v<decltype(THPVariable_Wrap(std::declval<at::Tensor>())), PyObject*> &&
        std::is_convertible_v<decltype(THPVariable_Unpack(std::declval<PyObject*>())), const at::Tensor&> &&
        std::is_same_v<decltype(THPVariable_Check(nullptr)), bool> &&
        std::is_same_v<decltype(THPVariable_CheckExact(nullptr)), bool>,
    "THPVariable_* do not turn tensors into Python's");
static_assert(
    std::is_same_v<decltype(THPVariableClass), PyObject*> && std::is_same_v<decltype(ParameterClass), PyObject*>,
    "the classes of tensors and parameters are hidden");
static_assert(
    std::is_pointer_v<decltype(torch::getTHPDtype(c10::ScalarType::Float))>,
    "torch::getTHPDtype gives no object of Python's");
static_assert(
    std::is_void_v<decltype(torch::translate_exception_to_python(std::declval<std::exception_ptr>()))> ||
        std::is_same_v<decltype(torch::translate_exception_to_python(std::declval<std::exception_ptr>())), bool>,
    "torch::translate_exception_to_python is another function");

} // namespace memplug
