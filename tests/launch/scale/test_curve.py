"""Curves beyond what was measured: made by the model itself, they are continued exactly."""

from dataclasses import replace

import pytest

from tnt_jax.launch.scale.projection import Links, Model, Outer
from tnt_jax.launch.scale.scaling import Run, Scaling, Shares, continue_curve

# 2 MB of gradients in one bucket, 1 Gbit/s; a step of one rank takes 50 ms.
MODEL = Model((2.0,), Links(1, 1, 0.125, 0, 0), overlap=False)


def scaling(is_weak, numbers, *, slower=1.0, model=MODEL):
    runs = []
    for ranks in numbers:
        local_ms = 50 if is_weak else 50 / ranks
        seconds = model.step_ms(ranks, local_ms) / 1000
        runs.append(
            Run(
                ranks, 0, ranks, ranks, "cpu", 100, 1, 100 * (ranks if is_weak else 1),
                seconds * (slower if ranks == max(numbers) else 1),
                Shares(1, 0, 0, 0), 1.0, 1, "process", 2_000_000, {}, model.outer,
            )
        )  # fmt: skip
    return Scaling("train.py", is_weak, runs)


@pytest.mark.parametrize("is_weak", [True, False])
def test_a_curve_of_the_model_is_continued_without_error(is_weak):
    projection = continue_curve(scaling(is_weak, (1, 2, 4)), 20)
    assert [point.ranks for point in projection.points] == [8, 16, 20]
    assert projection.error == pytest.approx(0, abs=0.02)
    assert projection.host_gbit == pytest.approx(1, rel=0.02)
    last = projection.points[-1]
    expected = MODEL.step_ms(20, 50 if is_weak else 50 / 20)
    assert last.step_s == pytest.approx(expected / 1000, rel=0.02)
    rows = 2000 if is_weak else 100
    assert last.examples_per_s == pytest.approx(rows / expected * 1000, rel=0.02)
    assert last.efficiency == pytest.approx(last.examples_per_s / 20 / 2000)


def test_the_error_is_that_of_the_largest_number_from_the_others():
    projection = continue_curve(scaling(True, (1, 2, 4), slower=1.25), 8)
    assert projection.error == pytest.approx(1 / 1.25 - 1, abs=0.02)
    assert "a step on 4 that is 20 % too short" in projection.lines()[-1]


def test_a_projection_is_part_of_the_results_and_of_their_picture(tmp_path):
    measured = scaling(True, (1, 2, 4))
    with_curve = Scaling("t", True, measured.runs, projection=continue_curve(measured, 8))
    assert Scaling.from_json(with_curve.to_json()) == with_curve
    assert "8 ranks, projected:" in with_curve.table
    pytest.importorskip("matplotlib")
    labels = with_curve.plot().axes[0].get_legend_handles_labels()[1]
    assert "projected (error 0 %)" in labels


def test_what_does_not_suffice_is_refused():
    with pytest.raises(ValueError, match="must be above the numbers of ranks"):
        continue_curve(scaling(True, (1, 2, 4)), 4)
    with pytest.raises(ValueError, match="at least two numbers of ranks on several hosts"):
        continue_curve(scaling(True, (1, 2)), 8)


def test_local_steps_are_continued_at_a_given_rate():
    gbit = 8 * 0.125 * 1514 / 1448
    local = replace(MODEL, outer=Outer(ranks=1, every=50, fragments=2, delay=1, mb=25))
    measured = scaling(True, (1, 2, 4), model=local)
    with pytest.raises(ValueError, match="Give it with --link-gbit"):
        continue_curve(measured, 16)
    projection = continue_curve(measured, 16, link_gbit=gbit)
    assert projection.error == pytest.approx(0, abs=1e-6)
    last = projection.points[-1]
    # 15 * 12.5 MB take 1.5 s, of which a step hides 50 ms; so twice in 50 steps.
    assert last.step_s == pytest.approx(0.05 + (1.5 - 0.05) * 2 / 50)
    assert last.host_mb == pytest.approx(15 * 25 / 50)
    assert "16 ranks, projected" in projection.lines()[-2]
    assert "a host sends 7.5 MB/step" in projection.lines()[-2]
    assert "outer updates of 25 MB from each group of 1 rank(s)" in projection.lines()[-1]
    whole = replace(measured, projection=projection)
    assert Scaling.from_json(whole.to_json()) == whole
