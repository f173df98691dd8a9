#!/bin/bash
# Slurm: as many nodes as asked for, a rank per GPU. Submitted again it goes on where it stopped.
#     sbatch --nodes 2 configs/launch/slurm.sh configs/nanovlm-460m.yaml --parallel fsdp
#SBATCH --job-name=ocelli
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun .venv/bin/python -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:${MASTER_PORT:-29500}" \
    train.py "$@"
