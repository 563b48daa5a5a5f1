"""The Slurm scripts of launch/ start the multi-machine script on each machine of the job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.folders import ROOT


@pytest.mark.parametrize("recipe", ["llama2", "megatron"])
def test_slurm_job_starts_the_recipe_on_all_machines(recipe: str, tmp_path: Path) -> None:
    # stand-ins replace Slurm's commands; like Slurm, the test copies the script to another folder
    script, copy = ROOT / "launch" / f"{recipe}_slurm.sh", tmp_path / "slurm_script"
    copy.write_bytes(script.read_bytes())
    for name, body in {
        "scontrol": f'if [ "$2" = job ]; then echo "   Command={script} --steps 3"; else printf "node7\\nnode8\\n"; fi',
        "srun": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    of_job = {"SLURM_JOB_ID": "20123", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    env = {**os.environ, **of_job, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", copy, "--steps", "3"], env=env, capture_output=True, text=True, check=True)
    started = ROOT / "launch" / f"{recipe}_torchrun_multinode.sh"
    assert done.stdout.split() == [str(started), "2", "node7:20123", "--steps", "3"]
    assert os.access(started, os.X_OK)
