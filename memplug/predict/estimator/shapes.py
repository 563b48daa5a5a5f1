"""Shapes of models as YAML: of a Llama, a Mixtral or a Qwen3 of Hugging Face's."""

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
"""No size of a model is as large."""

_MORE_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
"""Sizes that a file may leave out."""

_FAMILIES = {"llama": "Llama", "mixtral": "Mixtral", "qwen3": "Qwen3"}
"""How the names of Hugging Face's classes begin, by `model_type`."""
_BY_DEFAULT = {
    "Llama": (),
    "Mixtral": ("num_experts_per_tok", "num_key_value_heads"),
    "Qwen3": ("num_key_value_heads", "head_dim"),
}
"""Fields that others read too, as a family's configuration has them where a file does not say."""
_TAKEN = ("rope_theta", "rope_scaling")
"""Fields that transformers reads and writes under another name."""


@dataclass(frozen=True)
class Shape:
    """Of a model.

    Attributes:
        fields: of LlamaConfig, of MixtralConfig where `num_local_experts` is among them, or of the configuration that
            `model_type` names.
    """

    fields: Mapping[str, Any]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.fields["num_hidden_layers"]

    @property
    def family(self) -> str:
        """How the names of Hugging Face's classes begin: "Llama", "Mixtral" or "Qwen3"."""
        return "Mixtral" if self.is_mixture else _FAMILIES[self.fields.get("model_type", "llama")]

    @property
    def is_mixture(self) -> bool:
        """Whether its layers have experts."""
        return "num_local_experts" in self.fields

    @property
    def normalizes_heads(self) -> bool:
        """Whether a norm of its own goes over each head of queries and keys."""
        return self.family == "Qwen3"

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.fields.get("head_dim") or self.fields["hidden_size"] // self.fields["num_attention_heads"]

    @classmethod
    def read(cls, file: Path) -> Shape:
        """From a YAML file such as those of configs/models.

        Raises:
            EstimateError: it cannot be read, is of another kind of model, has a field that the model's configuration
                does not know, lacks a size or has one that is no whole number above 0, has a
                number that is not finite, its heads do not divide its
                hidden size, a token goes to more experts than there are, or transformers can make no model of it;
                transformers or PyYAML is missing.
        """
        yaml = needed("yaml", "PyYAML")
        try:
            fields = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise EstimateError(
                f"{file}: {error}", "Give the path of a model's shape, such as configs/models/7b.yaml."
            ) from None
        if not isinstance(fields, Mapping):
            raise EstimateError(f"{file} is no shape of a model", "Take configs/models/7b.yaml as an example.")
        shape = cls(dict(fields))
        shape._check_kind(file)
        shape = shape._filled()
        shape._check_sizes(file)
        shape._check_by_making(file)
        return shape

    def _filled(self) -> Shape:
        """As transformers reads it: with defaults, and as many key-value heads as heads where they are null."""
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
                f"{file}: model_type is {kind!r}, which is not estimated", f"It can be {', '.join(_FAMILIES)}."
            )
        if self.is_mixture != (kind == "mixtral") and "model_type" in self.fields:
            raise EstimateError(
                f"{file}: model_type is {kind!r}, and num_local_experts is {'' if self.is_mixture else 'not '}there",
                "Experts are a mixtral's: correct model_type, or num_local_experts.",
            )
        name = f"{self.family}Config"
        known = {*getattr(needed("transformers"), name)().to_dict(), *_TAKEN}
        unknown = sorted(str(each) for each in self.fields if each not in known)
        if unknown:
            advice = f"Leave it out, or correct it: the file has fields of transformers.{name}."
            raise EstimateError(f"{file}: {name} has no field {', '.join(unknown)}", advice)

    def _check_sizes(self, file: Path) -> None:
        for size in (*_SIZES, *(name for name in _MORE_SIZES if name in self.fields)):
            value = self.fields.get(size)
            if type(value) is not int or not 0 < value < LARGEST:  # nor true
                raise EstimateError(
                    f"{file}: {size} is {value!r}, which is no size of a model", f"Give {size} a whole number above 0."
                )
        for name, value in self.fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise EstimateError(f"{file}: {name} is {value}, which is no number of a model", "Give a finite one.")
        heads = self.fields["num_attention_heads"]
        groups = self.fields.get("num_key_value_heads", heads)
        divides = self.fields.get("head_dim") or self.family == "Qwen3" or not self.fields["hidden_size"] % heads
        if not divides or heads % groups:
            raise EstimateError(
                f"{file}: {heads} heads in {groups} groups do not divide a hidden size of {self.fields['hidden_size']}",
                "num_attention_heads has to divide hidden_size, where there is no head_dim, and num_key_value_heads "
                "num_attention_heads.",
            )
        experts, chosen = self.fields.get("num_local_experts", 0), self.fields.get("num_experts_per_tok", 0)
        if chosen > experts:
            raise EstimateError(
                f"{file}: num_experts_per_tok is {chosen}, and there are {experts} experts",
                "A token goes to num_experts_per_tok of the num_local_experts of a layer: give no more of them.",
            )

    def _check_by_making(self, file: Path) -> None:
        """Makes one layer without memory: transformers knows best what it takes, such as activations by name."""
        transformers = needed("transformers")
        try:
            config = getattr(transformers, f"{self.family}Config")(**{**self.fields, "num_hidden_layers": 1})
            with torch.device("meta"):
                getattr(transformers, f"{self.family}Model")(config)
        except Exception as error:  # whatever a model's code stumbles over in fields that it does not expect
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise EstimateError(
                f"{file}: transformers makes no {self.family} of it: {problem}",
                f"Correct the field: the file has fields of transformers.{self.family}Config.",
            ) from error


def needed(module: str, package: str | None = None) -> Any:
    """An optional package, imported.

    Args:
        package: its name for pip, where that is another one.

    Raises:
        EstimateError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module
        raise EstimateError(
            f"a model's shape needs {name}, which cannot be imported: {error}", f"pip install {name}"
        ) from None
