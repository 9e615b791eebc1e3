"""Keras's own tests with our classes and models in the place of Keras's.

Our optimizers are rules that a step applies; `applied` adds the methods by which Keras's tests
apply them to variables.
"""

import functools
import importlib
import inspect
import types
import unittest
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import optax
from keras.src.backend.jax.trainer import JAXTrainer

import tnt_jax as tnt

# Modules whose cases test what a model does, and the methods that our model does in its place.
OF_MODELS = ("keras.src.trainers.trainer_test", "keras.src.models.model_test")
# Opens a file of ours by Keras's `load_model`.
OPENS_BY_KERAS = "keras.src.callbacks.swap_ema_weights_test"
_METHODS = """fit evaluate predict train_on_batch test_on_batch predict_on_batch reset_metrics
    get_metrics_result get_compile_config compile_from_config"""


@functools.cache
def applied(cls):
    """Returns our class of optimizers with Keras's methods around its transformation."""

    class Applied(cls):
        _variables = ()
        _iterations = 0
        _sum = None

        @property
        def built(self):
            return bool(self._variables)

        def build(self, variables):
            # Keras looks for exclusions in the names of variables.
            self._variables = tuple(variables)
            self._keys = [
                f"{index}/{getattr(v, 'path', '') or v.name}" for index, v in enumerate(variables)
            ]
            self._transformation = self.transformation()
            self._state = self._transformation.init(self._values())

        def apply(self, grads, variables=None):
            if not self.built:
                self.build(list(variables))
            missing = [grad is None for grad in grads]
            if all(missing):
                raise ValueError("No gradients provided for any variable.")
            if any(missing):
                warnings.warn("Gradients do not exist for variables", stacklevel=2)
            values = self._values()
            grads = {
                key: jnp.zeros_like(values[key]) if grad is None else jnp.asarray(grad)
                for key, grad in zip(self._keys, grads, strict=True)
            }
            self._iterations += 1
            self._sum = grads if self._sum is None else jax.tree.map(jnp.add, self._sum, grads)
            steps = self.gradient_accumulation_steps or 1
            if self._iterations % steps == 0:
                means, self._sum = jax.tree.map(lambda x: x / steps, self._sum), None
                updates, self._state = self._transformation.update(means, self._state, values)
                for variable, key, is_missing in zip(
                    self._variables, self._keys, missing, strict=True
                ):
                    if not is_missing:
                        variable.assign(values[key] + updates[key])

        def apply_gradients(self, grads_and_vars):
            self.apply(*map(list, zip(*grads_and_vars, strict=True)))
            return self._iterations

        @property
        def iterations(self):
            return self._iterations // (self.gradient_accumulation_steps or 1)

        @property
        def variables(self):
            slots = (
                jax.tree.leaves([optax.tree.get(self._state, key) for key in ("slots", "shared")])
                if self.built
                else []
            )
            return [
                self._iterations,
                *([] if callable(self.learning_rate) else [self.learning_rate]),
                *slots,
            ]

        def scale_loss(self, loss):
            return loss if self.loss_scale_factor is None else loss * self.loss_scale_factor

        def finalize_variable_values(self, variables):
            for variable, average in zip(
                variables, self._model_variables_moving_average, strict=True
            ):
                variable.assign(average)

        @property
        def _model_variables_moving_average(self):
            return jax.tree.leaves(self.averaged_params(self._state))

        @property
        def _accumulated_gradients(self):
            return jax.tree.leaves(self._sum or jax.tree.map(jnp.zeros_like, self._values()))

        def _clip_gradients(self, grads):
            return self.clip([jnp.asarray(grad) for grad in grads])

        def _values(self):
            return dict(
                zip(self._keys, [variable.value for variable in self._variables], strict=True)
            )

        def __reduce__(self):
            return _from_config, (cls, self.get_config())

    Applied.__name__, Applied.__qualname__, Applied.__module__ = (
        cls.__name__,
        cls.__qualname__,
        cls.__module__,
    )
    return Applied


def _from_config(cls, config):
    return applied(cls).from_config(config)


def _made(optimizer):
    return optimizer if optimizer is None else _from_config(type(optimizer), optimizer.get_config())


