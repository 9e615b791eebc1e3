"""Plans: what they say of arrays is what live arrays have, and what they say of communication is what
the step does.
"""

import logging
import re
import textwrap

import jax
import numpy as np
import pytest
from flax import linen as nn
from processes import launch

import tnt_jax as tnt
from tnt_jax.distributed.sums.hlo import in_units
from tnt_jax.settings import TrialsDone
from tnt_jax.train.contracts import Batch

X, Y = np.ones((16, 64), np.float32), np.zeros(16, np.int32)


def compiled_model(**options):
    model = tnt.Model(nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(8)]), **options)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    return model


def planned(monkeypatch, capsys, **options):
    """Returns the text of a plan, and the state of the model that it is for."""
    monkeypatch.setenv("TNT_PLAN", "1")
    model = compiled_model(**options)
    with pytest.raises(TrialsDone):
        model.fit(X, Y, batch_size=16, verbose=0)
    return capsys.readouterr().out, model._core.trainer.require_state()


def local_bytes(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def said_kib(text, line):
    return float(re.search(rf"{line}: [\d.]+ KiB, ([\d.]+) KiB a device", text)[1])


def test_a_plan_states_the_bytes_of_live_arrays(four_ranks, monkeypatch, capsys):
    text, state = planned(monkeypatch, capsys, mesh={"data": 2, "fsdp": 2})
    assert text.startswith("Mesh: data 2, fsdp 2\n")
    assert re.search(r"layers_0/kernel +float32\[64, 256 fsdp\]  32\.0 KiB a device", text)
    assert re.search(r"layers_2/bias +float32\[8\]  32 B a device", text)
    assert said_kib(text, "All parameters") == pytest.approx(
        local_bytes(state.params) / 1024, abs=0.1
    )
    assert said_kib(text, "All other state") == pytest.approx(
        local_bytes((state.opt_state, state.step, state.key)) / 1024, abs=0.1
    )
    assert int(state.step) == 0, "Nothing was trained."


def test_a_plan_lists_the_collectives_of_the_step(four_ranks, monkeypatch, capsys):
    sharded, _ = planned(monkeypatch, capsys, mesh={"fsdp": 4})
    assert "x all-gather," in sharded
    assert "x reduce-scatter," in sharded
    plain, state = planned(monkeypatch, capsys)
    assert "all-gather" not in plain
    # The gradients and a few numbers.
    summed, sent = re.search(
        r"x all-reduce, ([\d.]+) KiB; a device sends ([\d.]+) KiB", plain
    ).groups()
    assert float(summed) == pytest.approx(local_bytes(state.params) / 1024, abs=0.2)
    assert float(sent) == pytest.approx(2 * 3 / 4 * float(summed), abs=0.2)
    time_ms = re.search(r"waited for: .*, ([\d.e-]+) ms at 50 GB/s", plain)[1]
    assert float(time_ms) == pytest.approx(float(sent) * 1024 / 50e9 * 1000, rel=0.01)


def test_a_plan_says_why_the_mesh_was_chosen(use_ranks, monkeypatch, capsys):
    monkeypatch.setenv("TNT_PLAN", "1")
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "10GB")
    use_ranks(4)
    text, state = planned(monkeypatch, capsys, mesh="auto")
    assert text.startswith('Mesh: data 4\nmesh="auto" chose data 4, which needs ')
    assert "of 9.3 GiB a device\nSteps that were looked at" in text
    last = text.partition("\nParameters, with")[0].splitlines()[-1]
    assert re.fullmatch(r"  fsdp 4 needs about [\d.]+ KiB; time 1\.00; not needed", last)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state.params))


