"""Translation with a trained `Transformer`: the inference view of its variables.

Shape legend: B batch, S sources, L length of the result, K beams.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from tnt_jax.models.decoding import Sequences, beam_search, greedy_search
from tnt_jax.models.transformer import Transformer


class Translator(Transformer):
    """A `Transformer` that translates: same attributes, same variables, another `__call__`.

    Attributes:
        num_beams: Beams of the search; the defaults here are those of Vaswani et al. 2017, section
            6.1.
        alpha: Exponent of the length penalty.
        extra_length: Number of tokens by which a translation may exceed the padded sources.
    """

    num_beams: int = 4
    alpha: float = 0.6
    extra_length: int = 50

    def __call__(self, sources: jax.Array, *, train: bool = False) -> dict[str, jax.Array]:
        """Returns the best translation of each source.

        Sources are token ids [B, S], padded with 0 at the end. Translations are `outputs`: token
        ids [B, S + extra_length], int32, ended by 1 and padded with 0; and `scores` [B]: log P /
        length penalty. A search cannot be trained: `train=True` is a ValueError.
        """
        if train:
            raise ValueError(
                "Translator only decodes. Train a Transformer and give its variables to the "
                "Translator."
            )
        if self.is_initializing():
            super().__call__(sources, sources, train=False)
        found = translate(
            self.as_transformer(),
            {"params": self.variables["params"]},
            sources,
            num_beams=self.num_beams,
            alpha=self.alpha,
            extra_length=self.extra_length,
        )
        return {"outputs": found.tokens_BKL[:, 0], "scores": found.scores_BK[:, 0]}

    def as_transformer(self) -> Transformer:
        """Returns the training view, without variables."""
        names = {field.name for field in dataclasses.fields(Transformer)} - {"parent", "name"}
        return Transformer(**{name: getattr(self, name) for name in names}, parent=None)


def translate(
    transformer: Transformer,
    variables: Mapping[str, Any],
    sources: jax.Array,
    *,
    num_beams: int = 4,
    alpha: float = 0.6,
    extra_length: int = 50,
) -> Sequences:
    """Returns the `num_beams` best translations of each source, with a key-value cache.

    Call it inside `jax.jit`.

    Args:
        transformer: Model, without variables.
        variables: Its variables.
        sources: Token ids [B, S], padded with 0 at the end.
        num_beams: Beams K.
        alpha: Exponent of the length penalty.
        extra_length: Number of tokens by which a translation may exceed S.
    """
    length = sources.shape[1] + extra_length
    step, cache = _prepare(transformer, variables, sources, num_beams=num_beams, length=length)
    return beam_search(
        step, cache, rows_B=sources[:, 0], num_beams=num_beams, length=length, alpha=alpha
    )


def translate_greedily(
    transformer: Transformer,
    variables: Mapping[str, Any],
    sources: jax.Array,
    *,
    extra_length: int = 50,
) -> Sequences:
    """Returns one translation of each source, with the most probable token at each position.

    The arguments are those of `translate`.
    """
    length = sources.shape[1] + extra_length
    step, cache = _prepare(transformer, variables, sources, num_beams=1, length=length)
    return greedy_search(step, cache, rows_B=sources[:, 0], length=length)


def _prepare(
    transformer: Transformer,
    variables: Mapping[str, Any],
    sources: jax.Array,
    *,
    num_beams: int,
    length: int,
) -> tuple[Any, Any]:
    apply = partial(transformer.apply, variables)
    memory = apply(sources, method="remember")
    cache = transformer.empty_cache(sources.shape[0], num_beams=num_beams, num_places=length)
    # A zero made from the sources makes the cache vary over ranks as they do.
    zero = (sources[0, 0] * 0).astype(transformer.dtype)
    cache = jax.tree.map(lambda leaf: leaf + zero, cache)

    def step(tokens_BK: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return apply(tokens_BK, cache, memory, position=position, method="decode_step")

    return step, cache
