"""Every process trains on a Ray dataset that the master's Ray executes; then its actor is killed.

tnt-jax -n 2 -- train_ray_data.py ADDRESS FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import ray

import tnt_jax as tnt

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import ray_training as training

tnt.init()
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
ray.data.DataContext.get_current().enable_progress_bars = False
process = tnt.get_process_index()

spec = tnt.data.RayData(training.dataset_of(ray.data), batch_size=training.SIZE)
found = training.numbers(training.make_model(), spec, validation_data=spec)
np.savez(Path(sys.argv[2]) / f"{process}.npz", **found)


class KillActor(tnt.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and tnt.is_master_rank():
            for actor in ray.util.list_named_actors(all_namespaces=True):
                if actor["name"].startswith("rows-"):
                    ray.kill(ray.get_actor(**actor))


x = np.ones((4000, 3), np.float32)
many = training.dataset_of(ray.data, x, np.ones((4000, 1), np.float32))
with pytest.raises(Exception, match=r"(?i)actor"):
    training.make_model().fit(
        tnt.data.RayData(many, batch_size=2), verbose=0, callbacks=[KillActor()]
    )
print(f"process {process} has ended", flush=True)
ray.shutdown()
