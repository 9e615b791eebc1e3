"""Trains while private names of JAX are missing for tnt_jax alone, and writes losses and warnings.

A process that is alone trains with dropout only.
"""

import json
import logging
import sys
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from missing_names import Drops, Plain, missing, train

FOLDER, MISSING = Path(sys.argv[1]), set(sys.argv[2:])
texts = []
handler = logging.Handler()
handler.emit = lambda record: texts.append(record.getMessage())
logging.getLogger("tnt_jax").addHandler(handler)


def main():
    import tnt_jax as tnt
    from tnt_jax import _jax

    tnt.init()
    meshes = [None, {"fsdp": 2}] if tnt.get_size() == 2 else []
    losses = [train(tnt, Plain(), mesh=mesh) for mesh in meshes]
    with _jax.profile() as recording:
        jax.block_until_ready(jax.jit(jax.numpy.sin)(1.0))
    _jax.skip_cleanup()
    found = {
        "losses": losses,
        "dropout": train(tnt, Drops()),
        "planes": len(list(recording.data.planes)),
        "listens": _jax.coordinator_listens(),
        "warnings": texts,
    }
    (FOLDER / f"rank{tnt.get_process_index()}").write_text(json.dumps(found))


with missing(MISSING):
    main()
