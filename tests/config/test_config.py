"""The "memplug" block: what is accepted, what is refused, and what the refusal says."""

import json
import logging
import pickle
import re
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from memplug.block import SECTIONS
from memplug.config import MemplugConfig, json_schema, load_config, parse_block, read_ds_config
from memplug.errors import ConfigError, PatchError
from tests.support.folders import ROOT

AUTO = st.just("auto")
FRACTION = st.floats(0, 1)
BUDGET = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
PATTERN = st.text("az.*[]_é ", min_size=1).filter(str.strip)
BLOCKS = st.fixed_dictionaries(
    {"enabled": st.booleans()},
    optional={
        "device_budget_gib": AUTO | BUDGET,
        "host_budget_gib": AUTO | BUDGET,
        "tokenwise": st.fixed_dictionaries(
            {},
            optional={
                "enabled": st.booleans(),
                "alpha": AUTO | st.just("memo") | FRACTION,
                "regions": AUTO | st.lists(PATTERN, min_size=1),
                "min_offload_bytes": st.integers(min_value=0),
                "buffers": st.integers(min_value=2),
            },
        ),
        "profiler": st.fixed_dictionaries(
            {},
            optional={
                "enabled": st.booleans(),
                "warmup_steps": st.integers(min_value=0),
                "policy_steps": st.integers(min_value=0),
                "length_tolerance": FRACTION,
                "cosine_similarity": FRACTION,
            },
        ),
        "report": st.fixed_dictionaries({}, optional={"monitor": st.booleans()}),
    },
)


def problems_of(block: dict) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_block(block)
    return caught.value.problems


def leaf(path: str, value: object) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    return {"enabled": True, **value}


@settings(deadline=None)
@given(BLOCKS)
def test_valid_block_survives_json_and_keeps_its_values(block):
    config = parse_block(block)
    assert parse_block(json.loads(json.dumps(config.model_dump()))) == config
    dumped = config.model_dump(mode="json")
    for section in ("tokenwise", "profiler", "report"):
        assert {**dumped[section], **block.get(section, {})} == dumped[section]
    flat = {key: value for key, value in block.items() if not isinstance(value, dict)}
    assert {**dumped, **flat} == dumped


@settings(deadline=None)
@given(st.floats().filter(lambda alpha: not 0 <= alpha <= 1))
def test_alpha_outside_0_to_1_is_refused_including_nan_and_infinity(alpha):
    (problem,) = problems_of(leaf("tokenwise.alpha", alpha))
    assert problem.startswith("memplug.tokenwise.alpha: ") and "from 0 to 1" in problem


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("enabled", 1),
        ("enabled", "true"),
        ("enabled", None),
        *((f"{side}_budget_gib", bad) for side in ("device", "host") for bad in (0, -1, True, "8", float("inf"), None)),
        *(("tokenwise.alpha", bad) for bad in (True, False, "0.5", "Auto", None, [0.5])),
        *(("tokenwise.regions", bad) for bad in ([], "model.*", [""], ["  "], [3], ["a", None], None, {"a": 1})),
        *(("tokenwise.min_offload_bytes", bad) for bad in (-1, 0.5, True, "1", "auto", None, float("nan"))),
        *(("tokenwise.buffers", bad) for bad in (1, 0, -2, 2.5, True, "2", "auto", None)),
        ("tokenwise", True),
        ("tokenwise", None),
        ("report", []),
        ("report.monitor", 0),
        ("profiler", 5),
        ("profiler.enabled", "yes"),
        *((f"profiler.{name}_steps", bad) for name in ("warmup", "policy") for bad in (-1, 0.5, True, "2", None)),
        *(
            (f"profiler.{name}", bad)
            for name in ("length_tolerance", "cosine_similarity")
            for bad in (-0.01, 1.01, True, "0.5", "auto", None, float("nan"))
        ),
    ],
)
def test_wrong_value_is_reported_with_path_and_allowed_values(path, value):
    (problem,) = problems_of(leaf(path, value))
    assert problem.startswith(f"memplug.{path}: got {json.dumps(value)}; allowed: ")