def test_a_plan_compares_the_steps_that_memory_leaves(use_ranks, monkeypatch, capsys):
    """What was too much, what was chosen, and the slower ones, of which none is compiled."""
    monkeypatch.setenv("TNT_PLAN", "1")
    monkeypatch.setenv("TNT_DEVICE_MEMORY", "3000KiB")
    use_ranks(2)
    x, y = np.ones((2048, 64), np.float32), np.zeros(2048, np.int32)
    model = compiled_model()
    with pytest.raises(TrialsDone):
        model.fit(x, y, batch_size=2048, verbose=0, tnt_micro_batch_size="auto")
    choice = model._core.memory_choice
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == str(choice)
    assert lines[2].startswith("Steps that were looked at. Times are estimates, by the products")
    table = lines[3 : lines.index("Parameters, with the axis that cuts each dimension:")]
    assert re.fullmatch(r"  one pass needs about [\d.]+ MiB; time 1\.00; too much", table[0])
    [chosen] = [line for line in table if line.endswith("; chosen")]
    count = -(-1024 // choice.rows_at_once)
    grads = local_bytes(model.state.params)
    assert f"{count} passes of {choice.rows_at_once} rows needs" in chosen
    # The rows that round the passes are computed, too.
    time = f"{count * choice.rows_at_once / 1024:.2f}"
    assert f"time {time}; passes add up {in_units(count * grads)} of gradients; " in chosen
    sent_ms = float(re.search(r"([\d.e-]+) ms at 50 GB/s \(400 Gbit/s\) to send", chosen)[1])
    assert sent_ms == pytest.approx(grads / 50e9 * 1000, rel=0.02)
    # Of two kernels, the forward products of the first are computed again: its output is needed.
    kernels = 64 * 256, 256 * 8
    plain, again = 2 * kernels[0] + 3 * kernels[1], kernels[0]
    slower = [line for line in table if line.endswith("; not needed")]
    assert [line.partition(" needs")[0] for line in slower] == [
        "  remat='full', one pass",
        "  shard_optimizer_state, remat='full', one pass",
        "  fsdp 2, remat='full', one pass",
    ]
    assert f"time {(plain + again) / plain:.2f}; not needed" in slower[0]


def test_a_plan_says_what_a_pipeline_costs(use_ranks, monkeypatch, caplog):
    use_ranks(4)
    monkeypatch.setattr(logging.getLogger("tnt_jax"), "propagate", True)
    pipeline = tnt.Pipeline("layers", microbatches=4)
    model = tnt.Model(nn.Dense(3), mesh={"data": 2, "stage": 2}, pipeline=pipeline)
    expected = (
        "Pipeline of layers: 2 stages, 4 micro-batches, gpipe; a stage waits for 20.0% of a step"
    )
    with caplog.at_level("INFO", "tnt_jax"):
        assert model._core.mesh_notes() == [expected]
    assert f"{expected}." in caplog.messages


def test_a_plan_counts_the_sums_of_a_reproducible_step(four_ranks, monkeypatch, capsys):
    text, state = planned(monkeypatch, capsys, reproducible=True, virtual_ranks=4)
    # The gradients and a few numbers, by pairs of ranks and by pairs of pairs.
    found = re.search(r"x all-reduce, ([\d.]+) KiB; a device sends ([\d.]+) KiB", text).groups()
    expected = 2 * local_bytes(state.params) / 1024
    assert list(map(float, found)) == pytest.approx([expected] * 2, abs=0.2)


def test_one_device_communicates_nothing(use_ranks, monkeypatch, capsys):
    use_ranks(1)
    text, state = planned(monkeypatch, capsys)
    assert "Communication of a step: none" in text
    peak = float(re.search(r"Memory of a step: ([\d.]+) KiB a device", text)[1])
    assert peak * 1024 > local_bytes((state.params, state.opt_state)) + X.nbytes


def test_a_summary_states_the_memory_of_a_step(use_ranks, capsys):
    """It is what the compiler states for a step that runs, and follows from shapes alone."""
    use_ranks(2)
    model = compiled_model()
    model.summary(X[:4], Y[:4], batch_size=4096)
    said = capsys.readouterr().out.split("Memory of a step: ")[1]
    model.summary(batch_size=4096)
    assert capsys.readouterr().out.endswith(said)
    assert int(model._core.trainer.require_state().step) == 0
    x, y = np.ones((4096, 64), np.float32), np.zeros(4096, np.int32)
    trainer = model._core.trainer
    program = trainer.lower_train_step(Batch(x, y)).compile().memory_analysis()
    results = program.output_size_in_bytes - program.alias_size_in_bytes
    computed = program.temp_size_in_bytes + results
    state = trainer.require_state()
    expected = {
        "for parameters": local_bytes(state.params),
        "for optimizer state": local_bytes(state.opt_state),
        "for activations and gradients": computed,
    }
    for what, nbytes in expected.items():
        assert f"  {in_units(nbytes)} {what}\n" in said
    assert said.startswith(f"{in_units(program.argument_size_in_bytes + computed)} a device")
    # 2,048 rows on each device.
    assert "Most take: f32[2048,256] 2.0 MiB (" in said
    with pytest.raises(ValueError, match="has seen 0 kinds: pass x and y"):
        compiled_model().summary(batch_size=64)
    with pytest.raises(ValueError, match="batch_size must be at least 1, but is 0"):
        model.summary(batch_size=0)


def test_a_summary_of_whole_or_padded_batches(use_ranks, capsys):
    use_ranks(2)
    model = compiled_model()
    model.summary(X, Y, batch_size=2049)  # 1,025 rows on each device.
    assert "f32[1025,256]" in capsys.readouterr().out
    model = compiled_model(reproducible=True)
    model.summary(X, Y, batch_size=64)
    assert "Memory of a step: " in capsys.readouterr().out


@pytest.mark.multiprocess
@pytest.mark.long
def test_the_launcher_shows_a_plan_for_devices_that_are_not_here(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import numpy as np
        from flax import linen as nn
        import tnt_jax as tnt

        model = tnt.Model(nn.Dense(256), mesh={"data": 2, "fsdp": 4})
        model.compile(optimizer="sgd", loss="mean_squared_error")
        model.fit(np.ones((16, 64)), np.ones((16, 256)), batch_size=16)
        raise SystemExit("fit came back")
        """)
    )
    result = launch(8, str(script), command="plan", timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert "Mesh: data 2, fsdp 4" in result.stdout
    assert re.search(r"kernel +float32\[64, 256 fsdp\]  16\.0 KiB a device", result.stdout)
