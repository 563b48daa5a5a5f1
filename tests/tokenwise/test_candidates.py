"""Ranks agree on the planning task and on the candidate plans."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from memplug.tokenwise import candidates
from memplug.tokenwise.plan import solver as plan
from tests.support.plans import operator, region

GIB = 1 << 30


def budget(host: int = GIB, device: int = 0, d2h: float = 1e12, h2d: float = 1e12) -> plan.Budget:
    return plan.Budget(d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d, host_bytes=host, device_bytes=device)


def chosen(
    own: tuple[list[plan.PlannedRegion], plan.Budget],
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    most: int = 1,
    alpha: Any = "auto",
    rank: int = 0,
) -> list[plan.TokenwisePlan]:
    """Return the plans that a rank chooses from; none if a rank ran no region yet."""
    task = candidates.agree(own, gather, most, alpha, is_ready=bool(own[0]))
    if task is None:
        return []
    return candidates.choose(task, candidates.solve(task) if task.solver == rank else None, gather)


class Ranks:
    """Runs `chosen` for several ranks at once, with a gather that waits for all, as a collective does."""

    def __init__(self, owns: list[tuple[list[plan.PlannedRegion], plan.Budget]], most: int = 1, alpha: Any = "auto"):
        self.calls = [0] * len(owns)
        self.most, self.alpha = most, alpha
        self.plans: list[list[plan.TokenwisePlan] | BaseException] = [RuntimeError("never ended")] * len(owns)
        self._barrier = threading.Barrier(len(owns), timeout=20)
        self._slots: list[Any] = [None] * len(owns)
        threads = [threading.Thread(target=self._run, args=(rank, own)) for rank, own in enumerate(owns)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, rank: int, own: tuple[list[plan.PlannedRegion], plan.Budget]) -> None:
        def gather(value: Any) -> list[Any]:
            self.calls[rank] += 1
            self._slots[rank] = value
            self._barrier.wait()
            values = list(self._slots)
            self._barrier.wait()
            return values

        try:
            self.plans[rank] = chosen(own, gather, self.most, self.alpha, rank)
        except BaseException as error:
            self.plans[rank] = error
            self._barrier.abort()


def layer(key: str = "Block:a", instances: int = 4, time_s: float = 4.0) -> plan.PlannedRegion:
    matmul = plan.PlannedOperator(
        name="mm", time_s=time_s, inputs=(0,), outputs=(1,), output_bytes=1000, capture="rows"
    )
    return plan.PlannedRegion(
        key=key,
        instances=instances,
        operators=(matmul,),
        saved=frozenset({1}),
        given=frozenset({0}),
        input_bytes=100,
        forward_s=10.0,
        backward_s=20.0,
    )


def test_ranks_with_equal_regions_plan_with_their_smallest_budget() -> None:
    budgets = [budget(host=3000), budget(host=9000, d2h=5.0), budget(host=9000, h2d=50.0), budget(host=2000, device=7)]
    ranks = Ranks([([layer()], one) for one in budgets])
    expected = plan.solve([layer()], budget(host=2000, device=0, d2h=5.0, h2d=50.0))
    assert ranks.plans == [[expected]] * 4
    assert expected != plan.solve([layer()], budgets[0])


def test_all_ranks_plan_with_the_smallest_memo_fraction() -> None:
    """Within 10 s a link carries the input's 100 bytes and, of 1000 more, 400 at 50 bytes/s or 200 at 30 bytes/s."""
    ranks = Ranks([([layer()], budget(d2h=rate)) for rate in (50.0, 30.0)], alpha="memo")
    assert ranks.plans[0] == ranks.plans[1] == [plan.solve([layer()], budget(d2h=30.0), 0.2)]
    stages = [([layer("Block:a")], budget(d2h=50.0)), ([layer("Block:b")], budget(d2h=30.0))]
    assert [plans[0].alpha for plans in Ranks(stages, alpha="memo").plans] == [0.2, 0.2]


def test_all_ranks_plan_with_the_times_of_the_lowest_rank() -> None:
    ranks = Ranks([([layer(time_s=1.0)], budget(d2h=50.0)), ([layer(time_s=40.0)], budget(d2h=50.0))])
    assert ranks.plans[0] == ranks.plans[1] == [plan.solve([layer(time_s=1.0)], budget(d2h=50.0))]
    assert ranks.plans[1] != [plan.solve([layer(time_s=40.0)], budget(d2h=50.0))]


