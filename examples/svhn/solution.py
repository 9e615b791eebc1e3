"""The solution of the exercise: the steps of a custom loop."""

import optax

import tnt_jax as tnt

train_loss, train_accuracy = tnt.metrics.Mean(), tnt.metrics.SparseCategoricalAccuracy()
eval_loss, eval_accuracy = tnt.metrics.Mean(), tnt.metrics.SparseCategoricalAccuracy()


@tnt.distributed_step
def train_step(state, batch, key):
    """Makes an update; returns the state and the mean loss of the global batch."""

    def loss_fn(params):
        rngs = {"dropout": key}
        logits = state.apply_fn({"params": params}, batch.inputs, train=True, rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return tnt.compute_average_loss(losses), (losses, logits)

    (loss, (losses, logits)), grads = tnt.value_and_grad(loss_fn, has_aux=True)(state.params)
    train_loss.update_state(losses)
    train_accuracy.update_state(batch.targets, logits)
    return state.apply_gradients(grads=grads), {"loss": loss}


@tnt.distributed_eval_step
def eval_step(state, batch):
    """Counts losses and hits of the global batch."""
    logits = state.apply_fn({"params": state.params}, batch.inputs, train=False)
    eval_loss.update_state(optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets))
    eval_accuracy.update_state(batch.targets, logits)
    return {}
