"""Puts memplug into a Python process as it starts: Python imports this file if its folder is on `PYTHONPATH`.

`memplug run` puts it there for each process that a command starts. The file imports only modules that Python has
imported already, so a process that does not train starts as fast as before. If the process imports a framework, memplug
patches it then. If the path has another `sitecustomize`, that one runs too.
"""

import os
import sys

VARIABLE = "PYTHON_MEMPLUG_RUN"
"""Name of the environment variable that has a run's settings. DeepSpeed's launcher exports names that begin with PYTHON
to other nodes."""
MODULES = (
    "deepspeed",
    "megatron.training.training",
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
)
"""The modules after whose import memplug patches a framework."""


class Imports:
    """A finder of modules that calls a function once a framework's module is imported; first in `sys.meta_path`.

    Args:
        imported: called with the module's name, each time that the module has been executed.
    """

    def __init__(self, imported):
        self._imported = imported
        self._asking = set()  # modules being looked up: a second `Imports` among the other finders would ask this one

    def find_spec(self, name, path=None, target=None):
        """Return the spec that the other finders return for a framework's module; None for all other modules."""
        if name not in MODULES or name in self._asking:
            return None
        finders = [each.find_spec for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        self._asking.add(name)
        try:
            spec = next((spec for find in finders if (spec := find(name, path, target)) is not None), None)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            self._follow(name, spec.loader)
        return spec

    def _follow(self, name, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            self._imported(name)

        loader.exec_module = exec_module


def _imported(name):
    try:
        from memplug.integrations.launched import imported
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "memplug":
            raise
        sys.stderr.write(f"memplug run: {sys.executable} has no memplug, and trains without it\n")
    else:
        imported(name, os.environ[VARIABLE])


def _start():
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != own]
    if os.environ.get(VARIABLE):
        sys.meta_path.insert(0, Imports(_imported))
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401  the one that this file's folder hid
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = ours


if __name__ == "sitecustomize":
    _start()
