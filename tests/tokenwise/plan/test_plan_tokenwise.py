"""The token-wise planner: hand-computed optima, and the shape of MEMO's Table 5.

By default a layer's forward takes 10 s, and its backward 20 s.
"""

import subprocess
import sys
from dataclasses import replace

import pytest

from memplug.tokenwise.plan.memo import alpha_of_layer, fraction_of
from memplug.tokenwise.plan.solver import InFlight, needed, solve
from tests.support.plans import GAP, budget, operator, region

MATMUL = operator("mm", (0,), (1,), time_s=4.0, size=100)
ROTARY = operator("rotary", (1,), (2,), time_s=1.0, size=100, capture="whole")
ATTENTION = operator("attention", (0,), (1,), time_s=5.0, size=100, capture="whole", always_swapped=True)


def test_swapped_rows_exactly_fill_the_link():
    """At 5 bytes/s the link carries 50 of 100 bytes in the forward's 10 s.

    One more byte would stall for 0.2 s, and spare 0.04 s of recomputation.
    """
    plan = solve([region(MATMUL, saved={1})], budget(d2h=5.0, h2d=5.0))
    (group,) = plan.regions["layer"].groups
    assert group.fractions[0] == pytest.approx(0.5)
    assert group.runs == {0}
    assert (plan.forward_s, plan.backward_s) == (pytest.approx(10.0), pytest.approx(20.0 + 2.0))
    assert plan.bound == "link forward"


def test_link_to_the_device_can_be_the_bottleneck():
    """Swap y bytes: their prefetch takes y/4 s, and backward takes 20 + 4 (1 - y/100) s; both are equal at y = 82.76.

    In forward the link could carry all 100 bytes.
    """
    plan = solve([region(MATMUL, saved={1})], budget(h2d=4.0))
    assert plan.regions["layer"].groups[0].fractions[0] == pytest.approx(24 / 29)
    assert plan.backward_s == pytest.approx(24 / 29 * 25)
    assert plan.bound == "link backward"


def test_plan_stalls_on_a_copy_if_recomputing_costs_more():
    """At 2.5 bytes/s the input's 100 bytes fill the forward's 40 s.

    The operator's output has 20 bytes more, which stall for 8 s; running the operator again would take 40 s.
    """
    dear = operator("attention", (0,), (1,), time_s=40.0, size=20, capture="whole")
    layer = region(dear, saved={1}, input_bytes=100, forward_s=40.0, backward_s=80.0)
    plan = solve([layer], budget(d2h=2.5))
    assert plan.step_s == pytest.approx(48.0 + 80.0)
    assert plan.bound == "link forward"
    assert plan.regions["layer"].forward_s == pytest.approx(48.0)


def test_swapping_the_elementwise_output_spares_its_operator():
    """The link carries 100 bytes: the plan swaps rotary's output, which backward reads.

    If it swapped the matmul's output instead, rotary would run again for 1 s.
    """
    plan = solve([region(MATMUL, ROTARY, saved={2})], budget(d2h=10.0, h2d=10.0))
    (group,) = plan.regions["layer"].groups
    assert group.fractions == {1: 1.0}
    assert group.runs == frozenset()
    assert plan.step_s == pytest.approx(30.0)
    assert plan.bound == "none"


def test_spare_link_time_swaps_elementwise_outputs_too():
    """At 20 bytes/s the link carries the 200 bytes of both saved outputs.

    At 10 bytes/s it carries one output, and the plan swaps the costlier one, the matmul's.
    """
    layer = region(MATMUL, ROTARY, saved={1, 2})
    wide, narrow = solve([layer], budget(d2h=20.0)), solve([layer], budget(d2h=10.0))
    assert wide.regions["layer"].groups[0].fractions == {0: 1.0, 1: 1.0}
    assert wide.step_s == pytest.approx(30.0)
    assert narrow.regions["layer"].groups[0].fractions == {0: 1.0}
    assert narrow.step_s == pytest.approx(31.0)


