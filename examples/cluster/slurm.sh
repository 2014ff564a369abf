#!/usr/bin/env bash
# Train on two nodes of eight GPUs under Slurm:
#
#   OUT=/shared/runs/xl sbatch slurm.sh --model gpt2-xl --steps 10000
#
# If a run takes longer than the time limit, submit it several times with --dependency=singleton: each job resumes where
# the one before stopped.

#SBATCH --job-name=zeroshard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8   # one rank per GPU
#SBATCH --gpus-per-node=8     # not --gpus-per-task: a rank sees all GPUs of its node and selects its own
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300     # send SIGTERM 300 seconds before the limit: the ranks write a last checkpoint
#SBATCH --requeue             # after a node failure; --resume below continues from the last checkpoint
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
set -euo pipefail

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  zeroshard train --out "${OUT:-runs/$SLURM_JOB_NAME}" --resume "$@"
