"""What `run_with_less_memory.py` must print."""

import json

import numpy as np


def assert_gives_way(result, all_rows, **tolerances):
    """Asserts that each call went on with less memory and gave what it gives with all of it."""
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found) == ["fit", "fit_in_blocks", "evaluate", "predict", "loop"]
    # Statistics of the global batch are not computed in passes: blocks are computed twice.
    (whole, _), (values, remat) = found.pop("fit_in_blocks")
    np.testing.assert_allclose(values, whole, **tolerances)
    assert remat == "full"
    warning = "for a step of one pass, although the compiler stated that it fits: remat='full'"
    assert warning in result.stderr
    for call, ((whole, at_once), (values, rows)) in found.items():
        rows_of_call = all_rows if call in ("fit", "loop") else 2 * all_rows
        assert at_once is None
        assert 1 < rows < rows_of_call, call
        np.testing.assert_allclose(values, whole, **tolerances)
        assert f"A device has no memory for {rows_of_call} rows at once" in result.stderr
