"""The choices of `compile`, and its losses and metrics for outputs and targets of known shapes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from numbers import Real
from types import FunctionType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tnt_jax.adapters.base import Adapter
from tnt_jax.keras_compat import losses, metrics
from tnt_jax.keras_compat.compiling.keras_training import check_training_methods, choose_optimizer
from tnt_jax.keras_compat.compiling.objective import CompiledObjective, unused_name
from tnt_jax.keras_compat.compiling.row_checks import PerRow, outputs_per_row
from tnt_jax.keras_compat.keras_objects import mask_of_outputs
from tnt_jax.keras_compat.losses import Loss
from tnt_jax.keras_compat.losses.base import standardized
from tnt_jax.keras_compat.losses.lookup import OptaxLoss
from tnt_jax.keras_compat.metrics import Metric
from tnt_jax.keras_compat.metrics.means import MeanMetricWrapper, and_valid
from tnt_jax.keras_compat.optimizers import Optimizer
from tnt_jax.log import logger
from tnt_jax.train.contracts import Apply, Batch, LossTerm, StepParts
from tnt_jax.train.finite import OnNaN


@dataclass(frozen=True)
class OutputSpec:
    """One output of the model with what is asked of it."""

    index: int
    name: str  # Empty for the only output.
    loss: Loss | None
    weight: float  # Of the loss.
    metrics: tuple[Metric, ...]  # They ignore sample weights.
    weighted_metrics: tuple[Metric, ...]
    shape: tuple[int, ...]

    @property
    def prefix(self) -> str:
        """Start of the names of this output's logs."""
        return f"{self.name}_" if self.name else ""

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """The metrics in the order of their logs."""
        return self.metrics + self.weighted_metrics

    @property
    def looks_at_outputs(self) -> bool:
        """Whether the loss or a metric works on certain outputs alone."""
        measured = self.all_metrics
        parts = [self.loss, *measured, *(getattr(metric, "loss", None) for metric in measured)]
        return any(
            getattr(part, "expects_probabilities", False) or getattr(part, "threshold", None) == 0.5
            for part in parts
        )


class Layout:
    """The outputs of a model in order: keys of a dict, names of Keras, or `output_0` and so on."""

    def __init__(self, outputs: Any, declared: Sequence[str] | None = None) -> None:
        leaves = list(_by_path(outputs).items())
        self._paths = paths = [path for path, _ in leaves]
        # JAX sorts the keys of a dict; a Keras model may declare another order.
        is_dict = isinstance(outputs, Mapping) and set(paths) == set(outputs)
        given = list(declared or ()) if len(declared or ()) == len(leaves) else []
        if is_dict or hasattr(outputs, "_fields"):
            keys = given if set(given) == set(paths) else paths
        elif given:
            keys = given
        else:
            keys = [f"output_{path}" if path.isdigit() else path or "output" for path in paths]
        self.keys = tuple(keys)
        places = list(range(len(leaves)))
        self._order = [paths.index(key) for key in keys] if is_dict else places
        self._is_there = [leaves[index][1] is not None for index in self._order]
        self._is_single = sum(self._is_there) == 1
        self.names = tuple("" if self._is_single else key for key in keys)

    def outputs(self, tree: Any) -> list[Any]:
        """Returns the part of each output; the tree has the structure of the outputs."""
        leaves = jax.tree.leaves(tree, is_leaf=_is_none)
        return [leaves[index] for index in self._order]

    def data(self, tree: Any, needed: Sequence[bool], what: str) -> list[Any]:
        """Returns each output's targets or weights, given by name or in order, or None."""
        if isinstance(tree, Mapping) and set(tree) <= set(self.keys):
            return [tree.get(key) for key in self.keys]
        by_path = _by_path(tree)
        leaves = list(by_path.values())
        if isinstance(tree, Mapping) and not self._is_single:
            # Unknown names do not say which output is meant.
            is_known = set(by_path) <= set(self._paths)
            leaves = [by_path.get(path) for path in self._paths] if is_known else []
        if len(leaves) == len(self.keys):
            return [leaves[index] for index in self._order]
        wanted = [index for index, is_needed in enumerate(needed) if is_needed]
        if len(leaves) == len(wanted):
            by_place = dict(zip(wanted, leaves, strict=True))
            return [by_place.get(index) for index in range(len(self.keys))]
        given = f"a dict of {sorted(tree)}" if isinstance(tree, Mapping) else f"{len(leaves)}"
        raise ValueError(
            f"The model has {len(self.keys)} output(s) ({', '.join(self.keys)}), of which "
            f"{len(wanted)} have a loss or metric, but the data has {given} {what}(s). Pass one "
            f"for each output in order, one for each of these, or a dict by name."
        )

    def arguments(self, value: Any, what: str, *, many: bool = False) -> list[Any]:
        """Returns each output's part of an argument of `compile`; one value serves all."""
        if self._is_single and many:
            given = jax.tree.leaves(value)
            return [given if is_there else None for is_there in self._is_there]
        if isinstance(value, Mapping):
            if unknown := set(value) - set(self.keys):
                raise ValueError(
                    f"{what} names the output(s) {sorted(unknown)}; the model has "
                    f"{list(self.keys)}."
                )
            return [value.get(key) for key in self.keys]
        is_list = isinstance(value, (tuple, list))
        if is_list and len(value) == len(self.keys):
            return list(value)
        if is_list and not self._is_single:
            nested = jax.tree.leaves(value, is_leaf=_is_none)
            if len(nested) == len(self.keys):
                return [nested[index] for index in self._order]
            if not many or any(isinstance(item, (tuple, list)) for item in value):
                raise ValueError(
                    f"{what} has {len(value)} entries for {len(self.keys)} output(s); give one for "
                    "each, or a dict by name."
                )
        return [value if is_there else None for is_there in self._is_there]