def _optimizers():
    """Returns what stands for the module `keras.optimizers`."""
    found = {
        name: getattr(tnt.optimizers, name, value) for name, value in vars(keras.optimizers).items()
    }
    found = {
        name: applied(value) if inspect.isclass(value) else value
        for name, value in found.items()
        if name[0] != "_"
    }
    ours = {
        "get": lambda value: (
            value
            if isinstance(value, tnt.optimizers.Optimizer)
            else _made(tnt.optimizers.get(value))
        ),
        "deserialize": lambda config: _made(tnt.optimizers.deserialize(config)),
        "serialize": tnt.optimizers.serialize,
        "schedules": tnt.schedules,
    }
    return types.SimpleNamespace(**(found | ours))


class Wrapped:
    """A Keras model that is trained and saved by ours, and otherwise is Keras's."""

    _of_keras = ("layers", "get_layer", "trainable_variables", "trainable_weights", "weights")

    def __init__(self, theirs, ours=None):
        self._theirs, self._ours = theirs, ours or tnt.Model(theirs)

    def __call__(self, *args, **kwargs):
        return self._theirs(*args, **kwargs)

    def compile(self, *args, run_eagerly=False, **kwargs):
        self._ours.compile(*args, **kwargs)

    def save(self, *args, **kwargs):
        _save_model(self, *args, **kwargs)

    def save_weights(self, *args, **kwargs):
        _save_weights(self, *args, **kwargs)

    def load_weights(self, *args, **kwargs):
        _load_weights(self, *args, **kwargs)

    def __getattr__(self, name):
        is_theirs = name in self._of_keras or not hasattr(self._ours, name)
        return getattr(self._theirs if is_theirs else self._ours, name)


class Around(keras.Model):
    """A Keras model around a layer that is a trainer as well."""

    def __init__(self, layer):
        super().__init__(dtype=layer.dtype_policy)
        self.inner = layer
        self._takes_training = "training" in inspect.signature(layer.call).parameters

    def call(self, x, training=None):
        return self.inner(x, **({"training": training} if self._takes_training else {}))


class _Ours(tnt.Model):
    """Shows callbacks the attributes of the Keras model, too."""

    def __getattr__(self, name):
        if name[0] == "_":
            raise AttributeError(name)
        return getattr(self.module, name)


def _ours(trainer):
    """Returns our model of a trainer, made once."""
    if "_ours" not in vars(trainer):
        module = trainer if isinstance(trainer, keras.Model) else Around(trainer)
        object.__setattr__(trainer, "_ours", _Ours(module))
    return vars(trainer)["_ours"]


def _compile(trainer, *args, run_eagerly=False, jit_compile="auto", **kwargs):
    _ours(trainer).compile(*args, **kwargs)


def training_by_ours():
    """Lets our models do what Keras's models do."""
    methods = {
        name: lambda trainer, *args, name=name, **kwargs: getattr(_ours(trainer), name)(
            *args, **kwargs
        )
        for name in _METHODS.split()
    }
    names = property(lambda trainer: _ours(trainer).metrics_names)
    return mock.patch.multiple(JAXTrainer, compile=_compile, metrics_names=names, **methods)


def _sequential(*args, **kwargs):
    return Wrapped(keras.Sequential(*args, **kwargs))


_is_loading = False


class Model(keras.Model):
    """Makes wrapped models, of its own class and of derived ones."""

    def __new__(cls, *args, **kwargs):
        if _is_loading:
            return super().__new__(cls)
        if cls is Model:
            return Wrapped(keras.Model(*args, **kwargs))
        model = super().__new__(cls)
        model.__init__(*args, **kwargs)
        return Wrapped(model)


class Instead:
    """A module with some names of ours; what a test sets in it, is set in the module itself."""

    def __init__(self, module, **ours):
        vars(self).update(ours | {"_module": module})

    def __getattr__(self, name):
        return getattr(self._module, name)

    def __setattr__(self, name, value):
        setattr(self._module, name, value)

    def __delattr__(self, name):
        delattr(self._module, name)


def _model_of(model):
    return model._ours if isinstance(model, Wrapped) else tnt.Model(model)


def _load_model(path, custom_objects=None, compile=True, safe_mode=True):
    with mock.patch(f"{__name__}._is_loading", True):
        loaded = tnt.models.load_model(
            path, custom_objects=custom_objects, compile=compile, trust=not safe_mode
        )
    return Wrapped(loaded.module, loaded)


# Arguments that only Keras's functions take go to these, with `model.module`.


def _save_model(model, path, overwrite=True, **of_keras):
    if of_keras:
        return keras.saving.save_model(_module(model), path, overwrite, **of_keras)
    ours = model._ours if isinstance(model, Wrapped) else model
    return tnt.models.save_model(ours, path, overwrite)


