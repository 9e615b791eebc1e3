"""Which dimension of a parameter is cut over which axis."""

import pytest

from tnt_jax.sharded.options import checked_rules, choose_axes

SIZES = {"data": 2, "fsdp": 4, "tensor": 2}


def axes(shape, rules=(), names=(), sizes=SIZES):
    return choose_axes({"a/w": shape}, {"a/w": names} if names else {}, rules, sizes)["a/w"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 32), ("fsdp", None)),  # The largest,
        ((32, 64), (None, "fsdp")),
        ((64, 64), (None, "fsdp")),  # of equal ones the last,
        ((3, 3, 7, 512), (None, None, None, "fsdp")),
        ((1001, 64), (None, "fsdp")),  # that divides.
        ((1001, 63), (None, None)),
        ((1023,), (None,)),  # Small arrays stay whole.
        ((1024,), ("fsdp",)),
        ((), ()),
    ],
)
def test_arrays_are_cut_along_their_largest_dimension_that_divides(shape, expected):
    assert axes(shape) == expected


def test_without_an_axis_fsdp_nothing_is_cut():
    assert axes((64, 32), sizes={"data": 8}) == (None, None)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([("a/*", (None, "tensor"))], ("fsdp", "tensor")),
        ([("*/w", ("fsdp", None))], ("fsdp", None)),
        ([("a/w", ())], (None, None)),
        ([("a/w", ("tensor", None)), ("*", ())], ("tensor", "fsdp")),  # The first that fits counts.
    ],
)
def test_rules_of_paths_choose_the_axes(rules, expected):
    assert axes((64, 128), checked_rules(rules)) == expected


def test_rules_of_logical_names_choose_the_axes():
    rules = checked_rules([("embed", "fsdp"), ("mlp", "tensor")])
    assert axes((64, 128), rules, ("embed", "mlp")) == ("fsdp", "tensor")
    # An axis cuts one dimension; a further rule for the name is tried.
    twice = checked_rules([("embed", "tensor"), ("mlp", "tensor"), ("mlp", "fsdp")])
    assert axes((64, 128), twice, ("embed", "mlp")) == ("tensor", "fsdp")


def test_axes_that_the_mesh_lacks_cut_nothing():
    rules = checked_rules([("a/w", (None, "tensor"))])
    assert axes((64, 127), rules, sizes={"data": 8}) == (None, None)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("b/*", ())], r"\('b/\*', \(\)\) fits no parameter. Parameters are a/w"),
        ([("mlp", "tensor")], r"\('mlp', 'tensor'\) fits no parameter"),
        ([("a/w", (None, "tensor"))], r"a/w \[64, 127\] cannot be cut along dimension 1 over the "
         r"axis 'tensor' of 2 devices, which do not divide 127.*leave the array whole by the rule"),
        ([("a/w", ("tensor",))], r"has 1 axes, but a/w has the shape \[64, 127\]"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_refused(rules, text):
    with pytest.raises(ValueError, match=text):
        axes((64, 127), checked_rules(rules))


@pytest.mark.parametrize(
    ("rule", "error", "text"),
    [
        ("a/w", TypeError, "is a pair"),
        (("a/w", 1), TypeError, "is a pair"),
        (("a/w", ("model",)), ValueError, "names the axis 'model'"),
        (("a/w", ("data", None)), ValueError, "names the axis 'data'"),
        (("a/w", ("tensor", "tensor")), ValueError, "names an axis twice"),
    ],
)
def test_what_is_no_rule_is_refused(rule, error, text):
    with pytest.raises(error, match=text):
        checked_rules([rule])