def test_host_memory_goes_to_the_output_that_is_costliest_to_recompute():
    """100 host bytes hold one of two outputs; running the matmul again takes 4 s, and rotary 1 s."""
    plan = solve([region(MATMUL, ROTARY, saved={1, 2})], budget(host=100))
    assert plan.regions["layer"].groups[0].fractions == {0: 1.0}
    assert plan.host_bytes == 100
    assert plan.bound == "host"


def test_last_layers_keep_outputs_while_the_device_has_room():
    """Without host memory, 250 device bytes keep 2 of 4 outputs, of 100 bytes each.

    The operators of the other two run again, for 5 s each, so the step takes 40 + 80 + 10 s.
    """
    plan = solve([region(ATTENTION, saved={1}, instances=4)], budget(host=0, device=250))
    groups = plan.regions["layer"].groups
    assert sum(group.instances for group in groups if group.keep) == 2
    assert sum(group.instances for group in groups if group.runs) == 2
    assert plan.device_bytes == 200
    assert plan.step_s == pytest.approx(130.0)


def test_layer_that_never_offloads_keeps_outputs_like_the_last_layers():
    """One of five forwards never offloads: 250 device bytes keep two of five outputs.

    The operators of the other three run again, for 5 s each, so the step takes 50 + 100 + 15 s.
    """
    layers = region(ATTENTION, saved={1}, instances=4, staying=1)
    plan = solve([layers], budget(host=0, device=250))
    *_, last = groups = plan.regions["layer"].groups
    assert sum(group.instances for group in groups if group.keep) + bool(last.keep) == 2
    assert plan.device_bytes == plan.kept_bytes == 200
    assert plan.step_s == pytest.approx(165.0)
    swapped = solve([layers], budget())
    assert swapped.host_bytes == 4 * 100 and swapped.step_s == pytest.approx(150.0)


def test_nothing_is_swapped_without_device_room_for_bytes_in_flight():
    """Two outputs of 100 bytes in flight need 200 device bytes.

    Two rounding buffers need 200 more. Room below the step's peak (150 or 300 bytes) holds bytes in flight for free.
    """
    layers = region(MATMUL, saved={1}, instances=2)
    for room, enough, buffers in ((0, 200, 0), (0, 400, 2), (150, 50, 0), (150, 250, 2), (300, 200, 2)):
        for device, swaps in ((enough - 1, False), (enough, True)):
            limits = replace(budget(device=device), in_flight=(InFlight(2, room),), buffers=buffers)
            plan = solve([replace(layers, instances=8)], limits)
            assert any(group.fractions for group in plan.regions["layer"].groups) is swaps
            assert plan.in_flight_bytes == (max(0, 200 - room) if swaps else 0) and plan.device_bytes <= device


def test_outputs_of_the_safest_setting_add_no_in_flight_bytes():
    """Count no bytes in flight for outputs of attention, which are part of the observed step."""
    always = replace(ATTENTION, always_swapped=True)
    plan = solve([region(always, saved={1}, instances=4)], replace(budget(), in_flight=(InFlight(2),)))
    assert plan.regions["layer"].groups[0].fractions == {0: 1.0} and plan.device_bytes == 0


def test_attention_is_swapped_in_as_many_layers_as_fit_on_the_host():
    """2,000 host bytes hold 20 of 32 outputs; the other 12 layers run attention again, 5 s each."""
    plan = solve([region(ATTENTION, saved={1}, instances=32)], budget(host=2050))
    assert plan.host_bytes == 2000
    assert plan.step_s == pytest.approx(32 * 30.0 + 60.0)
    per_layer = [plan.regions["layer"].group(i).fractions for i in range(32)]
    assert per_layer.count({0: 1.0}) == 20


def test_copies_lag_only_as_far_as_device_memory_allows():
    """At 5.5 bytes/s an output's copy takes 18.2 s: more than its layer's 10 s, but less than both layers' 20 s.

    Without device memory the copy would stall 8.2 s, so both layers run their attention of 5 s again. 50 device bytes
    are too few to keep an output, but let the first layer's copy lag into the second layer's time.
    """
    layers = region(ATTENTION, saved={1}, instances=2)
    assert solve([layers], budget(d2h=5.5)).step_s == pytest.approx(70.0)
    lagging = solve([layers], budget(d2h=5.5, device=50))
    assert lagging.step_s == pytest.approx(65.0)
    assert lagging.regions["layer"].group(0).fractions == {0: 1.0}
    assert lagging.regions["layer"].group(1).fractions == {}


