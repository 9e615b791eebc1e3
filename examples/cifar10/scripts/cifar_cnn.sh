#!/bin/bash
#SBATCH --job-name=cifar-cnn
#SBATCH --nodes=1
#SBATCH --time=01:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

# Submit it in the folder of train.py. One process for each device of each node: sbatch -N 8 scripts/cifar_cnn.sh
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# The data set is downloaded once, by one process, before all of them read it.
python -c "import image_data; image_data.cifar10(batch_size=1, seed=0, data_dir='data')"
# A job that SLURM starts again, after a node has failed, has the same number and goes on.
tnt-jax --checkpoint-dir "checkpoints/$SLURM_JOB_ID" -- train.py configs/cifar10_cnn.yaml -d "$@"
