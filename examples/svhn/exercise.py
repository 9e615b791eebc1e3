"""The exercise: write the steps of a custom loop. `train.py --steps exercise` runs them, and
`solution.py` has them.
"""

import tnt_jax as tnt

train_loss, train_accuracy = tnt.metrics.Mean(), tnt.metrics.SparseCategoricalAccuracy()
eval_loss, eval_accuracy = tnt.metrics.Mean(), tnt.metrics.SparseCategoricalAccuracy()


def train_step(state, batch, key):
    """Makes an update.

    Turn it into a distributed step: `batch.inputs` and `batch.targets` are then the rows of one
    device, and the loss must be the mean over the *global* batch, however many rows a device has.
    Let `train_loss` take the loss of each row, and `train_accuracy` labels and logits.

    Args:
        state: TrainState; `state.apply_fn({"params": params}, images, train=True,
            rngs={"dropout": key})` gives the logits.
        batch: A batch of `tnt.distribute(images, labels, ...)`.
        key: Key of the dropout.

    Returns:
        The state after the update, and `{"loss": ...}`.
    """
    raise NotImplementedError("Write train_step in exercise.py.")


def eval_step(state, batch):
    """Updates `eval_loss` and `eval_accuracy`; turn it into a distributed evaluation step.

    Returns:
        An empty dictionary: the metrics keep what is counted.
    """
    raise NotImplementedError("Write eval_step in exercise.py.")
