#!/usr/bin/env bash
# Trains a Mixtral with DeepSpeed on this machine: launch/mixtral_torchrun.sh [arguments of train.py]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/common.sh"

exec torchrun --standalone --nproc-per-node "$NPROC" "$root/examples/mixtral/train_deepspeed.py" "$@"