def make_output_specs(
    layout: Layout, index: int, arguments: Sequence[Any], true: Any, pred: Any
) -> list[OutputSpec]:
    """Returns what is asked of an output, an entry for each of several losses, which add up."""
    loss, weight, *given = arguments
    if jax.tree.leaves((loss, given)) and true is None:
        raise ValueError(
            f"The output {layout.keys[index]!r} has a loss or a metric, but the data has no target "
            "for it. Pass one, or None as its loss."
        )
    resolved = [losses.get(item) for item in jax.tree.leaves(loss)] or [None]
    weights = list(weight) if isinstance(weight, (tuple, list)) else [weight] * len(resolved)
    plain, weighted = (
        tuple(
            metrics.get(item, np.shape(true), np.shape(pred), loss=resolved[0])
            for item in jax.tree.leaves(items)
        )
        for items in given
    )
    return [
        OutputSpec(
            index,
            layout.names[index],
            part,
            1.0 if factor is None else float(factor),
            *((plain, weighted) if number == 0 else ((), ())),
            np.shape(pred),
        )
        for number, (part, factor) in enumerate(zip(resolved, weights, strict=True))
    ]


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_none)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_none(value: Any) -> bool:
    return value is None


def by_log_name(specs: Sequence[OutputSpec]) -> dict[str, Metric]:
    """Returns the metrics by the names of their logs, each once, as Keras makes them."""
    used: set[str] = {"loss", *(f"{spec.prefix}loss" for spec in specs if spec.loss is not None)}
    plain = [
        [unused_name(f"{spec.prefix}{metric.name}", used) for metric in spec.metrics]
        for spec in specs
    ]
    found: dict[str, Metric] = {}
    for spec, names in zip(specs, plain, strict=True):
        found |= zip(names, spec.metrics, strict=True)
        for metric in spec.weighted_metrics:
            name = f"{spec.prefix}{metric.name}"
            name = unused_name(
                f"{spec.prefix}weighted_{metric.name}" if name in used else name, used
            )
            found[name] = metric
    return found


_AROUND_FUNCTIONS = (losses.LossFunctionWrapper, OptaxLoss, MeanMetricWrapper)


