"""memplug: swaps some activations to host memory, and recomputes others, to train with less device memory.

One block of a DeepSpeed JSON controls it. The public API is `install`, `uninstall`, `attach`, `Session`,
`MemplugConfig`, `load_plan`, `estimate`, `record_values`, and the errors in `memplug.errors`. Heavy modules are
imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplug.config import MemplugConfig
    from memplug.hooks.attach import attach
    from memplug.plans.plan_file import load as load_plan
    from memplug.predict.estimator import estimate, record_values
    from memplug.session.session import Session

__all__ = ["MemplugConfig", "Session", "attach", "estimate", "install", "load_plan", "record_values", "uninstall"]


def install() -> None:
    """Make every later call of `deepspeed.initialize` attach to the new engine, if its JSON has a "memplug" block.

    Call it before `deepspeed.initialize` is used or imported by name. A second call changes nothing.
    """
    from memplug.hooks import deepspeed
    from memplug.hooks.attach import attach

    deepspeed.install(attach)


def uninstall() -> None:
    """Undo `install`; sessions that are attached stay attached."""
    from memplug.hooks import deepspeed

    deepspeed.uninstall()


def __getattr__(name: str) -> Any:
    if name == "attach":
        from memplug.hooks.attach import attach

        return attach
    if name in ("estimate", "record_values"):
        from memplug.predict import estimator

        return getattr(estimator, name)
    if name == "Session":
        from memplug.session.session import Session

        return Session
    if name == "load_plan":
        from memplug.plans.plan_file import load

        return load
    if name == "MemplugConfig":
        from memplug.config import MemplugConfig

        return MemplugConfig
    raise AttributeError(f"module 'memplug' has no attribute {name!r}")
