"""Runs training steps of a module on the virtual device; an error names what cannot run there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memplug.errors import EstimateError
from memplug.torch_private import tree_leaves, tree_map

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class VirtualTraining:
    """A module on the virtual device, with inputs and perhaps an optimizer; the virtual device must exist.

    Args:
        make_model: Makes the module; called with the virtual device as torch's default device. A module on another
            device, such as meta, is moved to the virtual device without its values.
        example_inputs: Makes the arguments of forward, on any device: a tensor, a tuple of positional arguments, or a
            mapping of keyword arguments.
        make_optimizer: Makes the optimizer from the module's parameters; None: gradients stay from step to step.

    Raises:
        EstimateError: The module cannot be made on the virtual device.
    """

    marks_steps = False
    """Whether `step` itself tells memplug that the step has ended."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        example_inputs: Callable[[], Any],
        make_optimizer: MakeOptimizer | None = None,
    ):
        self._device = torch.device("virtual", 0)
        try:
            with self._device:
                self.model = self._moved(make_model())
                inputs = tree_map(self._moved_tensor, example_inputs())
        except RuntimeError as error:
            raise unable("making the model", error) from error
        self._args: tuple[Any, ...] = ()
        self._kwargs: Mapping[str, Any] = {}
        if isinstance(inputs, Mapping):
            self._kwargs = inputs
        else:
            self._args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        self._optimizer = make_optimizer(self.model.parameters()) if make_optimizer is not None else None

    @property
    def target(self) -> Any:
        """Return the object that memplug attaches to."""
        return self.model

    @property
    def schedule_s(self) -> float | None:
        """Return how long forward and backward of all micro-batches took in the last step, in seconds.

        Synchronize the device first. Classes that do not measure this time, such as this one, return None.
        """
        return None

    def close(self) -> None:
        """Release global state that would keep the model alive; subclasses override this."""

    def step(self) -> None:
        """Run forward, backward and the optimizer.

        Backward starts from the outputs that `differentiable` returns. A single scalar gets torch's gradient of 1. In
        all other cases each output gets an uninitialised gradient of its own shape.

        Raises:
            EstimateError: An operator cannot run on the virtual device (for example because it needs values), or no
                output needs a gradient.
            torch.OutOfMemoryError: The virtual device's memory is used up.
        """
        try:
            self._train()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise unable("a step", error) from error

    def _train(self) -> None:
        outputs = differentiable(self.model(*self._args, **self._kwargs))
        is_loss = len(outputs) == 1 and outputs[0].dim() == 0  # torch makes a scalar's gradient
        torch.autograd.backward(outputs, None if is_loss else [torch.empty_like(output) for output in outputs])
        del outputs
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _moved_tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == self._device:
            return value
        return torch.empty_like(value, device=self._device, requires_grad=value.requires_grad)

    def _moved(self, model: nn.Module) -> nn.Module:
        """Move a model to the virtual device; shared parameters stay shared."""
        made: dict[torch.Tensor, Any] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device != self._device:
                    if parameter not in made:
                        tensor = self._moved_tensor(parameter.detach())
                        made[parameter] = nn.Parameter(tensor, parameter.requires_grad)
                    module._parameters[name] = made[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = made.setdefault(buffer, self._moved_tensor(buffer))
        return model


def differentiable(given: Any) -> list[torch.Tensor]:
    """Return the tensors from which backward starts.

    These are the output's tensors that need a gradient; if the output has a `loss`, only the tensors in the loss.

    Args:
        given: The output of the module's forward.

    Raises:
        EstimateError: No output needs a gradient.
    """
    outputs = dict(given) if isinstance(given, Mapping) else given  # Hugging Face's outputs are mappings
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    leaves = tree_leaves(outputs if loss is None else loss)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not found:
        raise EstimateError(
            "the module's forward returns nothing that needs a gradient", "Estimate a module that trains."
        )
    return found


def unable(what: str, error: Exception) -> EstimateError:
    """Return an EstimateError: `what` cannot run on the virtual device, because of the first line of `error`."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return EstimateError(
        f"{what} cannot run on the virtual device: {first}",
        "If it needs values of tensors, record those of one real step (`memplug.record_values`) and pass the file to "
        "the estimate (`trace`, `memplug estimate --trace`); or estimate a module without it.",
        code="MP028",
    )
