"""A forecast with its uncertainty: the next steps of an EEG, as quantiles.

    tnt-jax -n 2 -- examples/gallery/forecasting.py

Four electrodes, 800 real measurements that Matplotlib ships. The loss of a quantile is that of
Koenker and Bassett 1978, Econometrica 46, equation 3.1.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from matplotlib.cbook import get_sample_data

import tnt_jax as tnt

PAST, FUTURE = 16, 8
QUANTILES = np.array([0.1, 0.5, 0.9], np.float32)


def windows(series):
    """Returns all windows of a series `[n, 4]`: past `[m, PAST, 4]`, future `[m, FUTURE, 4]`."""
    both = np.lib.stride_tricks.sliding_window_view(series, PAST + FUTURE, axis=0)
    both = both.transpose(0, 2, 1)
    return both[:, :PAST], both[:, PAST:]


class Forecaster(nn.Module):
    """A hidden layer; quantiles `[batch, FUTURE, 4, 3]`, as changes of the last value."""

    @nn.compact
    def __call__(self, past, train: bool):
        x = nn.Dropout(0.3, deterministic=not train)(past.reshape(len(past), -1))
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        changes = nn.Dense(FUTURE * 4 * len(QUANTILES))(x)
        return past[:, -1:, :, None] + changes.reshape(-1, FUTURE, 4, len(QUANTILES))


def quantile_loss(future, quantiles):
    """One value per row: what is above a quantile q costs q, what is below 1 - q."""
    error = future[..., None] - quantiles
    return jnp.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean((1, 2, 3))


def main(epochs=40):
    """Trains on the first 600 measurements, and returns the absolute error of the median for the
    others, that of repeating the last value, and the share within the outer quantiles.
    """
    file = get_sample_data("eeg.dat", asfileobj=False)
    series = np.fromfile(file).reshape(800, 4).astype(np.float32)
    series = (series - series[:600].mean(0)) / series[:600].std(0)
    past, future = windows(series[600 - PAST :])

    model = tnt.Model(Forecaster())
    model.compile(tnt.optimizers.AdamW(2e-3, weight_decay=0.05), quantile_loss)
    model.fit(*windows(series[:600]), batch_size=32, epochs=epochs, verbose=2)
    low, median, high = np.moveaxis(model.predict(past, verbose=0), -1, 0)
    error, naive = (float(np.abs(future - x).mean()) for x in (median, past[:, -1:]))
    covered = float(np.mean((low < future) & (future < high)))
    if tnt.is_master_rank():
        print(f"error {error:.2f}, of the last value {naive:.2f}; {covered:.0%} within 80 %")
    return error, naive, covered


if __name__ == "__main__":
    main()
