import pytest

import tnt_jax as tnt
from tnt_jax.distributed.joining import runtime
from tnt_jax.parameter_server import facade
from tnt_jax.parameter_server.facade import check_compilation, check_options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_servers": 0}, "num_servers must be an integer of at least 1, but is 0"),
        ({"num_workers": 2.0}, "num_workers must be an integer"),
        ({"max_staleness": -1}, "max_staleness must be an integer of at least 0, but is -1"),
        ({"max_staleness": True}, "max_staleness must be an integer"),
        ({"backup_workers": 1}, r"pass max_staleness=0"),
        ({"backup_workers": 4, "max_staleness": 0}, r"backup_workers \(4\) must be fewer than"),
        ({"compression": "int8"}, "compression must be None or 'bfloat16', but is 'int8'"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        tnt.ParameterServer(tnt.Model(tnt.models.CNN(num_classes=2)), **given)


def test_a_job_of_several_processes_is_refused_before_actors_start(monkeypatch):
    monkeypatch.setattr(runtime, "get_process_count", lambda: 2)
    monkeypatch.setattr(facade, "Actors", None)
    with pytest.raises(RuntimeError, match=r"one of 2 processes of a job\. Start the script once"):
        tnt.ParameterServer(tnt.Model(tnt.models.CNN(num_classes=2)))


@pytest.mark.parametrize(
    "option",
    [{"reproducible": True}, {"shard_optimizer_state": True}, {"gradient_compression": "bfloat16"}],
)
def test_options_for_sums_over_ranks_are_refused(option):
    model = tnt.Model(tnt.models.CNN(num_classes=2), **option)
    with pytest.raises(
        ValueError, match=f"A model with {next(iter(option))} .*Make the model with"
    ):
        check_options(model._core.options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"on_nan": "skip"}, "on_nan='skip' is not possible with a parameter server"),
        (
            {"optimizer": tnt.optimizers.SGD(gradient_accumulation_steps=2)},
            "gradient_accumulation_steps=2 is not possible",
        ),
        (
            {"optimizer": tnt.optimizers.LossScaleOptimizer(tnt.optimizers.SGD())},
            "A LossScaleOptimizer is not possible",
        ),
    ],
)
def test_what_workers_cannot_do_is_refused(given, message):
    model = tnt.Model(tnt.models.CNN(num_classes=2))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **given})
    with pytest.raises(ValueError, match=message):
        check_compilation(model._core.compilation)
