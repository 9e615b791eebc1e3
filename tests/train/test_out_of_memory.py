"""A model that does not fit in memory ends with an error, on each process, and does not hang."""

import pytest
from less_memory import assert_gives_way
from processes import SCRIPTS, launch


@pytest.mark.multiprocess
@pytest.mark.parametrize(("phase", "num_processes"), [("fit", 0), ("fit", 2), ("predict", 0)])
def test_what_found_no_memory_raises_an_error(phase, num_processes):
    result = launch(num_processes, SCRIPTS / "run_out_of_memory.py", phase, timeout_s=60)
    assert result.returncode == 1, result.stderr
    assert "Out of memory allocating" in result.stderr


@pytest.mark.multiprocess
def test_the_error_of_a_step_names_the_arrays_that_take_most():
    # A program that was kept has the lines that it was compiled from.
    result = launch(
        0, SCRIPTS / "run_with_less_memory.py", "without passes", timeout_s=240,
        JAX_ENABLE_COMPILATION_CACHE="false",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    said = result.stderr[result.stderr.index("Memory of a step: ") :]
    assert "for parameters" in said
    assert "for activations and gradients" in said
    # Words of random numbers, and outputs of layers; the lines are those of the script.
    lines = (SCRIPTS / "run_with_less_memory.py").read_text().splitlines()
    layer, dropout = (
        [text in line for line in lines].index(True) + 1 for text in ("nn.tanh", "nn.Drop")
    )
    assert "Most take: u32[1,131072,128] and u32[1,131072,128] 128.0 MiB (" in said
    assert f"/while, run_with_less_memory.py:{dropout}); f32[131072,128] 64.0 MiB (" in said
    assert f"run_with_less_memory.py:{layer})" in said


@pytest.mark.multiprocess
@pytest.mark.long  # tests/train/loops/test_passes.py shows nearly the same.
@pytest.mark.parametrize(("num_processes", "all_rows"), [(0, 131072), (2, 65536)])
def test_a_step_that_finds_no_memory_gives_way_to_one_that_needs_less(num_processes, all_rows):
    """The compiler's analysis says that it fits; one process gets less after that."""
    result = launch(
        num_processes, SCRIPTS / "run_with_less_memory.py", timeout_s=400, TNT_LOG_LEVEL="INFO"
    )
    assert_gives_way(result, all_rows, rtol=1e-5, atol=1e-6)