def test_plan_with_fewer_host_bytes_wins_at_equal_time():
    """Swapping either of two outputs spares all recomputation; the second output has a tenth of the bytes."""
    small = operator("down", (1,), (2,), time_s=1.0, size=10, capture="whole")
    assert solve([region(MATMUL, small, saved={2})], budget()).host_bytes == 10


def test_matmul_that_backward_does_not_need_is_neither_swapped_nor_run():
    dead = operator("out", (1,), (3,), time_s=9.0, size=100)
    layer = region(MATMUL, dead, saved={1})
    assert needed(layer.operators, layer.saved, layer.given, ()) == {0}
    assert needed(layer.operators, layer.saved, layer.given, {0}) == frozenset()
    for alpha in ("auto", 0.0, 1.0):
        group = solve([layer], budget(), alpha).regions["layer"].groups[0]
        assert 1 not in group.runs | group.fractions.keys()


def test_inputs_of_operators_that_always_run_are_swapped_or_recomputed():
    """Dropout runs in every recompute pass, for 2 s, and reads the matmul's output, which is swapped.

    If `add_` writes to a saved storage, the operator that makes the storage runs too.
    """
    dropout = operator("dropout", (1,), (2,), time_s=2.0, size=100, capture="never", always_runs=True)
    plan = solve([region(MATMUL, dropout, saved=())], budget())
    assert plan.regions["layer"].groups[0].fractions == {0: 1.0}
    assert plan.step_s == pytest.approx(32.0)
    mutated = (replace(MATMUL, capture="never"), operator("add_", (1,), (1,), time_s=1.0, capture="never"))
    assert needed(mutated, {1}, {0}, ()) == {0, 1}


def test_inputs_stay_on_the_device_when_the_host_cannot_hold_them():
    plan = solve([region(MATMUL, saved={1}, input_bytes=1000)], budget(host=999))
    assert not plan.inputs_swapped
    assert plan.host_bytes == 100


def test_fixed_alpha_is_lowered_to_what_the_host_holds():
    """At alpha 0.5 each of two layers needs 150 host bytes: attention's 100, and half of the matmul's 100.

    240 bytes for both layers leave alpha 0.2.
    """
    other = operator("o", (1,), (2,), time_s=4.0, size=100)
    layer = region(ATTENTION, other, saved={1, 2}, instances=2)
    full, cut, none = (solve([layer], budget(host=host), 0.5) for host in (300, 240, 199))
    assert (full.alpha, full.alpha_cut_by_host, full.host_bytes) == (0.5, False, 300)
    assert cut.alpha == pytest.approx(0.2)
    assert cut.alpha_cut_by_host and cut.host_bytes <= 240
    assert (none.alpha, none.alpha_cut_by_host, none.host_bytes) == (0.0, True, 0)


@pytest.mark.parametrize(
    ("layers", "limits", "alpha", "names"),
    [
        ([region(MATMUL, saved={1})], budget(), 1.5, "alpha"),
        ([region(MATMUL, saved={1})], budget(d2h=0.0), "auto", "positive"),
        ([region(MATMUL, saved={1})] * 2, budget(), "auto", "key"),
        ([region(MATMUL, saved={7})], budget(), "auto", "7"),
        ([region(ROTARY, saved={2})], budget(), "auto", "rotary"),
    ],
)
def test_error_for_an_invalid_planning_problem_names_the_cause(layers, limits, alpha, names):
    with pytest.raises(ValueError, match=names):
        solve(layers, limits, alpha)


# MEMO, Table 5: a 7B model (32 layers, hidden 4096) on 8 GPUs with TP 4 and CP 2