def test_pipeline_stages_plan_separately_with_equally_many_collectives() -> None:
    """Model pipeline stages: ranks 0 and 2 hold one set of layers, 1 and 3 another."""
    first, second = [layer("Block:a")], [layer("Block:b", instances=2), layer("Block:c")]
    budgets = [budget(host=2500), budget(host=700), budget(host=9000), budget(host=8000)]
    ranks = Ranks(list(zip([first, second, first, second], budgets, strict=True)))
    assert ranks.plans[0] == ranks.plans[2] == [plan.solve(first, budget(host=2500))]
    assert ranks.plans[1] == ranks.plans[3] == [plan.solve(second, budget(host=700))]
    assert len(set(ranks.calls)) == 1


def test_no_rank_plans_until_all_have_regions() -> None:
    ranks = Ranks([([layer()], budget()), ([], budget()), ([layer()], budget())])
    assert ranks.plans == [[]] * 3
    assert len(set(ranks.calls)) == 1


def test_single_process_solves_with_its_own_budget() -> None:
    plans = chosen(([layer()], budget(host=2500)))
    assert plans == [plan.solve([layer()], budget(host=2500))]


# -- plans to choose from ----------------------------------------------------------------------------------------------

BY_LINK = budget(d2h=50.0, h2d=50.0)  # the link takes 8 s for all inputs, and 80 s for all outputs
NOT_BY_LINK = budget(host=2500)


def swapped(one: plan.TokenwisePlan) -> int:
    return sum(region.swapped_bytes for region in one.regions.values())


def test_candidate_plans_swap_less_and_more_than_the_optimal_one() -> None:
    optimum, less, more, least, most = chosen(([layer()], BY_LINK), most=5)
    assert optimum == plan.solve([layer()], BY_LINK)
    assert swapped(least) < swapped(less) < swapped(optimum) < swapped(more) < swapped(most)
    assert min(one.step_s for one in (less, more, least, most)) >= optimum.step_s


def test_duplicate_candidate_plans_are_dropped() -> None:
    assert len(chosen(([layer()], NOT_BY_LINK), most=5)) == 1


def test_there_are_at_most_as_many_candidate_plans_as_link_factors() -> None:
    plans = chosen(([layer()], BY_LINK), most=1000)
    assert 5 < len(plans) <= len(candidates.LINK_FACTORS)


def test_all_ranks_try_equally_many_plans() -> None:
    """Expect the first rank, which has the same plan for any link, to try it as often as the second tries its plans."""
    ranks = Ranks([([layer("Block:a")], NOT_BY_LINK), ([layer("Block:b")], BY_LINK)], most=3)
    assert [len(plans) for plans in ranks.plans] == [3, 3]
    assert len({swapped(one) for one in ranks.plans[0]}) == 1
    assert len({swapped(one) for one in ranks.plans[1]}) == 3


def of_ranks(*scales: float, most_scale: float = 1.6) -> list[candidates.SolveTask | None]:
    """Return the tasks of ranks that observed steps of other sizes; a later rank has more device bytes."""
    owns = [([region(operator("mm", (0,), (1,)), saved={1})], budget(device=rank + 1)) for rank in range(len(scales))]

    def task(rank: int) -> candidates.SolveTask | None:
        def gather(value: Any) -> list[Any]:
            if isinstance(value, bool):
                return [value] * len(scales)
            keys, _, _ = value
            return [(keys, own[1], scale) for own, scale in zip(owns, scales, strict=True)]

        return candidates.agree(owns[rank], gather, scale=scales[rank], most_scale=most_scale)

    return [task(rank) for rank in range(len(scales))]


def test_rank_with_the_largest_step_solves_for_all() -> None:
    tasks = of_ranks(3.0, 1.2, 1.1, 1.1)
    assert [task.solver for task in tasks] == [2] * 4
    assert {task.budget.device_bytes for task in tasks} == {2}, (
        "what a much smaller step shows of the room is no measure"
    )


def test_no_plan_is_made_from_steps_that_are_all_too_small() -> None:
    assert of_ranks(3.0, 1.7) == [None, None]
    assert all(of_ranks(3.0, 1.7, most_scale=3.2)), "after more steps a smaller one has to do"
