"""Which of the two steps of a model in parts these tests run."""

import pytest

from tnt_jax.sharded import ShardedSteps


@pytest.fixture(autouse=True)
def what_moves(request, monkeypatch):
    """Lets steps gather parameters, however small a batch is; or rows, however large it is."""
    reason = "Rows move" if getattr(request, "param", "parameters") == "rows" else None
    monkeypatch.setattr(ShardedSteps, "why_rows_move", lambda *args: reason)