HIDDEN, LAYERS, FLOPS, LINK = 4096, 32, 170e12, 9e9
OUTPUTS = {"norm1": 1, "qkv": 3, "attention": 1, "residual": 1, "norm2": 1, "fc1": 4, "gelu": 4}
"""Skeletal activations without the input in units of one hidden state (MEMO, figure 4): 16 with it."""
HOST = int(129.2e9 / 30 * 32)
"""Just enough for 30 layers of 256K tokens; MEMO does not count the last two layers."""


def memo_layer(tokens, tp=4, cp=2):
    """Return a GPT layer on one of tp * cp GPUs; capture is by rows, as MEMO splits elementwise outputs too."""
    hidden_bytes = 2 * tokens * HIDDEN // (tp * cp)
    matmul_s = 2 * tokens * HIDDEN**2 / (tp * cp) / FLOPS
    times = {"qkv": 3 * matmul_s, "residual": matmul_s, "fc1": 4 * matmul_s, "fc2": 4 * matmul_s}
    times["attention"] = 2 * tokens**2 * HIDDEN / (tp * cp) / FLOPS
    reads = {"norm1": 0, "qkv": 1, "attention": 2, "residual": 3, "norm2": 4, "fc1": 5, "gelu": 6, "fc2": 7}
    operators = [
        operator(
            name,
            (source,),
            (source + 1,),
            time_s=times.get(name, 0.0),
            size=OUTPUTS.get(name, 1) * hidden_bytes,
            capture="whole" if name == "attention" else "rows",
            always_swapped=name == "attention",
        )
        for name, source in reads.items()
    ]
    forward_s = sum(times.values())
    return region(
        *operators,
        saved=range(1, 8),
        instances=LAYERS,
        forward_s=forward_s,
        backward_s=2.0 * forward_s,
        input_bytes=hidden_bytes,
    )


@pytest.mark.parametrize(
    ("tokens", "published", "bound"),
    [(192, 0.75, "link forward"), (256, 1.0, "none"), (320, 0.75, "host"), (384, 0.5, "host")],
)
def test_best_alpha_matches_table_5_of_memo(tokens, published, bound):
    """The best of nine fractions is the published one; the closed form lies between this fraction and the next."""
    layer, limits = memo_layer(tokens * 1024), budget(d2h=LINK, h2d=LINK, host=HOST)
    plans = [solve([layer], limits, eighths / 8) for eighths in range(9)]
    fitting = [plan for plan in plans if not plan.alpha_cut_by_host]
    assert min(fitting, key=lambda plan: plan.step_s).alpha == published
    assert min(plans, key=lambda plan: plan.step_s).bound == bound
    hidden_bytes = layer.input_bytes
    alpha = alpha_of_layer(hidden_bytes, hidden_bytes, 14 * hidden_bytes, LAYERS, LINK, layer.forward_s, HOST / 32 * 30)
    assert published <= alpha < published + 0.125
    fraction = fraction_of([layer], limits)
    assert solve([layer], limits, fraction).alpha == pytest.approx(alpha), "the solver cuts alpha to the host's bound"
    assert solve([layer], limits).step_s <= solve([layer], limits, alpha).step_s * GAP


def test_memo_alpha_is_zero_if_the_attention_output_does_not_fit():
    assert alpha_of_layer(50, 60, 1, layers=3, d2h_bytes_per_s=1.0, layer_forward_s=100.0, host_bytes=1e9) == 0.0


def test_automatic_plan_beats_every_fixed_alpha():
    """At 192K tokens norms and gelu are recomputed for free, which leaves the link to costlier outputs."""
    layer, limits = memo_layer(192 * 1024), budget(d2h=LINK, h2d=LINK, host=HOST)
    assert solve([layer], limits).step_s < 0.99 * min(solve([layer], limits, n / 8).step_s for n in range(9))


