"""What the tests of tf.data pipelines share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_global_seed():
    """Forgets the seed that a test of another file may have given to TensorFlow: it seeds shuffles
    without one.
    """
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)
