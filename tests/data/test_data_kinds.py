"""Every kind of data trains, evaluates and predicts alike on one device, on four, and in two
processes.
"""

import numpy as np
import pytest

for name in ("tensorflow", "tensorflow_datasets", "grain", "keras"):
    pytest.importorskip(name)

import data_kinds  # noqa: E402
from processes import SCRIPTS, launch  # noqa: E402

import tnt_jax as tnt  # noqa: E402


@pytest.fixture(
    scope="module",
    params=[
        "1 device",
        "4 devices",
        pytest.param("2 processes", marks=[pytest.mark.multiprocess, pytest.mark.long]),
    ],
)
def found(request, tmp_path_factory):
    """Returns a list with the results of each process, by kind."""
    folder = tmp_path_factory.mktemp("kinds")
    data_kinds.write_tables(folder)
    if request.param == "2 processes":
        result = launch(2, SCRIPTS / "train_data_kinds.py", folder)
        assert result.returncode == 0, result.stdout + result.stderr
        return [dict(np.load(folder / f"{process}.npz")) for process in range(2)]
    tnt.shutdown()
    tnt.init(devices=range(int(request.param[0])))
    results = data_kinds.results(folder)
    tnt.shutdown()
    return [
        {
            f"{kind}|{name}": value
            for kind, numbers in results.items()
            for name, value in numbers.items()
        }
    ]


@pytest.mark.parametrize("kind", data_kinds.KINDS)
def test_every_kind_of_data_gives_the_numbers_of_training_by_hand(kind, found):
    if kind.startswith("torch"):
        pytest.importorskip("torch", reason="needs PyTorch")
    if kind.startswith(("Hugging", "Parquet", "Arrow", "tar")) and data_kinds.datasets is None:
        pytest.skip("needs datasets and webdataset")
    for results in found:
        assert f"{kind}|error" not in results, results[f"{kind}|error"]
        for name, value in data_kinds.expected(kind).items():
            if name == "predicted" and kind.startswith("own shard") and len(found) > 1:
                value = np.concatenate([value[rank::2] for rank in range(2)])
            np.testing.assert_allclose(
                results[f"{kind}|{name}"], value, rtol=1e-4, atol=1e-5, err_msg=name
            )
