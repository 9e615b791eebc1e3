"""Trains models that compare rows in several processes: arguments are a folder for the results,
also with rows that each process brings itself, whose shards differ in length.
"""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from batch_models import compiled, make_rows, shard_of

import tnt_jax as tnt

x, y = make_rows(22)
results = {}
model, _ = compiled("clip")
history = model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
outputs = model.predict(x, batch_size=22, verbose=0)
results["clip"] = np.array(history["loss"]), model.variables, outputs
model, _ = compiled("batch mean")
own = shard_of(tnt.get_process_index(), tnt.get_process_count())
history = model.fit(own, epochs=2, tnt_distribute_dataset=False, verbose=0).history
results["shards"] = (
    np.array(history["loss"]),
    model.variables,
    model.predict(own, tnt_distribute_dataset=False, verbose=0),
)
if tnt.is_master_rank():
    Path(sys.argv[1], "results").write_bytes(pickle.dumps(jax.tree.map(np.asarray, results)))
