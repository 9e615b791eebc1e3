"""A model that does not fit in memory ends with an error, on each process, and does not hang."""

import json

import numpy as np
import pytest
from processes import SCRIPTS, launch


@pytest.mark.multiprocess
@pytest.mark.parametrize(("phase", "num_processes"), [("fit", 0), ("fit", 2), ("predict", 0)])
def test_what_found_no_memory_raises_an_error(phase, num_processes):
    result = launch(num_processes, SCRIPTS / "run_out_of_memory.py", phase, timeout_s=60)
    assert result.returncode == 1, result.stderr
    assert "Out of memory allocating" in result.stderr


@pytest.mark.multiprocess
def test_a_step_that_finds_no_memory_is_computed_in_passes_of_fewer_rows():
    """The compiler's analysis says that it fits; the process gets less after that."""
    result = launch(0, SCRIPTS / "run_with_less_memory.py", timeout_s=240)
    assert result.returncode == 0, result.stderr
    (whole, all_rows), (losses, rows) = json.loads(result.stdout)
    assert all_rows is None
    assert 1 < rows < 32768
    np.testing.assert_allclose(losses, whole, rtol=1e-5)
    assert "A device has no memory for 32768 rows at once" in result.stderr
