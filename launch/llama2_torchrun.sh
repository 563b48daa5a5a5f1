#!/usr/bin/env bash
# Trains on this machine, under torchrun: launch/llama2_torchrun.sh [arguments of train.py]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/common.sh"

exec torchrun --standalone --nproc-per-node "$NPROC" "$root/examples/llama2/train.py" "$@"
