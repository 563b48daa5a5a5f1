"""Reads the shape of a Hugging Face Llama, Mixtral or Qwen3 from a YAML file."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memplug.errors import EstimateError

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LARGEST = 2**31
"""Upper limit (exclusive) of every size in a file."""

_MORE_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
"""Sizes that a file may leave out."""

_FAMILIES = {"llama": "Llama", "mixtral": "Mixtral", "qwen3": "Qwen3"}
"""Prefix of Hugging Face's class names, by `model_type`."""
_BY_DEFAULT = {
    "Llama": (),
    "Mixtral": ("num_experts_per_tok", "num_key_value_heads"),
    "Qwen3": ("num_key_value_heads", "head_dim"),
}
"""Fields, by family, that other code reads; a field that the file omits gets the configuration class's default."""
_TAKEN = ("rope_theta", "rope_scaling")
"""Fields that configuration classes of transformers accept, but whose names `to_dict` does not list."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        fields: Fields of a configuration class of transformers. If `num_local_experts` is among them, the class is
            MixtralConfig; otherwise `model_type` names the class, by default LlamaConfig.
    """

    fields: Mapping[str, Any]

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return self.fields["num_hidden_layers"]

    @property
    def family(self) -> str:
        """Return the prefix of Hugging Face's class names: "Llama", "Mixtral" or "Qwen3"."""
        return "Mixtral" if self.is_mixture else _FAMILIES[self.fields.get("model_type", "llama")]

    @property
    def is_mixture(self) -> bool:
        """Return whether the layers have experts."""
        return "num_local_experts" in self.fields

    @property
    def normalizes_heads(self) -> bool:
        """Return whether each head of queries and keys has a norm."""
        return self.family == "Qwen3"

    @property
    def head_size(self) -> int:
        """Return the number of elements of one head."""
        return self.fields.get("head_dim") or self.fields["hidden_size"] // self.fields["num_attention_heads"]

    @classmethod
    def read(cls, file: Path) -> Shape:
        """Read a shape from a YAML file such as configs/models/7b.yaml.

        Args:
            file: The YAML file.

        Raises:
            EstimateError: The file cannot be read; it does not describe a model that can be estimated; or transformers
                or PyYAML is missing.
        """
        yaml = needed("yaml", "PyYAML")
        try:
            fields = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise EstimateError(
                f"{file}: {error}", "Give the path of a model's shape, such as configs/models/7b.yaml."
            ) from None
        if not isinstance(fields, Mapping):
            raise EstimateError(f"{file} does not describe a model", "See configs/models/7b.yaml for an example.")
        shape = cls(dict(fields))
        shape._check_kind(file)
        shape = shape._filled()
        shape._check_sizes(file)
        shape._check_by_making(file)
        return shape

    def _filled(self) -> Shape:
        """Return the shape with transformers' defaults for missing fields of `_BY_DEFAULT`.

        If `num_key_value_heads` is null, it becomes the number of heads. If `head_dim` is null, it is removed.
        """
        config = getattr(needed("transformers"), f"{self.family}Config")()
        fields = {**{name: getattr(config, name) for name in _BY_DEFAULT[self.family]}, **self.fields}
        if fields.get("num_key_value_heads", 1) is None:
            fields["num_key_value_heads"] = fields.get("num_attention_heads")
        if fields.get("head_dim", 1) is None:
            del fields["head_dim"]
        return Shape(fields)

    def _check_kind(self, file: Path) -> None:
        kind = self.fields.get("model_type", "llama")
        if not isinstance(kind, str) or kind not in _FAMILIES:
            raise EstimateError(
                f"{file}: model_type is {kind!r}, which cannot be estimated", f"Use one of {', '.join(_FAMILIES)}."
            )
        if self.is_mixture != (kind == "mixtral") and "model_type" in self.fields:
            raise EstimateError(
                f"{file}: model_type is {kind!r}, but num_local_experts is {'given' if self.is_mixture else 'missing'}",
                "Only a mixtral has experts: correct model_type or num_local_experts.",
            )
        name = f"{self.family}Config"
        known = {*getattr(needed("transformers"), name)().to_dict(), *_TAKEN}
        unknown = sorted(str(each) for each in self.fields if each not in known)
        if unknown:
            advice = f"Remove or correct it: a file may have the fields of transformers.{name}."
            raise EstimateError(f"{file}: {name} has no field {', '.join(unknown)}", advice)

    def _check_sizes(self, file: Path) -> None:
        for size in (*_SIZES, *(name for name in _MORE_SIZES if name in self.fields)):
            value = self.fields.get(size)
            if type(value) is not int or not 0 < value < LARGEST:  # not `isinstance`: True is an int too
                raise EstimateError(
                    f"{file}: {size} is {value!r}, which is not a size",
                    f"Give {size} a whole number from 1 to {LARGEST - 1}.",
                )
        for name, value in self.fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise EstimateError(f"{file}: {name} is {value}, which is not finite", f"Give {name} a finite number.")
        heads = self.fields["num_attention_heads"]
        groups = self.fields.get("num_key_value_heads", heads)
        divides = self.fields.get("head_dim") or self.family == "Qwen3" or not self.fields["hidden_size"] % heads
        if not divides or heads % groups:
            raise EstimateError(
                f"{file}: {heads} heads in {groups} groups do not divide a hidden size of {self.fields['hidden_size']}",
                "Without head_dim, num_attention_heads has to divide hidden_size; num_key_value_heads has to divide "
                "num_attention_heads.",
            )
        experts, chosen = self.fields.get("num_local_experts", 0), self.fields.get("num_experts_per_tok", 0)
        if chosen > experts:
            raise EstimateError(
                f"{file}: num_experts_per_tok is {chosen}, but there are {experts} experts",
                "A token goes to num_experts_per_tok of a layer's num_local_experts: lower num_experts_per_tok.",
            )

    def _check_by_making(self, file: Path) -> None:
        """Make a model of one layer on the meta device, to find values that transformers does not accept.

        Only transformers knows, for example, the names of its activations.
        """
        transformers = needed("transformers")
        try:
            config = getattr(transformers, f"{self.family}Config")(**{**self.fields, "num_hidden_layers": 1})
            with torch.device("meta"):
                getattr(transformers, f"{self.family}Model")(config)
        except Exception as error:  # the class of the error depends on the bad value
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise EstimateError(
                f"{file}: transformers cannot make a {self.family} from it: {problem}",
                f"Correct the field: a file has the fields of transformers.{self.family}Config.",
            ) from error


def needed(module: str, package: str | None = None) -> Any:
    """Import an optional package and return it.

    Args:
        module: The module to import.
        package: The package's name for pip; None: the module's name.

    Raises:
        EstimateError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module
        raise EstimateError(
            f"a model's shape needs {name}, which cannot be imported: {error}", f"pip install {name}"
        ) from None
