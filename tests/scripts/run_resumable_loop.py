"""Runs the blocks of docs/loops.md up to the loop that resumes, and writes what comes out.

The arguments: where; the file for the weights; after which save the process is killed, while the
checkpoint is being written, or 0 for never; and which process.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from pages import ROOT, blocks

import tnt_jax as tnt

os.chdir(sys.argv[1])
last_save, victim = int(sys.argv[3]), int(sys.argv[4])
save, saved_steps = tnt.LoopCheckpoints.save, []


def save_and_die(self, state, dataset):
    save(self, state, dataset)
    saved_steps.append(int(state.step))
    if len(saved_steps) == last_save and tnt.get_process_index() == victim:
        os.kill(os.getpid(), signal.SIGKILL)


tnt.LoopCheckpoints.save = save_and_die
found = {}
first, *others = blocks(ROOT / "docs" / "loops.md")
[block] = [text for text in others if "LoopCheckpoints" in text]
for text in (first, block):
    exec(text, found)
print("first save after step", saved_steps[0], flush=True)
if tnt.is_master_rank():
    np.savez(sys.argv[2], *map(np.asarray, jax.tree.leaves(found["state"])))
