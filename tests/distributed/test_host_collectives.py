"""Broadcast, all_gather and all_reduce of host values, between real processes."""

import numpy as np
import pytest
from long_params import long_but_last
from processes import SCRIPTS, launch
from traces import read_trace

from tnt_jax.distributed.host.collectives import reduce_rows


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", long_but_last(1, 3, 2))
def test_values_are_those_of_numpy_and_what_differs_is_refused_on_all(num_processes):
    result = launch(
        num_processes,
        SCRIPTS / "collectives_table.py",
        flags=["--output-on-all-devices"],
        timeout_s=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("exact on") == num_processes


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "num_processes",
    [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
)
def test_groups_rows_objects_and_joins_are_exact_and_hostile_calls_refused(num_processes, tmp_path):
    result = launch(
        num_processes,
        SCRIPTS / "process_sets.py",
        flags=["--output-on-all-devices", "--timeline", str(tmp_path / "timeline.json")],
        timeout_s=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("exact on") == num_processes
    for process in range(num_processes):
        number = f".{process}" if process else ""
        events = read_trace(tmp_path / f"timeline{number}.json")
        assert {event["pid"] for event in events} == {process}
        assert {"all_reduce", "all_gather_rows", "join"} <= {event["name"] for event in events}
        assert {"call", "wait", "compile"} <= {event["cat"] for event in events}


@pytest.mark.multiprocess
def test_an_error_that_nobody_catches_ends_every_process_with_a_code(tmp_path):
    script = tmp_path / "differ.py"
    script.write_text(
        # The launcher asks the others to end once it has seen the first: they shall do so alone.
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import numpy as np, tnt_jax as tnt\n"
        "tnt.all_gather({'a': np.zeros(2 + tnt.get_process_index())})\n"
    )
    result = launch(2, script, flags=["--output-on-all-devices"], timeout_s=60)
    assert result.returncode == 1
    output = result.stdout + result.stderr
    assert output.count("['a'] is float64[2] on process 0, ['a'] is float64[3] on process 1") == 2
    for process in range(2):
        assert f"Rank {process} on localhost failed with exit code 1." in output
    assert "Fatal Python error" not in output


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_integers_are_exact_or_refused(dtype, op):
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    for _ in range(300):
        scale = int(rng.integers(1, 64))
        low, high = max(limits.min, -(2**scale)), min(limits.max, 2**scale)
        rows = rng.integers(low, high, (3, 2), dtype=dtype, endpoint=True)
        exact = [
            sum(map(int, column)) if op == "sum" else int(np.prod(column.astype(object)))
            for column in rows.T
        ]
        if all(limits.min <= value <= limits.max for value in exact):
            assert reduce_rows(rows, op).tolist() == exact
        else:
            with pytest.raises(
                OverflowError, match=f"The {op} over the processes of an array of {np.dtype(dtype)}"
            ):
                reduce_rows(rows, op)