def is_users(part: Loss | Metric) -> bool:
    """Returns whether a loss or metric is not this package's code, and may compare rows."""
    is_of_package = type(part).__module__.startswith((losses.__name__, metrics.__name__))
    return not is_of_package or type(part) in _AROUND_FUNCTIONS


# The errors that JAX raises if a function needs the values of a traced array.
_NEEDS_NUMBERS = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
)
_BY_INDEX = ("SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy")


def check_traceable(part: Loss | Metric, y_true: Any, y_pred: Any) -> None:
    """Checks that a custom loss or metric is written in JAX."""
    kind, function = ("Loss", part.terms) if isinstance(part, Loss) else ("Metric", part.increments)
    try:
        jax.eval_shape(function, y_true, y_pred)
    except _NEEDS_NUMBERS as error:
        raise ValueError(
            f"{kind} {part.name!r} needs the values of its arrays ({type(error).__name__}), which "
            "are unknown while a step is traced. Write it with jax.numpy instead of NumPy, "
            "scikit-learn or Python's if and float, or compute it in a callback from model.predict."
        ) from None


def check_activation(loss: Loss, activation: str | None) -> None:
    """Checks that a loss of logits does not get probabilities."""
    takes_logits = getattr(loss, "fn_kwargs", {}).get("from_logits") or getattr(
        loss, "takes_logits", None
    )
    if not takes_logits or activation is None:
        return
    own = hasattr(loss, "takes_logits")
    other = "" if own else f", or use tnt_jax.losses.{type(loss).__name__}(from_logits=False)"
    raise ValueError(
        f"Loss {loss.name!r} expects logits, but the model ends with a {activation}, so its "
        f"outputs are probabilities. Leave the {activation} out of the model{other}."
    )


def check_targets_of_metric(metric: Metric, y_true: Any, y_pred_shape: tuple[int, ...]) -> None:
    """Checks that the targets are the class indices or distributions that a metric needs."""
    loss = getattr(metric, "loss", None)
    by_index = type(metric).__name__ in _BY_INDEX or getattr(loss, "targets", "") == "class_index"
    shape = np.shape(y_true)
    features = y_pred_shape[1:]
    if by_index and features and features[-1] > 1 and shape[1:] == features:
        raise ValueError(
            f"Metric {metric.name!r} needs integer labels of shape {shape[:-1]} for outputs of "
            f"{features[-1]} classes, but the targets have the shape {shape}. One-hot targets need "
            "'categorical_accuracy', 'categorical_crossentropy', or 'accuracy', which takes either."
        )


@dataclass(frozen=True)
class CompileArguments:
    """The arguments of `compile` that decide what a step computes."""

    loss: Any
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    objective: Any = None

    def check_names(self) -> None:
        """Raises a ValueError for unknown losses, outputs before targets, or bad factors."""
        for loss in jax.tree.leaves(self.loss):
            losses.get(loss)
        for metric in jax.tree.leaves((self.metrics, self.weighted_metrics)):
            if isinstance(metric, (FunctionType, partial)):
                losses.get(metric)
        weights = jax.tree.leaves(self.loss_weights)
        if not all(
            isinstance(weight, Real) or (hasattr(weight, "dtype") and np.ndim(weight) == 0)
            for weight in weights
        ):
            raise ValueError(
                "loss_weights, the third argument of compile, must be a number for each output, "
                f"but is {self.loss_weights!r}. Pass metrics by name: metrics=[...]."
            )


