"""The codes of messages, and their sections in examples/troubleshooting.md."""

from __future__ import annotations

import ast
import re

from memplug.errors import ConfigError, MemplugError
from tests.support.folders import ROOT


def constants() -> list[str]:
    """Return the texts in memplug's Python; the fixed parts of a formatted text are joined with "…"."""
    texts = []
    for file in sorted((ROOT / "memplug").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(text)
                case ast.JoinedStr(values=parts):
                    texts.append("…".join(part.value for part in parts if isinstance(part, ast.Constant)))
    return [text.replace("`", "") for text in texts]


def sections() -> dict[str, str]:
    page = (ROOT / "examples/troubleshooting.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (MP\d{3}): .+\n((?:(?!## ).*\n)*)", page, re.M)
    assert len(found) == page.count("\n## ")
    assert len(found) == len(dict(found)), "a code has two sections"
    return dict(found)


def test_message_codes_and_troubleshooting_sections_match():
    assert list(sections()) == sorted({text for text in constants() if re.fullmatch(r"MP\d{3}", text)})


def test_troubleshooting_sections_quote_existing_messages():
    known = constants()
    for code, text in sections().items():
        messages = re.findall(r"`([^`]+)`", text.strip().partition("\n\n")[0])
        assert messages, code
        for part in (part.strip() for message in messages for part in message.split("…")):
            assert len(part) < 3 or any(part in each for each in known), f"{code}: {part}"


def test_troubleshooting_sections_have_reason_and_advice():
    for code, text in sections().items():
        assert re.search(r"\n\n\*\*Why:\*\* .*\n\n\*\*What to do:\*\* ", text, re.S), code


def test_error_text_has_advice_and_code():
    assert str(MemplugError("it failed", "Try again.", code="MP001")) == "it failed\nWhat to do: Try again. [MP001]"
    assert str(ConfigError(["bad"], "Mend it.")).endswith("bad\nWhat to do: Mend it.")
