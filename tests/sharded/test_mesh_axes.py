"""The mesh that a user asks for is checked before anything runs."""

import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.sharded.options import MeshAxes, ShardingOptions


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"data": 2, "fsdp": 4}, {"data": 2, "stage": 1, "fsdp": 4, "tensor": 1}),
        ({"fsdp": -1}, {"data": 1, "stage": 1, "fsdp": 8, "tensor": 1}),
        ({"data": -1, "tensor": 2}, {"data": 4, "stage": 1, "fsdp": 1, "tensor": 2}),
        ({"data": np.int64(8)}, {"data": 8, "stage": 1, "fsdp": 1, "tensor": 1}),
    ],
)
def test_axes_fill_the_devices(asked, expected):
    assert MeshAxes.of(asked).sizes(8) == expected


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"data": 2, "fsdp": 2}, r"data 2, fsdp 2.*does not fill the 8 device.*multiply to 4"),
        ({"data": 3, "fsdp": -1}, r"does not fill the 8 device\(s\).*multiply to 3"),
        ({"fsdp": 16}, r"fsdp 16.*does not fill the 8 device"),
    ],
)
def test_a_mesh_that_does_not_fill_the_devices_is_refused(asked, text):
    with pytest.raises(ValueError, match=text):
        MeshAxes.of(asked).sizes(8)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"model": 2}, ValueError, "unknown axis 'model'. The axes are data, stage, fsdp, tensor"),
        ({"fsdp": 0}, ValueError, r"mesh\['fsdp'\] must be a number of devices of at least 1"),
        ({"fsdp": True}, ValueError, r"mesh\['fsdp'\] must be a number of devices"),
        ({"fsdp": 2.0}, ValueError, r"mesh\['fsdp'\] must be a number of devices"),
        ({"data": -1, "fsdp": -1}, ValueError, "may leave one axis open with -1"),
        ((2, 4), TypeError, "mesh must map axes to numbers of devices"),
    ],
)
def test_what_is_no_mesh_is_refused(asked, error, text):
    with pytest.raises(error, match=text):
        MeshAxes.of(asked)


def test_a_mesh_keeps_the_order_of_the_devices(use_ranks):
    devices = use_ranks(8).mesh
    mesh = MeshAxes.of({"data": 2, "fsdp": 2, "tensor": 2}).build(devices)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert list(mesh.devices.flat) == list(devices.devices.flat)
    assert MeshAxes.of({"fsdp": 8}).build(devices).shape == {"data": 1, "fsdp": 8}


@pytest.mark.parametrize(
    "option",
    [
        {"reproducible": True},
        {"gradient_compression": "bfloat16"},
        {"ranks_per_host": 2},
        {"shard_optimizer_state": True},
    ],
)
def test_options_of_whole_gradients_exclude_a_mesh(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} cannot be combined with mesh"):
        tnt.Model(make_net(), mesh={"fsdp": 8}, **option)


def test_an_axis_without_use_is_refused():
    with pytest.raises(ValueError, match=r"axis 'stage' of mesh \(2 devices\)"):
        ShardingOptions.of({"data": 4, "stage": 2}, ())


def test_rules_need_a_mesh():
    with pytest.raises(ValueError, match="sharding_rules need a mesh"):
        ShardingOptions.of(None, [("*", ())])


def make_net():
    import flax.linen as nn

    return nn.Dense(3)