class Compiled:
    """Losses and metrics of every output, for outputs and targets of known shapes."""

    def __init__(
        self,
        arguments: CompileArguments,
        outputs: Any,
        targets: Any,
        declared: Sequence[str] | None,
    ) -> None:
        self._layout = layout = Layout(outputs, declared)
        asked = [
            layout.arguments(arguments.loss, "loss"),
            layout.arguments(arguments.loss_weights, "loss_weights"),
            layout.arguments(arguments.metrics, "metrics", many=True),
            layout.arguments(arguments.weighted_metrics, "weighted_metrics", many=True),
        ]
        parts = list(zip(*asked, strict=True))
        self._needs_target = [
            bool(jax.tree.leaves((loss, plain, weighted))) for loss, _, plain, weighted in parts
        ]
        true, pred = self._targets(targets), layout.outputs(outputs)
        self.specs = tuple(
            spec
            for index, part in enumerate(parts)
            for spec in make_output_specs(layout, index, part, true[index], pred[index])
        )
        self._trained = [spec for spec in self.specs if spec.loss is not None]
        self._metrics = by_log_name(self.specs)  # In the order of their sums.

    def check_traced(self, outputs: Any, activations: Any, targets: Any) -> None:
        """Checks losses and metrics against the trace of a forward pass."""
        all_true, all_pred = self._targets(targets), self._layout.outputs(outputs)
        made_by = self._layout.outputs(activations)
        for spec in self.specs:
            true, pred = all_true[spec.index], all_pred[spec.index]
            if true is None:
                continue
            # Targets are this process's rows, outputs those of all.
            rows = jax.tree.leaves(true)[0].shape[0]
            pred = jax.tree.map(
                lambda x, rows=rows: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), pred
            )
            for metric in spec.all_metrics:
                check_targets_of_metric(metric, true, spec.shape)
                if is_users(metric):
                    check_traceable(metric, true, pred)
            if spec.loss is not None:
                check_activation(spec.loss, made_by[spec.index] or None)
                if is_users(spec.loss):
                    check_traceable(spec.loss, true, pred)

    def step_parts(self, apply: Apply, rows_at_once: int | None = None) -> StepParts:
        """Returns the functions of a step around the forward pass `apply`."""
        return StepParts(apply, self._loss_terms, self._increments, rows_at_once)

    def kept(self, sums: Any) -> Any:
        """Returns the sums with which the next epoch begins; None if no metric keeps its own."""
        keeps = [[metric.keeps_sums for metric in spec.all_metrics] for spec in self.specs]
        if not any(map(any, keeps)):
            return None
        start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), sums)
        ended = jax.tree.map(np.asarray, sums["metrics"]["outputs"])
        for begun, *values in zip(start["metrics"]["outputs"], ended, keeps, strict=True):
            begun[:] = [
                kept if keeps_sums else zeros
                for zeros, kept, keeps_sums in zip(begun, *values, strict=True)
            ]
        return start

    @property
    def has_own_losses(self) -> bool:
        """Whether a loss is the user's, and may compare rows."""
        return any(spec.loss is not None and is_users(spec.loss) for spec in self.specs)

    def per_row(self, adapter: Adapter) -> PerRow:
        """Returns what computes outputs and the user's own losses, for `dependence_of_rows`."""
        outputs_of = outputs_per_row(adapter)

        def per_row(params: Any, model_state: Any, batch: Batch, *others: Any) -> dict[str, Any]:
            values = outputs_of(params, model_state, batch, *others)
            outputs = next(iter(values.values()))
            for spec, true, pred, _ in self._by_output(outputs, batch):
                if spec.loss is not None and is_users(spec.loss):
                    name = f"Loss {spec.loss.name!r}" + (f" of {spec.name!r}" if spec.name else "")
                    values[name] = spec.loss.call(*standardized(true, pred))
            return values

        return per_row

    def results(self, sums: Any) -> dict[str, Any]:
        """Returns the logs of an epoch's sums: loss, those of several outputs, and metrics."""
        sums = jax.tree.map(np.asarray, sums)
        logs: dict[str, Any] = {"loss": _ratio(sums["loss"])}
        if len(self._trained) > 1:
            logs |= {
                f"{spec.prefix}loss": _ratio(pair)
                for spec, pair in zip(self._trained, sums["losses"], strict=True)
                if spec.prefix
            }
        for (name, metric), own in self._with_sums(sums):
            value = np.asarray(metric.compute(own))
            # A metric of several thresholds or classes has a vector of results, as in Keras.
            logs[name] = float(value) if value.ndim == 0 else value
        return logs

    def metrics_by_log(self, sums: Any) -> dict[str, Metric]:
        """Returns each metric by the name of its log, with its sums of an epoch's, if given."""
        if sums is not None:
            for (_, metric), own in self._with_sums(sums):
                metric.show_sums(own)
        return dict(self._metrics)

    def metrics_names(self) -> list[str]:
        """Returns the names of the logs, in the order in which `evaluate` lists them."""
        names = ["loss"]
        if len(self._trained) > 1:
            names += dict.fromkeys(f"{spec.prefix}loss" for spec in self._trained if spec.prefix)
        return names + list(self._metrics)

    def check_first_batch(self, targets: Any, outputs: Any = None, *, rows: int) -> None:
        """Checks concrete targets of a batch, and outputs if given, against what losses expect."""
        if rows == 0:
            return
        all_true = self._targets(targets)
        for spec in self.specs:
            if all_true[spec.index] is None:
                continue
            true = np.asarray(all_true[spec.index])[:rows]
            if spec.loss is not None:
                losses.check_labels(spec.loss, true, (rows, *spec.shape[1:]))
            if spec.looks_at_outputs and outputs is not None:
                pred = np.asarray(self._layout.outputs(outputs)[spec.index])[:rows]
                if spec.loss is not None:
                    losses.check_outputs(spec.loss, pred)
                for metric in spec.all_metrics:
                    metrics.check_outputs(metric, pred)

    def check_classes(self, class_weight: Mapping[int, float]) -> None:
        """Raises a ValueError if a class has a weight that the single output does not have."""
        shape = self.specs[0].shape
        num_classes = shape[-1] if len(self.specs) == 1 and len(shape) == 2 else 1
        highest = max(class_weight)
        if 1 < num_classes <= highest:
            raise ValueError(
                f"class_weight names class {highest}, but the model's output has {num_classes} "
                f"classes, 0 to {num_classes - 1}."
            )

    def _loss_terms(self, outputs: Any, batch: Batch) -> list[LossTerm]:
        terms = []
        for spec, true, pred, weight in self._by_output(outputs, batch):
            if spec.loss is not None:
                valid = mask_of_outputs(pred)
                # A subclass of the user's need not know what Keras's layers attach.
                extra = {} if valid is None else {"valid": valid}
                total, count = spec.loss.terms(true, pred, weight, batch.mask, **extra)
                terms.append(LossTerm(total, count, spec.weight))
        return terms

    def _increments(self, outputs: Any, batch: Batch) -> list[list[Any]]:
        mask, increments = batch.mask, []
        for spec, true, pred, weight in self._by_output(outputs, batch):
            valid = mask_of_outputs(pred)
            weighted = mask if weight is None else weight
            if weight is not None and mask is not None:
                weighted = weight * mask.reshape(-1, *(1,) * (jnp.ndim(weight) - 1))
            pairs = [(metric, mask) for metric in spec.metrics]
            for metric in spec.weighted_metrics:
                given = weighted
                if weight is not None and isinstance(metric, MeanMetricWrapper):
                    given = metric.without_ignored(true, pred, weighted)
                pairs.append((metric, given))
            of_output = []
            for metric, given in pairs:
                # As in Keras, only means of values respect what outputs mask.
                if isinstance(metric, MeanMetricWrapper):
                    given = and_valid(given, valid)
                of_output.append(metric.increments(true, pred, given))
            increments.append(of_output)
        return increments

    def _by_output(self, outputs: Any, batch: Batch) -> list[tuple[OutputSpec, Any, Any, Any]]:
        weights = [batch.weight] * len(self._layout.keys)
        if isinstance(batch.weight, (Mapping, tuple, list)):
            weights = self._layout.data(batch.weight, self._needs_target, "sample weight")
        true, pred = self._targets(batch.targets), self._layout.outputs(outputs)
        return [
            (spec, true[spec.index], pred[spec.index], weights[spec.index]) for spec in self.specs
        ]

    def _targets(self, targets: Any) -> list[Any]:
        if targets is None:
            return [None] * len(self._layout.keys)
        return self._layout.data(targets, self._needs_target, "target")

    def _with_sums(self, sums: Any) -> Iterator[tuple[tuple[str, Metric], Any]]:
        own = chain.from_iterable(sums["metrics"]["outputs"])
        return zip(self._metrics.items(), own, strict=True)


