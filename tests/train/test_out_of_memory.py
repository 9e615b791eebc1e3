"""A model that does not fit in memory ends with an error, on each process, and does not hang."""

import pytest
from processes import SCRIPTS, launch


@pytest.mark.multiprocess
@pytest.mark.parametrize(("phase", "num_processes"), [("fit", 0), ("fit", 2), ("predict", 0)])
def test_what_found_no_memory_raises_an_error(phase, num_processes):
    result = launch(num_processes, SCRIPTS / "run_out_of_memory.py", phase, timeout_s=60)
    assert result.returncode == 1, result.stderr
    assert "Out of memory allocating" in result.stderr
