"""The rows of a pass are the most that fit, with few programs compiled."""

import jax
import numpy as np
import pytest

from tnt_jax import _jax
from tnt_jax.train import memory_choice
from tnt_jax.train.steps.micro_batches import rows_of_pass


class Device:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_the_limit_is_the_setting_or_what_the_devices_state_or_a_share_of_the_host(use_ranks):
    use_ranks(1)
    gpus = [Device({"bytes_limit": 60}), Device({"bytes_limit": 50})]
    assert memory_choice.memory_limit(gpus, 7, ()) == 7
    assert memory_choice.memory_limit(gpus, None, ()) == 50
    one = memory_choice.memory_limit([Device(None)], None, ())
    assert 2**28 < one == memory_choice.memory_limit(jax.devices()[:1], None, ())
    assert memory_choice.memory_limit([Device(None)] * 2, None, ()) == one // 2


def test_what_other_arrays_than_the_state_take_is_not_there_for_a_step(use_ranks):
    use_ranks(1)
    state = jax.device_put(np.zeros(5, np.float32), jax.devices()[0])
    gpus = [Device({"bytes_limit": 60, "bytes_in_use": x}) for x in (10, 45)]
    assert memory_choice.memory_limit(gpus, None, state) == 60 - (45 - 20)
    assert memory_choice.memory_limit(gpus[:1], None, state) == 60


HLO = """HloModule step, is_scheduled=true
ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8] parameter(0), metadata={op_name="batch"}
}
"""


class Compiled:
    def as_text(self):
        return HLO


class Ways:
    """One way, whose passes need so many bytes, and the programs that were compiled for it."""

    def __init__(self, bytes_of, estimate, **options):
        self.bytes_of, self.estimate, self.compiled = bytes_of, estimate, []
        self.ways = [memory_choice.Way("", 50, 50, self.program, 0, 100, **options)]

    def program(self, rows):
        ways = self

        class Program:
            def estimate_bytes(self):
                return ways.estimate - 50

            def operations(self):
                return 100

            def compile(self, *, held_bytes):
                assert held_bytes == 50
                ways.compiled.append(rows)
                return _jax.ProgramMemory(50, ways.bytes_of(rows) - 50, Compiled())

        return Program()


def of_pass(rows):
    return 1000 if rows is None else 101 + 9 * rows


@pytest.mark.parametrize("error", [0.8, 1, 1.2])
@pytest.mark.parametrize(
    ("limit", "rows", "most_programs"),
    [
        pytest.param(1300, None, 1, id="all rows fit"),
        pytest.param(700, 64, 2, id="two passes"),
        pytest.param(333, 24, 2, id="several passes"),
        pytest.param(110, 1, 2, id="a row at a time"),
    ],
)
def test_the_rows_of_a_pass_are_the_most_that_fit(use_ranks, limit, rows, most_programs, error):
    use_ranks(1)
    ways = Ways(of_pass, int(1000 * error))
    choice = memory_choice.choose("asked", ways.ways, limit)
    assert choice.attempts[-1][-1].nbytes <= limit
    assert len(ways.compiled) <= most_programs
    assert len(set(ways.compiled)) == len(ways.compiled)
    best = [memory_choice.equal_rows(100, x) for x in range(1, 100) if of_pass(x) <= limit]
    assert choice.rows_at_once == (None if rows is None else max(best))


