#!/usr/bin/env bash
# Train on several nodes with torchrun. Run the same command on each node:
#
#   HEAD=node0 OUT=/shared/runs/xl bash torchrun.sh --model gpt2-xl --steps 10000
#
# HEAD  name or address of the node that hosts the rendezvous
# OUT   run directory, on a file system that all nodes share
# NODES, GPUS, PORT  number of nodes (default 2), ranks per node (8), port of the rendezvous (29400)
#
# If a rank dies, all ranks restart from the last complete checkpoint, at most three times. The same happens if a node
# died and the command is run there again.
set -euo pipefail

: "${HEAD:?set it to the node that hosts the rendezvous}" "${OUT:?set it to the run directory, shared by all nodes}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else restarted ranks find the addresses of the previous ones
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # seconds for the last checkpoint

exec torchrun \
  --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "$(basename "$OUT")" \
  --max-restarts 3 \
  -m zeroshard train --out "$OUT" --resume "$@"
