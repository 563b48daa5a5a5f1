// The parts of torch/csrc that memplug's C++ uses and torch may change; see torch_private.h.
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

static_assert(std::is_same_v<decltype(torch::autograd::get_current_graph_task_id()), int>, "backward has no number");
static_assert(
    std::is_same_v<decltype(torch::autograd::get_current_graph_task_keep_graph()), bool>,
    "backward does not tell whether it keeps the graph");
static_assert(
    std::is_convertible_v<decltype(*torch::autograd::get_current_node()), const torch::autograd::Node&>,
    "backward does not tell which node it runs");
static_assert(
    std::is_convertible_v<decltype(std::declval<torch::autograd::Node&>().stream()), std::optional<c10::Stream>>,
    "torch::autograd::Node::stream does not return a node's stream");
static_assert(
    std::is_same_v<
        decltype(torch::autograd::impl::gradient_edge(std::declval<const at::Tensor&>())),
        torch::autograd::Edge> &&
        std::is_void_v<decltype(torch::autograd::impl::set_gradient_edge(
            std::declval<const at::Tensor&>(), std::declval<torch::autograd::Edge>()))>,
    "a tensor's place in the graph cannot be restored");

// -- Python's tensors --

static_assert(
    std::is_same_v<decltype(THPVariable_Wrap(std::declval<at::Tensor>())), PyObject*> &&
        std::is_convertible_v<decltype(THPVariable_Unpack(std::declval<PyObject*>())), const at::Tensor&> &&
        std::is_same_v<decltype(THPVariable_Check(nullptr)), bool> &&
        std::is_same_v<decltype(THPVariable_CheckExact(nullptr)), bool>,
    "THPVariable_* do not convert tensors to and from Python");
static_assert(
    std::is_same_v<decltype(THPVariableClass), PyObject*> && std::is_same_v<decltype(ParameterClass), PyObject*>,
    "the Python classes of tensors and parameters are not accessible");
static_assert(
    std::is_pointer_v<decltype(torch::getTHPDtype(c10::ScalarType::Float))>,
    "torch::getTHPDtype does not return a Python object");
static_assert(
    std::is_void_v<decltype(torch::translate_exception_to_python(std::declval<std::exception_ptr>()))> ||
        std::is_same_v<decltype(torch::translate_exception_to_python(std::declval<std::exception_ptr>())), bool>,
    "torch::translate_exception_to_python has another signature");

} // namespace memplug
