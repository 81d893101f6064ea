#!/bin/bash
# Trains on several nodes of a SLURM cluster, one torchrun on each: `sbatch examples/cluster/slurm.sh RUN.YAML RUN`.
# Dataset and RUN lie on a file system that all nodes see. Queued again, after its time or a lost node, the job goes on
# from RUN's newest checkpoint with the same losses.
#SBATCH --job-name=penstock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=penstock-%j.log
# Five minutes before the end, the trainers get SIGTERM: they finish the step, save and stop.
#SBATCH --signal=TERM@300
set -euo pipefail

run_file=${1:?usage: sbatch slurm.sh RUN.YAML RUN}
run=${2:?usage: sbatch slurm.sh RUN.YAML RUN}
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

# The first node is where the processes find each other; the port follows from the job, so that two jobs do not meet.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# Threads of the loader come out of each process's share of the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / processes))}
# Kernels are compiled once, where all nodes find them; an image has them already (docs/how-to/clusters.md).
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$HOME/.cache/penstock-kernels}

srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes" \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head_node:$port" \
  -m penstock train "$run_file" --output "$run" --resume