def _save_weights(model, path, overwrite=True, **of_keras):
    if of_keras:
        return keras.saving.save_weights(_module(model), path, overwrite, **of_keras)
    return _model_of(model).save_weights(path, overwrite)


def _load_weights(model, path, skip_mismatch=False, **of_keras):
    if of_keras:
        return keras.saving.load_weights(_module(model), path, skip_mismatch, **of_keras)
    return _model_of(model).load_weights(path, skip_mismatch)


def _module(model):
    return model._ours.module if isinstance(model, Wrapped) else model


_SAVING = {
    "save_model": _save_model,
    "load_model": _load_model,
    "save_weights": _save_weights,
    "load_weights": _load_weights,
    "save_weights_only": _save_weights,
    "load_weights_only": _load_weights,
    "save_model_to_hdf5": _save_model,
    "load_model_from_hdf5": _load_model,
}


def _replacement(name, value):
    if inspect.isclass(value) and issubclass(value, unittest.TestCase):
        return _lenient(value)
    if value is keras.Sequential:
        return _sequential
    if inspect.ismodule(value) and value.__name__ in ("keras", "keras.src.models"):
        ours = {"Sequential": _sequential, "Model": Model}
        if value is keras:
            ours["saving"] = _saving_replacement("saving", keras.saving)
        return types.SimpleNamespace(**(vars(value) | ours))
    for kind in ("losses", "metrics", "callbacks"):
        if getattr(value, "__module__", "").startswith(f"keras.src.{kind}"):
            return getattr(getattr(tnt, kind), name, value)
        if inspect.ismodule(value) and value.__name__.startswith(f"keras.src.{kind}"):
            ours = {key: getattr(getattr(tnt, kind), key) for key in getattr(tnt, kind).__all__}
            return types.SimpleNamespace(**(vars(value) | ours))
    if inspect.isclass(value) and value.__module__.startswith("keras.src.optimizers"):
        found = getattr(tnt.schedules, name, None) or getattr(tnt.optimizers, name, None)
        if found is None:
            return value
        return applied(found) if hasattr(tnt.optimizers, name) else found
    if inspect.ismodule(value) and value.__name__.startswith("keras.src.optimizers.schedules"):
        return tnt.schedules
    is_optimizers = inspect.ismodule(value) and value.__name__ == "keras.src.optimizers"
    return _optimizers() if is_optimizers else value


def _saving_replacement(name, value):
    if inspect.ismodule(value) and ".saving" in value.__name__:
        return Instead(value, **{key: _SAVING[key] for key in _SAVING if hasattr(value, key)})
    if inspect.isfunction(value) and ".saving" in value.__module__:
        return _SAVING.get(name, value)
    return value


def _lenient(cls):
    """Returns a case whose error texts may be ours, and that writes objects as we do."""

    def assert_raises(self, error, regex=None, *args, expected_regex=None, **kwargs):
        return self.assertRaises(error, *args, **kwargs)  # noqa: PT027

    def there_and_back(self, instance, custom_objects=None):
        config = instance.get_config()
        revived = type(instance).from_config(config)
        assert config == revived.get_config()
        kinds = {
            tnt.optimizers.Optimizer: tnt.optimizers,
            tnt.losses.Loss: tnt.losses,
            tnt.metrics.Metric: tnt.metrics,
        }
        ours = next(
            (kind for cls, kind in kinds.items() if isinstance(instance, cls)), tnt.schedules
        )
        written = ours.serialize(instance)
        assert config == ours.deserialize(written, custom_objects).get_config()
        assert set(dir(instance)) == set(dir(revived))

    def tear_down(self):
        Model.__bases__ = (keras.Model,)  # Keras makes it functional for good.
        cls.tearDown(self)

    replaced = {
        "tearDown": tear_down,
        "assertRaisesRegex": assert_raises,
        "run_class_serialization_test": there_and_back,
        "__module__": __name__,
    }
    return type(cls.__name__, (cls,), replaced)


def cases(module_name):
    """Returns the cases of one of Keras's test modules, which from then on test our classes."""
    module = importlib.import_module(module_name)
    for name, value in list(vars(module).items()):
        is_case = inspect.isclass(value) and issubclass(value, unittest.TestCase)
        if name[0] != "_" and (is_case or module_name not in OF_MODELS):
            found = _replacement(name, value)
            is_ours = module_name != OPENS_BY_KERAS
            setattr(module, name, _saving_replacement(name, found) if is_ours else found)
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == __name__
    ]