def _ratio(pair: tuple[np.ndarray, np.ndarray]) -> float:
    total, count = pair
    return float(total) / float(count) if count else 0.0


@dataclass
class Compilation:
    """The choices of one call of `compile`; the next call creates a new one."""

    given: dict[str, Any]
    arguments: CompileArguments
    optimizer: Optimizer
    steps_per_execution: int | None  # None until "auto" has timed them.
    on_nan: OnNaN | None  # Reaction to a step that is not finite; None to take it.
    accumulation_steps: int  # Steps whose mean gradient makes one update.
    transformation: optax.GradientTransformation | None = None
    functions: Compiled | CompiledObjective | None = None  # None before the first batch.
    # The kind of data that `functions` were made for, until data of that kind was checked.
    announced_kind: Any = None
    # Training (True) or evaluation: whose program was traced for how rows depend on one another,
    # and of which that is known.
    traced_rows: set[bool] = field(default_factory=set)
    checked_rows: set[bool] = field(default_factory=set)
    dependence: str | None = None
    # Kinds of data that were checked against the losses, and shapes that training has seen.
    known_kinds: set[Any] = field(default_factory=set)
    compiled_kinds: set[Any] = field(default_factory=set)

    def forget_data(self) -> None:
        """Lets the next call check its data and compile its steps anew."""
        self.functions = self.announced_kind = self.dependence = None
        self.traced_rows, self.checked_rows = set(), set()
        self.known_kinds, self.compiled_kinds = set(), set()


