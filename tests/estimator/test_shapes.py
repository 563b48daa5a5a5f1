"""Shapes of models: the files that are there, and those that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplug.errors import EstimateError
from memplug.estimator.shapes import Shape
from tests.support.folders import ROOT

pytest.importorskip("transformers")
SEVEN = (ROOT / "configs" / "models" / "7b.yaml").read_text()


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "models").glob("*.yaml")), ids=lambda file: file.stem)
def test_those_that_are_shipped_are_some(file: Path) -> None:
    shape = Shape.read(file)
    assert shape.layers > 1 and shape.is_mixture is ("mixtral" in file.stem)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SEVEN.replace("hidden_size: 4096", ""), "hidden_size is None"),
        (SEVEN.replace("num_hidden_layers: 32", "num_hidden_layers: 0"), "num_hidden_layers is 0"),
        (SEVEN.replace("num_attention_heads: 32", "num_attention_heads: 33"), "33 heads"),
        (SEVEN.replace("vocab_size: 32000", "vocab_size: many"), "vocab_size is 'many'"),
        (SEVEN + "hiden_size: 3\n", "no field hiden_size"),
        ("- 7\n", "no shape of a model"),
        ("{", "line 1"),
        (None, "No such file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(EstimateError, match=said):
        Shape.read(file)
