"""Training part of a model; all other parameters become model state.

These have no gradient, no reduction and no optimizer state.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from tnt_jax.adapters.base import Adapter, Applied, Variables

# The key of the parameters that are not trained, beside the model's own state.
_FROZEN = "frozen_params"


class PartlyTrained:
    """An adapter that trains only some of the parameters.

    A parameter's path is written `encoder/Dense_0/kernel`. A pattern names a parameter, or a
    subtree by the beginning of its path, and may contain `*`, which also matches slashes.

    Args:
        adapter: Adapter of the model.
        trainable: Patterns of the trained parameters; all if None.
        frozen: Patterns of the parameters that are not trained.
    """

    def __init__(
        self, adapter: Adapter, *, trainable: Sequence[str] | None, frozen: Sequence[str]
    ) -> None:
        self.inner = adapter
        self.name = adapter.name
        self.holds_variables = adapter.holds_variables
        self._trainable = trainable
        self._frozen = tuple(frozen)

    def sample_inputs(self) -> Any:
        """Returns what the wrapped adapter returns."""
        return self.inner.sample_inputs()

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns the trained parameters, and the others as part of the model state.

        Raises:
            ValueError: If a pattern matches no parameter, or nothing is left to train.
        """
        return self._separated(self.inner.init(inputs, seed=seed))

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        """Returns what makes the variables that `init` returns, or None."""
        make = self.inner.initializer(inputs, seed=seed)
        return None if make is None else lambda: self._separated(make())

    def _separated(self, variables: Variables) -> Variables:
        """Returns the trained parameters, and the others as part of the model state."""
        paths = _flatten(variables.params)
        names = {path: "/".join(path) for path in paths}
        for pattern in (*(self._trainable or ()), *self._frozen):
            if not any(_matches(name, pattern) for name in names.values()):
                known = ", ".join(sorted(names.values()))
                raise ValueError(
                    f"trainable or frozen names {pattern!r}, but there is no such parameter. The "
                    f"parameters are {known}."
                )
        frozen = {path: leaf for path, leaf in paths.items() if not self._is_trained(names[path])}
        trained = {path: leaf for path, leaf in paths.items() if path not in frozen}
        if not trained:
            raise ValueError(
                f"trainable={self._trainable} and frozen={list(self._frozen)} leave no parameter "
                "to train."
            )
        # The kind of dict decides the order of parameters.
        return Variables(
            type(variables.params)(_nest(trained)),
            {**variables.model_state, _FROZEN: _nest(frozen)},
        )

    def attach(self, inputs: Any) -> None:
        """Prepares to compute with variables of another model."""
        self.inner.attach(inputs)

    def apply(
        self,
        params: Any,
        model_state: Any,
        inputs: Any,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None,
    ) -> Applied:
        """Returns the model's forward pass with all parameters; see `Adapter.apply`."""
        joined = self._joined(Variables(params, model_state))
        applied = self.inner.apply(
            joined.params, joined.model_state, inputs, key=key, train=train, mask=mask
        )
        return applied._replace(model_state={**applied.model_state, _FROZEN: model_state[_FROZEN]})

    def axis_names(self) -> Mapping[str, tuple[str | None, ...]]:
        """Returns what the wrapped adapter returns."""
        return self.inner.axis_names()

    def held_variables(self) -> Mapping[str, Any]:
        """Returns what the wrapped adapter returns."""
        return self.inner.held_variables()

    def held_metrics(self) -> dict[str, Any]:
        """Returns the model's own metrics; see `Adapter.held_metrics`."""
        return self.inner.held_metrics()

    def metric_results(self, sums: Any) -> dict[str, float]:
        """Returns the model's own metrics; see `Adapter.metric_results`."""
        return self.inner.metric_results(sums)

    def export(self, variables: Variables) -> Any:
        """Returns all variables in the form that the model's library uses."""
        return self.inner.export(self._joined(variables))

    def has_changed(self) -> bool:
        """Returns whether the user has changed the variables of the wrapped object."""
        return self.inner.has_changed()

    def write_back(self, variables: Variables) -> None:
        """Stores all variables in the user's own object."""
        self.inner.write_back(self._joined(variables))

    def _is_trained(self, name: str) -> bool:
        is_chosen = self._trainable is None or any(
            _matches(name, pattern) for pattern in self._trainable
        )
        return is_chosen and not any(_matches(name, pattern) for pattern in self._frozen)

    def _joined(self, variables: Variables) -> Variables:
        state = dict(variables.model_state)
        flat = _flatten(variables.params) | _flatten(state.pop(_FROZEN))
        return Variables(_nest(flat), state)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.rstrip("/") + "/*")


def _flatten(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Returns the leaves of nested dicts by path."""
    leaves: dict[tuple[str, ...], Any] = {}
    for name, value in tree.items():
        leaves |= (
            _flatten(value, (*path, name)) if isinstance(value, Mapping) else {(*path, name): value}
        )
    return leaves


def _nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Returns nested dicts of leaves by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
