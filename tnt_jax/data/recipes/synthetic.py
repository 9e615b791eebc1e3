"""Synthetic examples, for tests and for measuring everything except the input.

tnt_jax.data.RandomAccess(SyntheticImages(1_281_167), batch_size=256)
"""

import numpy as np

_PATTERNS = 64


class SyntheticImages:
    """Random-access images and labels that need no decoding.

    The images are a few fixed random patterns, the label follows from the index.

    Args:
        num_examples: Number of examples.
        shape: Shape of an image, `(height, width, channels)`.
        num_classes: Labels are from 0 to `num_classes - 1`.
        dtype: `float32` images are from a normal distribution; integer ones are uniform over 0 to
            255.
        seed: Seed of the patterns.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        shape: tuple[int, ...] = (224, 224, 3),
        num_classes: int = 1000,
        dtype: str = "float32",
        seed: int = 42,
    ) -> None:
        if num_examples < 1 or num_classes < 1:
            raise ValueError(
                f"num_examples ({num_examples}) and num_classes ({num_classes}) must be at least 1."
            )
        self._num_examples = num_examples
        self._num_classes = num_classes
        generator = np.random.default_rng(seed)
        size = (min(_PATTERNS, num_examples), *shape)
        if np.issubdtype(np.dtype(dtype), np.floating):
            self._patterns = generator.standard_normal(size, np.float32).astype(dtype)
        else:
            self._patterns = generator.integers(0, 256, size).astype(dtype)

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        """Returns image `[*shape]` and label of an example."""
        _check_index(index, self._num_examples)
        return self._patterns[index % len(self._patterns)], np.int32(index % self._num_classes)


class SyntheticTokens:
    """Random-access pairs of token sequences of one length, for sequence-to-sequence models.

    Each index has its own random tokens.

    Args:
        num_examples: Number of pairs.
        length: Tokens of the source and of the target.
        vocabulary_size: Tokens are from 2 to `vocabulary_size - 1`; 0 is padding and 1 ends a
            sentence, which closes each sequence.
        seed: Seed of the tokens.
    """

    def __init__(
        self, num_examples: int, *, length: int = 256, vocabulary_size: int = 33_708, seed: int = 42
    ) -> None:
        if num_examples < 1 or length < 1 or vocabulary_size < 3:
            raise ValueError(
                f"num_examples ({num_examples}) and length ({length}) must be at least 1, "
                f"vocabulary_size ({vocabulary_size}) at least 3."
            )
        self._num_examples = num_examples
        self._length = length
        self._size = vocabulary_size
        self._seed = seed

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns source and target, int32 `[length]` each."""
        _check_index(index, self._num_examples)
        tokens = np.random.default_rng((self._seed, index)).integers(
            2, self._size, (2, self._length), dtype=np.int32
        )
        tokens[:, -1] = 1
        return tokens[0], tokens[1]


def _check_index(index: int, num_examples: int) -> None:
    if not 0 <= index < num_examples:
        raise IndexError(f"The index must be from 0 to {num_examples - 1}, but is {index}.")