def test_two_costliest_tensors_are_swapped_if_two_may_be_in_flight():
    """Do not swap some rows of more tensors instead: each such tensor takes room in flight for all of its rows."""
    size = 100 * 2**20
    operators = [operator(f"op{i}", (i,), (i + 1,), time_s=1.0 + 0.1 * i, size=size, capture="rows") for i in range(10)]
    layer = region(*operators, saved=range(1, 11), instances=2, forward_s=100.0, backward_s=200.0, input_bytes=0)
    limits = replace(budget(d2h=size / 5, h2d=size / 5, host=10**12), in_flight=(InFlight(2, 9 * size // 2),))
    assert solve([layer], limits).step_s == pytest.approx(2 * (300.0 + 14.5 - 1.9 - 1.8), rel=1e-4)


def wide_layer(count):
    """Return a region of `count` operators; each matmul is followed by two elementwise operators.

    Backward needs the outputs of all `count` operators.
    """
    operators = [
        operator(
            f"op{i}",
            (max(0, i - i % 3 - (i % 2)), i) if i % 3 else (max(0, i - 2),),
            (i + 1,),
            time_s=1e-3 if i % 3 == 0 else 1e-4 + i * 1e-7,
            size=(50 + i % 7) * 2**20,
            capture="rows" if i % 3 == 0 else "whole",
        )
        for i in range(count)
    ]
    forward_s = sum(op.time_s for op in operators)
    return region(*operators, saved=range(1, count), instances=32, forward_s=forward_s, backward_s=2 * forward_s)


@pytest.mark.parametrize("device", [0, 20 * 2**30])
def test_planning_120_operators_is_deterministic(device):
    limits = budget(d2h=49e9, h2d=49e9, host=64 * 2**30, device=device)
    plan = solve([wide_layer(120)], limits)
    assert plan.step_s > 0 and plan == solve([wide_layer(120)], limits)


def test_planner_imports_no_torch():
    code = "import sys, memplug.tokenwise.plan.solver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


UNIT = operator("unit", (0,), (1,), time_s=4.0, size=0, capture="never")
SAVED, RETURNED = (operator(f"part {n}", (1,), (n,), time_s=0.0, size=100, made_by_rows=0) for n in (2, 3))


def test_all_outputs_of_a_unit_swap_the_same_number_of_rows():
    """In the forward's 10 s the link carries 100 bytes.

    That is half of the rows of both outputs, which spares half of the unit's 4 s.

    All rows of one output would spare nothing.
    """
    plan = solve([region(UNIT, SAVED, RETURNED, saved={2, 3})], budget(d2h=10.0, h2d=10.0))
    (group,) = plan.regions["layer"].groups
    assert group.fractions == {1: pytest.approx(0.5), 2: pytest.approx(0.5)}
    assert group.runs == {0, 1, 2}
    assert group.recompute_s == pytest.approx(2.0)
    assert plan.step_s == pytest.approx(30.0 + 2.0)


def test_unit_does_not_run_if_all_its_outputs_are_swapped():
    plan = solve([region(UNIT, SAVED, RETURNED, saved={2, 3})], budget(d2h=20.0, h2d=20.0))
    assert plan.regions["layer"].groups[0].runs == frozenset()
    assert plan.step_s == pytest.approx(30.0)


def test_unit_that_is_not_row_wise_runs_whole_for_any_missing_row():
    """The link has time for one of two outputs; swapping only one spares nothing, so neither is swapped."""
    parts = (replace(SAVED, capture="whole", made_by_rows=None), replace(RETURNED, capture="whole", made_by_rows=None))
    plan = solve([region(UNIT, *parts, saved={2, 3})], budget(d2h=10.0, h2d=10.0))
    (group,) = plan.regions["layer"].groups
    assert group.fractions == {} and group.recompute_s == pytest.approx(4.0)


def test_unit_that_runs_for_some_rows_needs_its_whole_inputs():
    """Let an operator that is never captured make the unit's input in 5 s.

    That operator runs whole if any row of the unit runs.
    """
    source = operator("norm", (0,), (1,), time_s=5.0, size=0, capture="never")
    unit = operator("unit", (1,), (2,), time_s=4.0, size=0, capture="never")
    part = operator("part", (2,), (3,), time_s=0.0, size=100, made_by_rows=1)
    plan = solve([region(source, unit, part, saved={3})], budget(d2h=5.0, h2d=5.0))
    (group,) = plan.regions["layer"].groups
    assert group.fractions == {2: pytest.approx(0.5)}
    assert group.recompute_s == pytest.approx(5.0 + 2.0)
