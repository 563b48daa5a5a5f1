# Sourced by the scripts beside it: sets `root`, and the environment of the processes that they start.
# NPROC, the number of processes on this machine, is one per GPU unless it is set, and 1 where there is no GPU.

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
NPROC=${NPROC:-$((gpus > 0 ? gpus : 1))}
if [ "$gpus" -gt 0 ]; then
    threads=$(($(nproc) / NPROC))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
else
    export DS_ACCELERATOR=cpu
    # The tiny model's operators are too small to share: more threads make its steps slower.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
