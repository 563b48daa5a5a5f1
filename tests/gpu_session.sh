#!/usr/bin/env bash
# Tests and measures memplug on a bare machine with one H100 or H200 and no network, in at most 12 minutes:
#
#     tests/gpu_session.sh [FOLDER] [STEP...]
#
# FOLDER defaults to $OUT, and without that to runs/gpu_session. Without STEP all steps run, the most valuable first.
# Each step has its own time limit, and one that fails does not affect the others. During the run, FOLDER gets:
#
# - summary.txt: one line per step, with its seconds and exit status (124: it exceeded its limit),
# - log.txt: the output of all steps,
# - rows.json: their measurements, in the format of tests/bench,
# - profile.json: the rates of the GPU for the virtual device.
#
# Exits with 1 if a step failed.
#
# It needs a compiler, CUDA's headers, and the Python packages torch for CUDA, transformers, scipy, typer, rich, ninja,
# psutil, einops, msgpack, py-cpuinfo, PyYAML, tqdm, pytest, pytest-xdist and hypothesis. Wheels in .whl/ are installed
# first: deepspeed (pip wheel --no-deps with DS_BUILD_OPS=0), hjson, megatron_core, pydantic, pydantic_core,
# annotated_types, typing_inspection, and optionally transformer_engine with flash_attn, for layers of Transformer
# Engine's modules.
#
# REHEARSE=1 tests the script itself on simulated CUDA (tests/cudasim): the same steps on tiny models, with longer
# limits and only a few of the tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-${OUT:-runs/gpu_session}} only=("${@:2}") slower=1 failed=0
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# -- the environment ----------------------------------------------------------------------------------------------------

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TORCH_CUDA_ARCH_LIST=9.0  # DeepSpeed cannot read "9.0a"
if compgen -G '.whl/*.whl' >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl || exit 1
    export PYTHONPATH=$PYTHONPATH:$work/site
fi
pytest=(python3 -m pytest -q -rfE --tb=short -p tests.on_cuda -n 8 --ignore tests/cudasim --ignore tests/bench tests)
recipe=() short=(--tokens 8192 --layers 16) long=(--tokens 32768 --layers 8)
if [ -n "${REHEARSE:-}" ]; then
    slower=6
    library=$(python3 -c 'from tests.cudasim.build import build; print(build() / "libcudasim.so")') || exit 1
    export LD_PRELOAD=$library PYTHONPATH=$PWD/tests/cudasim/site:$PYTHONPATH OMP_NUM_THREADS=1
    export TORCHDYNAMO_DISABLE=1  # compiled kernels are not simulated
    pytest=(python3 -m pytest -q -rfE --tb=short -p tests.cudasim.plugin -n 2 tests/arena/test_arena_gpu.py)
    recipe=(--tiny --steps 20)
    short=(--tokens 256 --layers 2 --model tiny --min-offload-bytes 4096)
    long=(--tokens 512 --layers 4 --model tiny --min-offload-bytes 4096)
fi

# -- the steps ----------------------------------------------------------------------------------------------------------

# Runs a command under a time limit, and notes its time and exit status: step NAME SECONDS COMMAND...
step() {
    local name=$1 limit_s=$(($2 * slower)) began=$SECONDS status=0
    if [ ${#only[@]} -gt 0 ] && [[ " ${only[*]} " != *" $name "* ]]; then
        return
    fi
    echo "== $name, at most $limit_s s: ${*:3}" >>"$out/log.txt"
    timeout -k 5 "$limit_s" "${@:3}" >>"$out/log.txt" 2>&1 </dev/null || { status=$? failed=1; }
    printf '%-18s %4d s, exit %d\n' "$name" $((SECONDS - began)) "$status" | tee -a "$out/summary.txt"
    join_rows
}

# Writes the rows of all steps so far to one file.
join_rows() {
    python3 - "$work" "$out/rows.json" <<'PYTHON'
import json, pathlib, sys
rows = [row for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json")) for row in json.loads(file.read_text())]
pathlib.Path(sys.argv[2]).write_text(json.dumps(rows, indent=1) + "\n")
PYTHON
}

memplug=(python3 -c 'from memplug.cli import main; main()')
trained=(python3 -m tests.bench.trained ${recipe[@]+"${recipe[@]}"})
step_time=(python3 -m tests.bench.step_time --budget 1.0)

step build 60 "${memplug[@]}" doctor
step tests 170 "${pytest[@]}" -m "(gpu or device) and not long"
step llama_deepspeed 75 "${trained[@]}" llama_deepspeed --json "$work/llama_deepspeed.json"
step llama_megatron 75 "${trained[@]}" llama_megatron --json "$work/llama_megatron.json"
step step_time_32k 110 "${step_time[@]}" "${long[@]}" --modes keep_all full memplug memplug_torch --json "$work/step_time_32k.json"
step mixtral_deepspeed 70 "${trained[@]}" mixtral_deepspeed --json "$work/mixtral_deepspeed.json"
step mixtral_megatron 70 "${trained[@]}" mixtral_megatron --json "$work/mixtral_megatron.json"
step step_time_8k 50 "${step_time[@]}" "${short[@]}" --modes keep_all full memplug --json "$work/step_time_8k.json"
step measure 40 "${memplug[@]}" doctor --measure "$out/profile.json"

exit "$failed"
