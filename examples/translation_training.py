"""Loss, metric and weight averaging of the translation tutorial."""

from collections import deque
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

import tnt_jax as tnt

PAD_ID = 0


class LabelSmoothedCrossentropy(tnt.losses.Loss):
    """Cross-entropy of tokens with smoothed targets, over all real tokens of the global batch.

    The true token has the probability 1 - smoothing, each other one smoothing / (V - 1) (Szegedy et
    al. 2016, arXiv:1512.00567, section 7). The entropy of that distribution is subtracted, so that
    a perfect model has the loss 0. Padding counts nowhere.

    Args:
        smoothing: Probability taken from the true token.
    """

    def __init__(self, smoothing=0.1):
        super().__init__("label_smoothed_crossentropy")
        self.smoothing = smoothing

    def call(self, y_true, y_pred):
        num_others = y_pred.shape[-1] - 1
        confidence, rest = 1 - self.smoothing, self.smoothing / num_others
        log_probs = jax.nn.log_softmax(y_pred)
        true = jnp.take_along_axis(log_probs, y_true[..., None], axis=-1)[..., 0]
        cross_entropy = -confidence * true - rest * (jnp.sum(log_probs, axis=-1) - true)
        entropy = -confidence * np.log(confidence) - num_others * rest * np.log(rest + 1e-20)
        return cross_entropy - entropy

    def valid(self, y_true, y_pred):
        return y_true != PAD_ID


class TokenAccuracy(tnt.metrics.Metric):
    """Share of the real tokens that are the most probable ones."""

    def __init__(self):
        super().__init__(name="accuracy")

    def increments(self, y_true, y_pred, weight=None):
        real = (y_true != PAD_ID).astype(jnp.float32)
        if weight is not None:
            real = real * weight.reshape(-1, *(1,) * (real.ndim - 1))
        return jnp.sum(real * (jnp.argmax(y_pred, axis=-1) == y_true)), jnp.sum(real)

    def compute(self, sums):
        hits, tokens = sums
        return hits / tokens


class AverageWeights(tnt.callbacks.Callback):
    """Keeps the weights of the last epochs, on the host (Vaswani et al.

    2017, section 6.1, average the last 5 or 20 checkpoints).

    Args:
        num_epochs: Epochs to average; 0 keeps nothing and changes nothing.
    """

    def __init__(self, num_epochs):
        super().__init__()
        self._kept = deque(maxlen=num_epochs)

    def state(self):
        return {str(number): weights for number, weights in enumerate(self._kept)}

    def set_state(self, state):
        self._kept.clear()
        self._kept.extend(state[str(number)] for number in range(len(state)))

    def on_epoch_end(self, epoch, logs=None):
        if self._kept.maxlen:
            self._kept.append(self.model.get_weights())

    @contextmanager
    def averaged(self, model):
        """Lets the model have the mean of the kept weights within a `with` block."""
        if not self._kept:
            yield
            return
        own = model.get_weights()
        model.set_weights([np.mean(weights, axis=0) for weights in zip(*self._kept, strict=True)])
        yield
        model.set_weights(own)