@pytest.mark.parametrize(
    ("path", "value", "stored"),
    [
        ("tokenwise.alpha", 0, 0.0),
        ("tokenwise.alpha", 1, 1.0),
        ("host_budget_gib", 64, 64.0),
        ("tokenwise.min_offload_bytes", 0, 0),
        ("tokenwise.min_offload_bytes", 5e8, 500_000_000),
        ("tokenwise.buffers", 3.0, 3),
        ("tokenwise.regions", ["model.layers.*"], ("model.layers.*",)),
        ("profiler.warmup_steps", 2.0, 2),
        ("profiler.policy_steps", 0, 0),
        ("profiler.length_tolerance", 0, 0.0),
        ("profiler.cosine_similarity", 1, 1.0),
        ("report.timeline", True, True),
        ("report.timeline", "traces", "traces"),
    ],
)
def test_valid_values_are_converted_to_the_type_of_their_field(path, value, stored):
    found = parse_block(leaf(path, value))
    for name in path.split("."):
        found = getattr(found, name)
    assert found == stored and type(found) is type(stored)


def test_all_problems_are_reported_at_once():
    problems = problems_of(
        {
            "enabled": "yes",
            "host_budget_gib": 0,
            "tokenwise": {"alpha": 2, "aplha": 0.5, "regions": []},
            "report": {"timeline": ""},
            "colour": "red",
        }
    )
    paths = {problem.split(":")[0] for problem in problems}
    names = ("enabled", "host_budget_gib", "tokenwise.alpha", "tokenwise.aplha", "tokenwise.regions")
    assert paths == {f"memplug.{name}" for name in (*names, "report.timeline", "colour")}
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("enabeld", "memplug.enabled"),
        ("tokenwise.aplha", "memplug.tokenwise.alpha"),
        ("tokenwise.minOffloadBytes", "memplug.tokenwise.min_offload_bytes"),
        ("tokenwise.enable", "memplug.tokenwise.enabled"),
        ("report.moniter", "memplug.report.monitor"),
        ("token_wise", "memplug.tokenwise"),
        ("alpha", "memplug.tokenwise.alpha"),
        ("profile", "memplug.profiler"),
        ("profiler.warm_up_steps", "memplug.profiler.warmup_steps"),
        ("policy_steps", "memplug.profiler.policy_steps"),
        ("tokenwise.host_budget", "memplug.host_budget_gib"),
    ],
)
def test_unknown_key_suggests_the_intended_one(path, meant):
    (problem,) = problems_of(leaf(path, 1))
    assert problem.startswith(f"memplug.{path}: unknown") and f"did you mean `{meant}`?" in problem


def test_unknown_key_without_a_similar_one_lists_the_known_keys():
    (problem,) = problems_of(leaf("report.xyz", 1))
    assert "did you mean" not in problem and problem.endswith("known here: monitor, timeline, snapshot_on_oom")


def test_deepspeed_dict_passed_as_the_block_is_refused_with_advice():
    problems = problems_of({"memplug": {"enabled": True}})
    assert "pass the block itself" in problems[0]


def test_memplug_is_off_by_default(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 1}')
    off = MemplugConfig()
    assert not off.enabled
    assert load_config(None) == load_config(path) == load_config(str(path)) == read_ds_config({}) == off


def test_block_without_enabled_stays_off_and_warns_once(caplog):
    with caplog.at_level(logging.WARNING, "memplug"):
        config = parse_block({"tokenwise": {"alpha": 0.5}})
    assert not config.enabled and config.tokenwise.alpha == 0.5
    (record,) = caplog.records
    assert record.name == "memplug" and "stays off" in record.getMessage()


@pytest.mark.parametrize("block", [{"enabled": True}, {"enabled": False}])
def test_block_with_enabled_does_not_warn(caplog, block):
    parse_block(block)
    assert not caplog.records


@pytest.mark.parametrize("key", ["mem_plug", "memPlug", "memplugs", "mem-plug", "memplgu", "MEMPLUG"])
def test_misspelt_top_level_key_leaves_memplug_off_with_one_warning(caplog, key):
    assert read_ds_config({key: {"enabled": True}, "zero_optimization": {"stage": 1}}) == MemplugConfig()
    (record,) = caplog.records
    assert f'"{key}"' in record.getMessage() and 'did you mean "memplug"?' in record.getMessage()


def test_deepspeeds_own_keys_are_not_mistaken_for_memplug(caplog):
    read_ds_config(dict.fromkeys(["memory_breakdown", "dump_state", "flops_profiler", "compile", "amp", "autotuning"]))
    assert not caplog.records


