"""One process leaves, wherever and however: the others end within ten seconds, with its code."""

import pytest
from faulty_jobs import run_faulty

from tnt_jax.settings import LOST_EXIT_CODE


@pytest.mark.multiprocess
def test_the_others_end_with_77_when_process_0_ends_without_a_word(tmp_path):
    ended = run_faulty(tmp_path, 2, "os._exit(3)", "callback", 0, by="hand")
    assert ended.codes == [3, LOST_EXIT_CODE], ended.output
    assert "Process 0 has ended without leaving the job" in ended.outputs[1]
    assert ended.seconds < 10
