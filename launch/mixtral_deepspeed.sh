#!/usr/bin/env bash
# Trains a Mixtral on this machine, under the deepspeed launcher: launch/mixtral_deepspeed.sh [arguments of train.py]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/common.sh"

exec deepspeed --num_accelerators "$NPROC" --master_port "${MASTER_PORT:-29500}" \
    "$root/examples/mixtral/train_deepspeed.py" "$@"
