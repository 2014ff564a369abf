#!/usr/bin/env bash
# Train on two nodes of eight GPUs under Slurm:
#
#   OUT=/shared/runs/xl sbatch slurm.sh --model gpt2-xl --steps 10000
#
# A run longer than the time limit: send it several times with --dependency=singleton, and each goes on where the one
# before was stopped.

#SBATCH --job-name=zeroshard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8   # one rank a GPU
#SBATCH --gpus-per-node=8     # not --gpus-per-task: a rank sees all GPUs of its node and takes its own
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300     # seconds before the limit at which ranks are told to write their last checkpoint
#SBATCH --requeue             # after a node has failed; --resume below then goes on from the last checkpoint
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
set -euo pipefail

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  zeroshard train --out "${OUT:-runs/$SLURM_JOB_NAME}" --resume "$@"
