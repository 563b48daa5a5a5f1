"""Runs one planning task in a process of its own: `python -m memplug.plans.worker TASK RESULT`.

`TASK` is a pickle of (function, arguments). `RESULT` receives (returned value, None) or (None, raised exception). torch
is imported only if a task needs it.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path


def main(task: Path, result: Path) -> None:
    """Run the task in the file `task`, and write its outcome to the file `result`, whole or not at all."""
    function, arguments = pickle.loads(task.read_bytes())
    try:
        outcome = function(*arguments), None
    except Exception as error:
        outcome = None, error
    partial = result.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    os.replace(partial, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
