#!/usr/bin/env bash
# Trains on machines that Slurm gives: sbatch launch/llama2_slurm.sh [arguments of train.py]
# Options of sbatch override the header: sbatch --nodes 4 launch/llama2_slurm.sh ...
#SBATCH --job-name=llama2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file from a folder of its own; the job knows where the original is.
script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
# all names are read: one that stopped early could end scontrol, and with it the job
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 20000))

srun "$(dirname "$script")/llama2_torchrun_multinode.sh" "$SLURM_NNODES" "$host:$port" "$@"
