"""Estimates a training step's time, device memory and host memory in each mode; needs no GPU.

    estimate = memplug.estimate(make_model, lambda: torch.zeros(1, 4096, dtype=torch.long), gpu="h200")
    print(estimate["memplug"].step_s / estimate["keep"].step_s)

The step runs on the virtual device (memplug/predict/virtual). memplug plans, swaps and serves addresses there as in a
real run.
"""

from memplug.predict.estimator.estimate import estimate
from memplug.predict.estimator.modes import MODES
from memplug.predict.estimator.record_values import record_values
from memplug.predict.estimator.result import Estimate, ModeEstimate

__all__ = ["MODES", "Estimate", "ModeEstimate", "estimate", "record_values"]