def test_rows_of_a_pass_are_rounded_without_a_pass_more_or_one_of_no_rows():
    rng = np.random.default_rng(0)
    for num_rows in rng.integers(1, 10 ** rng.integers(1, 7, 2000)).tolist():
        most = int(rng.integers(1, num_rows + 1))
        rows = rows_of_pass(num_rows, most)
        passes = -(-num_rows // rows)
        assert rows <= most
        assert passes <= -(-num_rows // most)
        assert rows * passes - num_rows < rows
        chosen = memory_choice.equal_rows(num_rows, most)
        assert chosen <= most
        assert rows_of_pass(num_rows, chosen) == chosen
        assert most == num_rows or chosen % 2 ** max(chosen.bit_length() - 6, 0) == 0


def test_one_program_is_compiled_if_the_estimate_is_right(use_ranks):
    use_ranks(1)
    for limit, rows in ((1000, None), (700, 50)):
        ways = Ways(of_pass, 1000)
        assert memory_choice.choose("asked", ways.ways, limit).rows_at_once == rows
        assert ways.compiled == [rows]


def test_an_estimate_that_is_too_small_does_not_decide(use_ranks):
    use_ranks(1)
    ways = Ways(of_pass, 100)
    assert memory_choice.choose("asked", ways.ways, 700).rows_at_once == 50
    assert ways.compiled == [None, 50]


def test_a_larger_pass_is_looked_for_where_much_space_is_left(use_ranks):
    """All rows need more than the line of passes tells, or less than was estimated."""
    use_ranks(1)
    ways = Ways(lambda rows: 1000 if rows is None else 101 + 2 * rows, 1000)
    assert memory_choice.choose("asked", ways.ways, 500).rows_at_once == 50
    assert ways.compiled == [34, None, 50]
    ways = Ways(of_pass, 3000)
    assert memory_choice.choose("asked", ways.ways, 1100).rows_at_once is None
    assert ways.compiled == [34, None]


def test_a_larger_pass_that_does_not_fit_is_not_taken(use_ranks):
    use_ranks(1)
    ways = Ways(lambda rows: 900 if rows in (None, 50) else 101 + 2 * rows, 1000)
    choice = memory_choice.choose("asked", ways.ways, 500)
    assert choice.rows_at_once == 34
    assert ways.compiled == [34, None, 50]


def test_a_way_that_cannot_fit_is_not_compiled_often(use_ranks):
    use_ranks(1)
    ways = Ways(lambda rows: 1000 + (rows or 100), 1100)
    with pytest.raises(ValueError, match=r"; 8 passes of 13 rows needs 1013 B") as error:
        memory_choice.choose(memory_choice.MICRO_BATCH, ways.ways, 500)
    assert len(ways.compiled) <= 3
    assert "Most of the last step is taken by f32[8] 32 B (batch)" in str(error.value)


def test_what_must_be_computed_at_once_is_compiled_so(use_ranks):
    use_ranks(1)
    ways = Ways(of_pass, 1000, why_whole=lambda: "Rows are compared")
    with pytest.raises(ValueError, match="Rows are compared, so that all rows of a rank"):
        memory_choice.choose("asked", ways.ways, 700)
    assert ways.compiled == [None]


def test_both_words_of_random_numbers_are_estimated(use_ranks):
    """Threefry computes two words for a number, which are combined where a mask is used."""
    use_ranks(1)

    def loss(weights, x, key):
        for index, w in enumerate(weights):
            kept = jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, x.shape)
            x = jax.numpy.tanh(jax.numpy.where(kept, x, 0) @ w)
        return x.sum()

    weights = [jax.ShapeDtypeStruct((64, 64), "f4")] * 8
    rows = jax.ShapeDtypeStruct((1024, 64), "f4")
    traced = jax.jit(jax.grad(loss)).trace(weights, rows, jax.random.key(0))
    program = _jax.TracedProgram(traced)
    gradients = 8 * 64 * 64 * 4
    stated = program.compile().computed_bytes - gradients
    assert 0.95 < program.estimate_bytes() / stated < 1.05


def test_a_choice_says_how_much_more_it_computes():
    """A product of matrices, twice in a loop, beside a convolution: what a reader counts."""

    def products(x, w, image, kernel):
        x, _ = jax.lax.scan(lambda x, _: (x @ w, None), x, length=2)
        return x, jax.lax.conv(image, kernel, (1, 1), "SAME")

    shapes = ((3, 4), (4, 4), (2, 5, 8, 8), (7, 5, 3, 3))
    traced = jax.jit(products).trace(*(jax.ShapeDtypeStruct(x, "f4") for x in shapes))
    expected = 2 * 3 * 4 * 4 + (2 * 7 * 8 * 8) * 5 * 3 * 3
    assert _jax.TracedProgram(traced).operations() == expected
    first = memory_choice.Attempt("one pass", 900, False, operations=300)
    last = memory_choice.Attempt("remat='full', one pass", 400, operations=400)
    said = str(memory_choice.Choice("asked", ((first,), (last,)), 500))
    assert said == (
        "asked chose remat='full', one pass, which needs 400 B of 500 B a device (time 1.33); too "
        "much: one pass needs about 900 B (time 1.00). Times are estimates, by the products of "
        "matrices and convolutions that a step computes"
    )


def test_slower_ways_are_estimated_where_all_are_asked_for(use_ranks):
    """None of them is compiled, and one that is impossible says why."""
    use_ranks(1)
    ways = Ways(of_pass, 1000)

    def impossible(rows):
        raise ValueError("The model has no blocks. Leave it out.")

    others = [ways.ways[0]._replace(name="b"), memory_choice.Way("c", 50, 50, impossible)]
    choice = memory_choice.choose("asked", [*ways.ways, *others], 700, looks_at_all=True)
    assert ways.compiled == [50]
    assert choice.chosen.added_bytes == 2 * 50
    assert choice.chosen.sent_bytes == 0
    assert [str(x) for x in choice.others] == [
        "b, one pass needs about 1000 B",
        "c is impossible: The model has no blocks",
    ]
    assert memory_choice.choose("asked", [*ways.ways, *others], 700).others == ()


def test_what_needs_less_than_the_choice_is_not_called_too_much(use_ranks):
    use_ranks(1)
    ways = Ways(lambda rows: 1000 if rows is None else 101 + 2 * rows, 1000)
    said = str(memory_choice.choose("asked", ways.ways, 500))
    assert "chose 2 passes of 50 rows" in said
    expected = "one pass needs about 1000 B (time 1.00); one pass needs 1000 B (time 1.00). Times"
    assert said.partition("too much: ")[2].startswith(expected)
    ways = Ways(of_pass, 3000)
    assert "too much" not in str(memory_choice.choose("asked", ways.ways, 1100))


def test_a_choice_says_what_it_had():
    attempts = (
        (memory_choice.Attempt("data 4", 3 * 2**30, False),),
        (memory_choice.Attempt("fsdp 4", 2**29),),
    )
    assert str(memory_choice.Choice('mesh="auto"', attempts, 2**30)) == (
        'mesh="auto" chose fsdp 4, which needs 512.0 MiB of 1.0 GiB a device; too much: data 4 needs '
        "about 3.0 GiB"
    )
