"""Trains two models whose programs are alike, and writes what each process found among the kept
programs, and the bits of its results.
"""

import hashlib
import sys
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

import tnt_jax as tnt
from tnt_jax.distributed.shared_sums import joining as shared_sums

counts: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))


def train(seed):
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(31, 5)).astype(np.float32), generator.normal(size=(31, 3))
    model = tnt.Model(nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)]), seed=seed)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    history = model.fit(x, y.astype(np.float32), batch_size=9, epochs=2, verbose=0).history
    state = model.state
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [repr(history), *(hashlib.md5(np.asarray(x).tobytes()).hexdigest() for x in leaves)]


def main():
    tnt.init()
    assert shared_sums.are_open()
    assert len(jax.live_arrays()) == 0, "Nothing was compiled before."
    results = [train(1), train(2)]
    rank = tnt.get_process_index()
    asked, found = counts["compile_requests_use_cache"], counts["cache_hits"]
    Path(sys.argv[1], f"rank{rank}").write_text("\n".join(map(str, [asked, found, *results])))


main()
