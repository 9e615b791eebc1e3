"""Training part of a model; all other parameters become model state.

These have no gradient, no reduction and no optimizer state.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from tnt_jax.adapters.base import Adapter, Applied, Variables
from tnt_jax.adapters.wrapping import WrappingAdapter

# The key of the parameters that are not trained, beside the model's own state.
_FROZEN = "frozen_params"


class PartlyTrained(WrappingAdapter):
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
        super().__init__(adapter)
        self._trainable = trainable
        self._frozen = tuple(frozen)

    def outer(self, variables: Variables) -> Variables:
        """Returns the trained parameters, and the others as part of the model state.

        Raises:
            ValueError: If a pattern matches no parameter, or nothing is left to train.
        """
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

    def inside(self, variables: Variables) -> Variables:
        """Returns all parameters, and the model state without them."""
        state = dict(variables.model_state)
        flat = _flatten(variables.params) | _flatten(state.pop(_FROZEN))
        return Variables(_nest(flat), state)

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
        applied = super().apply(params, model_state, inputs, key=key, train=train, mask=mask)
        return applied._replace(model_state={**applied.model_state, _FROZEN: model_state[_FROZEN]})

    def _is_trained(self, name: str) -> bool:
        is_chosen = self._trainable is None or any(
            _matches(name, pattern) for pattern in self._trainable
        )
        return is_chosen and not any(_matches(name, pattern) for pattern in self._frozen)


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
