"""Trains a network of `benchmarks/scaling.py` by `fit`, for `tnt-jax scale` to measure.

    tnt-jax scale --ranks 1 2 --weak --no-gpu -- benchmarks/scaling_script.py mlp

The rows of a step are those of a rank in `scaling.py`, so that weak scaling is the same there.
"""

import sys

import optax
from scaling_models import SIZES, load, make_flax
from scaling_worker import MOMENTUM, RATE

import tnt_jax as tnt


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in SIZES:
        sys.exit(f"Name one of {', '.join(SIZES)}.")
    name = sys.argv[1]
    size = SIZES[name]
    # Enough for an epoch of some steps on several ranks.
    x, y = load(name, real=False, num_rows=16 * size.steps * size.rows)
    model = tnt.Model(make_flax(name))
    model.compile(
        optax.sgd(RATE, momentum=MOMENTUM),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x if len(x) > 1 else x[0], y, batch_size=size.rows)


if __name__ == "__main__":
    main()
