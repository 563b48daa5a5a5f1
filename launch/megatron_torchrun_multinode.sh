#!/usr/bin/env bash
# Trains with Megatron-Core on several machines; start it on each of them, with the same arguments:
#   launch/megatron_torchrun_multinode.sh NNODES HOST:PORT [arguments of train.py]
# HOST is one of the machines, PORT a free port of it, where all of them meet.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 NNODES HOST:PORT [arguments of train.py]" >&2
    exit 2
fi
nnodes=$1
endpoint=$2
shift 2

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/common.sh"
# the order in which Megatron-Core launches copies and matmuls is the order in which they run
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

exec torchrun --nnodes "$nnodes" --nproc-per-node "$NPROC" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id megatron_llama2 \
    "$root/examples/megatron_llama2/train.py" "$@"