def new_compilation(
    module: Any, *, run_eagerly: bool, jit_compile: Any, **given: Any
) -> Compilation:
    """Returns the compilation of a module with the arguments of `compile`."""
    arguments = CompileArguments(
        **{field.name: given[field.name] for field in fields(CompileArguments)}
    )
    if arguments.objective is None:
        check_training_methods(module)
    elif any(value is not None for name, value in vars(arguments).items() if name != "objective"):
        raise ValueError(
            "An objective takes the place of a loss and returns its own metrics: leave loss, "
            "loss_weights, metrics and weighted_metrics out."
        )
    steps, on_nan = given["steps_per_execution"], given["on_nan"]
    _check_options(run_eagerly, steps, jit_compile, on_nan)
    optimizer = choose_optimizer(
        given["optimizer"], module, auto_scale_loss=given["auto_scale_loss"]
    )
    arguments.check_names()
    return Compilation(
        given,
        arguments,
        optimizer,
        None if steps == "auto" else steps,
        on_nan,
        optimizer.gradient_accumulation_steps or 1,
    )


def _check_options(
    run_eagerly: Any, steps_per_execution: Any, jit_compile: Any, on_nan: Any
) -> None:
    if run_eagerly:
        raise ValueError(
            "run_eagerly=True is not possible: a step is one compiled program. Wrap fit in "
            "jax.disable_jit() to debug."
        )
    is_number = isinstance(steps_per_execution, int) and steps_per_execution >= 1
    if not is_number and steps_per_execution != "auto":
        raise ValueError(
            f"steps_per_execution must be at least 1 or 'auto', but is {steps_per_execution!r}."
        )
    if on_nan not in (None, *get_args(OnNaN)):
        raise ValueError(f"on_nan must be None, 'raise', 'skip' or 'rollback', but is {on_nan!r}.")
    if jit_compile not in (True, False, "auto"):
        raise ValueError(f"jit_compile must be True, False or 'auto', but is {jit_compile!r}.")
    if jit_compile is False:
        logger.warning("jit_compile=False has no effect: steps are always compiled.")
