"""Shapes of models as YAML: of a Llama or a Mixtral of Hugging Face's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplug.errors import EstimateError

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_OF_MIXTURES = ("num_experts_per_tok", "num_key_value_heads")
"""Fields that others read too, as MixtralConfig has them where a file does not say."""
_TAKEN = ("rope_theta", "rope_scaling")
"""Fields that transformers reads and writes under another name."""


@dataclass(frozen=True)
class Shape:
    """Of a model.

    Attributes:
        fields: of LlamaConfig, or of MixtralConfig where `num_local_experts` is among them.
    """

    fields: Mapping[str, Any]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.fields["num_hidden_layers"]

    @property
    def is_mixture(self) -> bool:
        """Whether its layers have experts."""
        return "num_local_experts" in self.fields

    @classmethod
    def read(cls, file: Path) -> Shape:
        """From a YAML file such as those of configs/models.

        Raises:
            EstimateError: it cannot be read, has a field that the model's configuration does not know, lacks a size, or
                its heads do not divide its hidden size; transformers or PyYAML is missing.
        """
        yaml = needed("yaml", "PyYAML")
        try:
            fields = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise EstimateError(
                f"{file}: {error}", "Give the path of a model's shape, such as configs/models/7b.yaml."
            ) from None
        if not isinstance(fields, Mapping):
            raise EstimateError(f"{file} is no shape of a model", "Take configs/models/7b.yaml as an example.")
        shape = cls(dict(fields))
        shape._check(file)
        if shape.is_mixture:
            config = needed("transformers").MixtralConfig()
            shape = cls({**{name: getattr(config, name) for name in _OF_MIXTURES}, **shape.fields})
        return shape

    def _check(self, file: Path) -> None:
        name = "MixtralConfig" if self.is_mixture else "LlamaConfig"
        known = {*getattr(needed("transformers"), name)().to_dict(), *_TAKEN}
        unknown = sorted(str(each) for each in self.fields if each not in known)
        if unknown:
            advice = f"Leave it out, or correct it: the file has fields of transformers.{name}."
            raise EstimateError(f"{file}: {name} has no field {', '.join(unknown)}", advice)
        for size in _SIZES:
            value = self.fields.get(size)
            if not isinstance(value, int) or value < 1:
                raise EstimateError(
                    f"{file}: {size} is {value!r}, which is no size of a model", f"Give {size} a whole number above 0."
                )
        heads = self.fields["num_attention_heads"]
        groups = self.fields.get("num_key_value_heads", heads)
        if self.fields["hidden_size"] % heads or heads % groups:
            raise EstimateError(
                f"{file}: {heads} heads in {groups} groups do not divide a hidden size of {self.fields['hidden_size']}",
                "num_attention_heads has to divide hidden_size, and num_key_value_heads num_attention_heads.",
            )


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
