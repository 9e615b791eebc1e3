"""Keras 3 models on the JAX backend as pure functions: functional, Sequential and subclassed."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tnt_jax.adapters.base import Adapter, Applied, VariablePath, Variables, check_trains_the_same
from tnt_jax.adapters.forward_passes import (
    Kind,
    kinds_of_losses,
    penalty_of,
    warn_of_repeated_rows,
    with_draws_by_row,
    with_varying_loops,
)
from tnt_jax.adapters.keras_layers import layers_of_a_rank, paths_of, require_trainable
from tnt_jax.distributed.sums.random_rows import Draws
from tnt_jax.distributed.sums.reduction import psum

# Name of the variable of a seed generator.
_SEED = "seed_generator_state"
# Rows on which the losses added by a model are tested.
_PROBE_ROWS = 8


class _Call(NamedTuple):
    outputs: Any
    values: dict[int, Any]
    losses: list[jax.Array]


class KerasAdapter(Adapter):
    """A Keras model, which holds its own variables: training starts from them and writes them back.

    Params are the model's trainable variables and model state the others, both by path. These are
    exact on any number of ranks: random numbers with one row per row of the batch, weight and
    activity regularizers, batch normalisation with `synchronized`, and losses passed to `add_loss`
    as means or sums over full ranks or as values `[rows]`. In a last batch with padded rows, a
    scalar loss on the activations includes the repeated rows of its rank, with a warning.

    Random numbers follow from the step, in evaluation from the place of a row in the data, and not
    from the states of the seed generators: dropout differs from that of `keras_model.fit`.
    """

    holds_variables = True
    knows_penalty = True

    def __init__(self, model: keras.Model, *, synchronized: bool = False) -> None:
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"The Keras model {model.name!r} uses the backend {keras.backend.backend()!r}, but "
                "training needs JAX. Set the environment variable KERAS_BACKEND=jax before the "
                "first import of keras."
            )
        self.module = model
        self.name = model.name
        self._synchronized = synchronized
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self._kinds: dict[bool, tuple[Kind, ...]] = {}
        # Trained and other variables by path, as of the last call of `attach`.
        self._parts: tuple[dict[VariablePath, keras.Variable], ...] = ({}, {})
        # When the variables were last read or written: their arrays, and what was trained.
        self._seen: list[tuple[str, keras.Variable, Any]] = []
        self._flags: list[Any] = []
        self._sample: Any = None
        self.has_warned = False
        self.draws: dict[Any, Draws] = {}

    def sample_inputs(self) -> Any:
        """Returns one row for each input; none of a model that knows its variables alone."""
        inputs = getattr(self.module, "inputs", None)
        # Not every model takes inputs of size 1, even if its inputs have any size.
        has_any_size = any(None in x.shape[1:] for x in inputs or ())
        if not self.module.built or not inputs or has_any_size:
            # Layers that are built hold their variables; `attach` then needs no inputs yet.
            is_built = self.module.variables and all(
                layer.built for layer in self._layers() if layer is not self.module
            )
            return () if is_built and self._sample is None else self._sample
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype),
            inputs[0] if len(inputs) == 1 else self.module.input,
        )

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns the variables of the model, which is built for such inputs if need be."""
        self.attach(inputs)
        self._seen = self._held_arrays()
        values = {id(v): np.array(v.value) for v in self.module.variables}
        # In Keras's order.
        params = OrderedDict((path, values[id(v)]) for path, v in self._parts[0].items())
        return Variables(params, self._state(values))

    def attach(self, inputs: Any) -> None:
        """Builds the model if necessary, and examines its metrics and losses."""
        if inputs is None:
            raise ValueError(
                f"The Keras model {self.name!r} does not know its inputs: call it on a sample, or "
                "call build(shape_or_sample) of the tnt_jax.Model, before you use its variables."
            )
        is_known = bool(jax.tree.leaves(inputs))
        if is_known:
            inputs = self._sample = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    (1, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
                ),
                inputs,
            )
        if is_known and not all(layer.built for layer in self._layers()):
            self.module(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs))
        require_trainable(self.module)
        both = (self.module.trainable_variables, self.module.non_trainable_variables)
        self._parts = tuple(paths_of(self.module, variables) for variables in both)
        # Without inputs what the model adds to the loss is unknown: `trains_others` is then true,
        # so that the first data attaches again.
        self._flags = self._trainable_flags() if is_known else []
        for metric in self._metrics():
            _require_sums(metric)
        for train in (True, False) if is_known else ():
            self._kinds[train] = self._find_kinds(inputs, train=train)

    @with_draws_by_row
    @with_varying_loops
    def apply(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array, train: bool, mask: Any
    ) -> Applied:
        """Returns the model's forward pass over this rank's rows; see `Adapter.apply`."""
        check_trains_the_same(self)
        num_rows = jax.tree.leaves(inputs)[0].shape[0]
        values = self._by_variable(params, model_state)
        zeros = {id(v): jnp.zeros(v.shape, v.dtype) for m in self._metrics() for v in m.variables}
        with layers_of_a_rank(
            self._layers(), key=key, mask=mask, num_rows=num_rows, synchronized=self._synchronized
        ) as regularized:
            call = self._call({**values, **zeros}, inputs, train=train)
        if mask is not None:
            # But for regularizers.
            num_scalar = sum(loss.shape[:1] != (num_rows,) for loss in call.losses)
            if num_scalar > len(regularized) + len(self._regularized_variables()):
                advice = "Add one value per row, [rows], to leave them out (add_loss). "
                warn_of_repeated_rows(self, advice)
        changed = self._state(call.values) if train else model_state
        penalty = penalty_of(call.losses, self._kinds[train], mask, num_rows)
        increments = self._increments(call.values, mask, num_rows)
        return Applied(call.outputs, changed, penalty, increments)

    def held_variables(self) -> Mapping[str, keras.Variable]:
        """Returns all variables by path."""
        return {path: variable for part in self._parts for path, variable in part.items()}

    def held_metrics(self) -> dict[str, keras.Metric]:
        """Returns the metrics of layers by name."""
        return {metric.name: metric for metric in self._metrics()}

    def metric_results(self, sums: Sequence[Sequence[np.ndarray]]) -> dict[str, float]:
        """Returns the results of the layers' metrics by name."""
        results = {}
        for metric, values in zip(self._metrics(), sums, strict=True):
            mapping = zip(metric.variables, map(jnp.asarray, values), strict=True)
            with keras.StatelessScope(state_mapping=list(mapping)):
                results[metric.name] = float(metric.result())
        return results

    def export(self, variables: Variables) -> list[np.ndarray]:
        """Returns variables as a list in the order of `get_weights`."""
        values = self._by_variable(*variables)
        return [np.asarray(values[id(v)]) for v in self.module.weights]

    def write_back(self, variables: Variables) -> None:
        """Assigns variables to the user's model, which can then be saved."""
        values = self._by_variable(*variables)
        for variable in self.module.variables:
            variable.assign(values[id(variable)])
        self._seen = self._held_arrays()

    def trains_others(self) -> bool:
        """Returns whether a layer or variable was frozen or unfrozen since it was last read."""
        return self._flags != self._trainable_flags()

    def has_assigned(self) -> bool:
        """Returns whether an array was assigned to a variable since it was last read."""
        return any(v._value is not array for _, v, array in self._seen)

    def with_assigned(self, variables: Variables) -> Variables:
        """Returns variables with the arrays that were assigned to the model's own."""
        assigned = {path: v._value for path, v, array in self._seen if v._value is not array}
        self._seen = self._held_arrays()
        return Variables(
            *(type(x)((path, assigned.get(path, x[path])) for path in x) for x in variables)
        )

    def _trainable_flags(self) -> list[Any]:
        # A frozen layer may have no trained variable, and batch normalisation then uses its moving
        # statistics.
        trained = {id(v) for v in self.module.trainable_variables}
        flags = [id(v) in trained for v in self.module.variables]
        return [flags, [layer.trainable for layer in self._layers()]]

    def _held_arrays(self) -> list[tuple[str, keras.Variable, Any]]:
        # Without the states of seed generators, which are not used and change with every call in
        # training mode. The public `value` of a variable costs a microsecond.
        held = self.held_variables().items()
        return [(path, v, v._value) for path, v in held if v.name != _SEED]

    def _call(self, values: dict[int, Any], inputs: Any, *, train: bool) -> _Call:
        """Calls the model with the given variables and no side effects, as Keras's trainer does."""
        variables = self._all_variables()
        mapping = [(v, values[id(v)]) for v in variables]
        flags = {"training": train} if self._takes_training else {}
        # Layers identify their losses by `id`: a layer that has not been called yet can remove a
        # loss that has the id of its own last loss.
        self.module._clear_losses()
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = self.module.call(inputs, **flags)
            losses = list(self.module.losses)
        return _Call(outputs, {id(v): scope.get_current_value(v) for v in variables}, losses)

    def _find_kinds(self, inputs: Any, *, train: bool) -> tuple[Kind, ...]:
        """Returns the kinds of the losses that the model adds, from a few random rows."""
        values = {id(v): v.value for v in self._all_variables()}
        rows = jax.tree.map(_probe_rows, inputs)
        losses = jax.eval_shape(lambda rows: self._call(values, rows, train=train).losses, rows)
        if len(losses) == len(self._regularized_variables()):
            return ("mean",) * len(losses)
        batches = (rows, jax.tree.map(lambda x: jnp.concatenate([x, x]), rows))
        return kinds_of_losses(*(self._call(values, x, train=train).losses for x in batches))

    def _regularized_variables(self) -> list[keras.Variable]:
        return [v for v in self.module.trainable_variables if v.regularizer is not None]

    def _increments(
        self, values: dict[int, Any], mask: jax.Array | None, num_rows: int
    ) -> list[list[jax.Array]]:
        """Returns what this rank adds to layers' metrics: means by its share of real rows."""
        real = jnp.asarray(float(num_rows)) if mask is None else jnp.sum(mask)
        share = real / psum(real)

        def added(metric: keras.Metric) -> list[jax.Array]:
            factor = share if isinstance(metric, keras.metrics.Mean) else 1.0
            return [jnp.asarray(values[id(v)]) * factor for v in metric.variables]

        return list(map(added, self._metrics()))

    def _by_variable(self, params: Any, model_state: Any) -> dict[int, Any]:
        paths = list(zip(self._parts, (params, model_state), strict=True))
        missing = [path for known, arrays in paths for path in known if path not in arrays]
        if missing:
            raise ValueError(
                f"The Keras model {self.name!r} has the variables {', '.join(missing)}, which the "
                "variables given to it lack. A view needs a model made of the same layers."
            )
        return {id(v): arrays[path] for known, arrays in paths for path, v in known.items()}

    def _state(self, values: dict[int, Any]) -> dict[VariablePath, Any]:
        return {path: values[id(v)] for path, v in self._parts[1].items()}

    def _all_variables(self) -> list[keras.Variable]:
        return [*self.module.variables, *(v for m in self._metrics() for v in m.variables)]

    def _layers(self) -> list[keras.Layer]:
        # The public `layers` leaves out layers within layers.
        return list(self.module._flatten_layers())

    def _metrics(self) -> list[keras.Metric]:
        # The step ignores the metrics of a model's own `compile`, so it reads the property of the
        # base class.
        return keras.Layer.metrics.fget(self.module)  # type: ignore[attr-defined]


def _probe_rows(x: Any) -> jax.Array:
    shape = (_PROBE_ROWS, *x.shape[1:])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(shape, jax.dtypes.canonicalize_dtype(x.dtype))
    return jnp.asarray(np.random.default_rng(0).uniform(size=shape), x.dtype)


def _require_sums(metric: keras.Metric) -> None:
    if not isinstance(metric, (keras.metrics.Mean, keras.metrics.Sum)):
        raise ValueError(
            f"The metric {metric.name!r} ({type(metric).__name__}) inside the model cannot be "
            "summed over ranks. Layers may hold keras.metrics.Mean, Sum and their subclasses; pass "
            "others to compile(metrics=...)."
        )
