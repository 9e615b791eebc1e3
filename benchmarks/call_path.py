"""Counts the files and functions of tnt_jax that a call enters, in a fresh process.

    python benchmarks/call_path.py --output benchmarks/results/call_path.json

`fit` is followed up to its first step, `evaluate` and `save` to their end, in all threads. Fewer of
them are less to read for whoever wants to know what a call does. `--list` names them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

CALLS = ("fit", "evaluate", "save")


def follow(call: str) -> list[tuple[str, str]]:
    """Returns the functions that a call enters, with their files, in order."""
    import jax
    import numpy as np
    from flax import linen as nn

    import tnt_jax as tnt

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(256, 64)).astype(np.float32), rng.integers(0, 10, 256)
    model = tnt.Model(MLP())
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    if call != "fit":
        model.fit(x, y, batch_size=64, verbose=0)
    package = str(Path(tnt.__file__).parent)
    entered: dict[tuple[str, str], None] = {}
    has_ended = threading.Event()

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or has_ended.is_set() or not code.co_filename.startswith(package):
            return
        if call == "fit" and code.co_name == "on_batch_end":
            has_ended.set()
            return
        if not code.co_name.startswith("<"):  # Neither modules nor comprehensions.
            file = str(Path(code.co_filename).relative_to(package))
            entered[file, code.co_qualname] = None

    with tempfile.TemporaryDirectory() as folder:
        calls = {
            "fit": lambda: model.fit(x, y, batch_size=64, verbose=0),
            "evaluate": lambda: model.evaluate(x, y, batch_size=64, verbose=0),
            "save": lambda: model.save(f"{folder}/model"),
        }
        threading.setprofile(profile)
        sys.setprofile(profile)
        calls[call]()
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return list(entered)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--call", choices=CALLS, help="follow one call in this process")
    parser.add_argument("--list", action="store_true", help="name the functions")
    parser.add_argument("--output", help="file for the numbers")
    args = parser.parse_args()
    if args.call is not None:
        print(json.dumps(follow(args.call)))
        return
    found = {}
    for call in CALLS:
        command = [sys.executable, __file__, "--call", call]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        entered = json.loads(done.stdout.splitlines()[-1])
        files = {file for file, _ in entered}
        found[call] = {"files": len(files), "functions": len(entered)}
        print(f"{call:10}{len(files):4} files {len(entered):4} functions")
        if args.list:
            print(*(f"    {file} {name}" for file, name in entered), sep="\n")
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
