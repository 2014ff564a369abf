#!/usr/bin/env bash
# Train over several nodes with torchrun. Start the same line on each of them:
#
#   HEAD=node0 OUT=/shared/runs/xl bash torchrun.sh --model gpt2-xl --steps 10000
#
# HEAD  name or address of one of the nodes, where all meet
# OUT   directory of the run, on a file system that all nodes share
# NODES, GPUS, PORT  2 nodes, 8 ranks on each, port 29400, unless they say otherwise
#
# When a rank dies, all start again from the last whole checkpoint; so they do when a node has died and the line was
# started there again. Three times at most.
set -euo pipefail

: "${HEAD:?name of a node where all meet}" "${OUT:?directory of the run, shared by all nodes}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else ranks that start again find the addresses of those before them
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # seconds for the last checkpoint

exec torchrun \
  --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "$(basename "$OUT")" \
  --max-restarts 3 \
  -m zeroshard train --out "$OUT" --resume "$@"
