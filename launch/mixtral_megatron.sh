#!/usr/bin/env bash
# Trains a Mixtral with Megatron-Core on this machine: launch/mixtral_megatron.sh [arguments of train.py]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/common.sh"
# the order in which Megatron-Core launches copies and matmuls is the order in which they run
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

exec torchrun --standalone --nproc-per-node "$NPROC" "$root/examples/mixtral/train_megatron.py" "$@"
