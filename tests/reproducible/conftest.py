"""Programs for these tests as those of users, in which the compiler orders operations as it likes."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def optimized(all_optimizations):
    """Has bits compared with all optimizations."""
