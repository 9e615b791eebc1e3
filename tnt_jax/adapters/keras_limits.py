"""Refuses features of Keras models that cannot be trained on several ranks."""

import keras


def require_trainable(model: keras.Model) -> None:
    """Checks that a model and its layers can be trained on several ranks.

    Raises:
        ValueError: If a layer keeps a state for each row of a batch, a variable's gradient is its
            new value, or Keras itself distributes variables over devices.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"The layer {layer.name!r} of the Keras model {model.name!r} is stateful: it keeps "
                "a state for each row of a batch, and rows lie on different ranks. Make it with "
                "stateful=False, and give it whole sequences."
            )
    direct = [
        v.path for v in model.trainable_variables if getattr(v, "overwrite_with_gradient", False)
    ]
    if direct:
        raise ValueError(
            f"The Keras model {model.name!r} trains in float8: the scales {', '.join(direct[:4])} "
            "take their gradients as values, which cannot be summed over ranks. Use the policy "
            "'mixed_bfloat16' or 'mixed_float16'."
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "keras.distribution is set, so Keras itself lays variables out on the devices. Leave "
            "it out: a tnt_jax.Model uses all devices of the job. "
            "keras.distribution.set_distribution(None) takes it back."
        )