@pytest.mark.parametrize("block", [None, True, [], "auto"])
def test_block_that_is_no_object_is_refused(block):
    with pytest.raises(ConfigError, match="allowed: an object"):
        read_ds_config({"memplug": block})


def test_block_of_any_mapping_type_is_read_and_left_unchanged():
    off = MappingProxyType({"snapshot_on_oom": False})
    block = {"enabled": True, "tokenwise": MappingProxyType({"alpha": 0.25}), "report": off}
    before = dict(block)
    assert parse_block(MappingProxyType(block)).tokenwise.alpha == 0.25
    assert block == before


def test_configuration_is_immutable_and_load_config_returns_it_as_is():
    config = MemplugConfig(enabled=True)
    assert load_config(config) is config
    with pytest.raises(ValidationError):
        config.enabled = False
    with pytest.raises(ValidationError):
        config.tokenwise.alpha = 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n "memplug": {"enabled": tr', "line 2, column 25"),
        ("", "line 1, column 1"),
        ("[1, 2]", "not a JSON object"),
        ('"memplug"', "not a JSON object"),
    ],
)
def test_error_for_a_file_without_json_object_names_file_and_fault(tmp_path, text, said):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_missing_or_unreadable_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="unreadable"):
        load_config(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="unreadable"):
        load_config(binary)


def test_file_with_comments_is_read_as_deepspeed_reads_it(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  // mine\n  "memplug": {"enabled": true, "tokenwise": {"alpha": 0.5},},\n}')
    assert load_config(path) == parse_block({"enabled": True, "tokenwise": {"alpha": 0.5}})


def test_every_field_has_a_description():
    def fields_without(model):
        for name, field in model.model_fields.items():
            if not field.description:
                yield name
            if hasattr(field.annotation, "model_fields"):
                yield from fields_without(field.annotation)

    assert list(fields_without(MemplugConfig)) == []


def fields_of_the_block():
    """Return the name and the default, as JSON, of every field that is no section."""
    return {
        f"{section}{name}": json.dumps(field.default)
        for section, model in SECTIONS.items()
        for name, field in model.model_fields.items()
        if f"{name}." not in SECTIONS
    }


def test_tested_sections_are_all_sections_of_the_block():
    nested = {name for name, field in MemplugConfig.model_fields.items() if isinstance(field.default, BaseModel)}
    assert {f"{name}." for name in nested} | {""} == set(SECTIONS)


def test_readme_has_one_row_per_field_with_its_default():
    text = (ROOT / "configs" / "README.md").read_text()
    section = text[text.index("\n## The block\n") :]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", section, re.M)
    assert len(rows) == sum(line.startswith("| `") for line in section.splitlines()), "a row has another format"
    assert sorted((name, default) for name, default, _ in rows) == sorted(fields_of_the_block().items())


def test_schema_file_matches_the_code():
    stored = json.loads((ROOT / "configs" / "memplug.schema.json").read_text())
    assert stored == json_schema(), "run: memplug check --schema > configs/memplug.schema.json"


def test_schema_has_exactly_the_fields_and_their_bounds():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["memplug"] == {"$ref": "#/$defs/MemplugConfig"}
    block, tokenwise = schema["$defs"]["MemplugConfig"], schema["$defs"]["TokenwiseConfig"]
    assert set(MemplugConfig.model_fields) == set(block["properties"])
    assert block["additionalProperties"] is False and tokenwise["additionalProperties"] is False
    assert schema["$defs"]["ProfilerConfig"]["properties"]["policy_steps"]["minimum"] == 0
    assert {"type": "number", "minimum": 0, "maximum": 1} in tokenwise["properties"]["alpha"]["anyOf"]
    swap = schema["$defs"]["SwapConfig"]["properties"]
    assert swap["states"]["type"] == "boolean"
    assert [kind.get("const", kind.get("type")) for kind in swap["enabled"]["anyOf"]] == ["boolean", "auto"]


def test_error_text_has_each_problem_and_the_advice():
    error = ConfigError(["first", "second"])
    assert all(part in str(error) for part in ("first", "second", error.advice))


@pytest.mark.parametrize(
    "error", [ConfigError(["a", "b"], "do c"), PatchError("deepspeed.initialize", "deepspeed 0.16 to 0.19")]
)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.__dict__ == error.__dict__
