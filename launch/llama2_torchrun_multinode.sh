#!/usr/bin/env bash
# Trains on several machines; start it on each of them, with the same arguments:
#   launch/llama2_torchrun_multinode.sh NNODES HOST:PORT [arguments of train.py]
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

exec torchrun --nnodes "$nnodes" --nproc-per-node "$NPROC" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id llama2 \
    "$root/examples/llama2/train.py" "$@"
