import numpy as np
import pytest

from tnt_jax.data.tables.columns import ColumnRoles, dense

COLUMNS = {name: np.arange(3) + 10 * number for number, name in enumerate("xyzw")}


def element(roles=(None, None, None), columns="xyz", weight=False):
    batch = {name: COLUMNS[name] for name in columns}
    if weight:
        batch["sample_weight"] = np.ones(3)
    return ColumnRoles(*roles).element(batch)


def names_of(tree):
    """Returns the columns of an element by their names."""
    if isinstance(tree, dict):
        return {key: names_of(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(names_of, tree))
    return None if tree is None else next(n for n, c in COLUMNS.items() if c is tree)


@pytest.mark.parametrize(
    ("roles", "columns", "expected"),
    [
        ((None, None, None), "xy", ("x", "y", None)),
        ((None, None, None), "xyz", ("x", "y", None)),
        ((None, None, None), "z", ("z", None, None)),
        ((None, None, None), "yz", ("z", "y", None)),
        (("z", None, None), "z", ("z", None, None)),
        (("z", "w", None), "zw", ("z", "w", None)),
        ((None, "w", None), "zw", ("z", "w", None)),
        ((None, "w", None), "xzw", ("x", "w", None)),
        ((None, "w", None), "yzw", ({"y": "y", "z": "z"}, "w", None)),
        ((["z", "x"], "y", "w"), "xyzw", (("z", "x"), "y", "w")),
        (("x", ["y", "z"], None), "xyz", ("x", ("y", "z"), None)),
        (("z", None, None), "yz", ("z", "y", None)),
    ],
)
def test_columns_become_inputs_targets_and_weights(roles, columns, expected):
    assert names_of(element(roles, columns)) == expected


def test_a_column_of_sample_weights_is_found_by_its_name():
    np.testing.assert_array_equal(element(columns="xy", weight=True)[2], np.ones(3))


@pytest.mark.parametrize(
    ("roles", "columns", "text"),
    [
        ((None, None, None), "zw", "not known which of the columns 'z', 'w' are inputs"),
        (("label", None, None), "xy", "inputs names the column 'label', but the columns are 'x'"),
        (("x", "label", None), "xy", "targets names the column 'label'"),
        (("x", "y", "label"), "xy", "sample_weight names the column 'label'"),
        ((None, "z", None), "z", "No column is left for the inputs: there are 'z' alone"),
    ],
)
def test_columns_that_are_not_clear_or_not_there_are_refused(roles, columns, text):
    with pytest.raises(ValueError, match=text):
        element(roles, columns)


def test_checksums_tell_rows_by_their_targets():
    roles = ColumnRoles("x", "y", None)
    batch = {"x": np.arange(4), "y": np.array([0, 1, 1, 0])}
    same = roles.checksums({"x": np.arange(4), "y": np.array([0, 1, 1, 0])})
    assert roles.checksums(batch) == same
    augmented = roles.checksums(batch | {"x": np.arange(4) + 1})
    assert (augmented[0] != same[0], augmented[1]) == (True, same[1])
    shuffled = roles.checksums(batch | {"y": np.array([1, 0, 1, 0])})
    assert shuffled[1] != same[1]
    # Targets that are all alike do not tell one order from another.
    assert roles.checksums(batch | {"y": np.zeros(4)})[1] is None
    assert ColumnRoles("x", None, None).checksums({"x": np.arange(4)})[1] is None


def test_rows_that_are_arrays_become_one_array():
    rows = np.empty(2, object)
    rows[:] = [np.array([1, 2]), np.array([3, 4])]
    np.testing.assert_array_equal(dense({"x": rows})["x"], [[1, 2], [3, 4]])
    rows[1] = np.array([3])
    with pytest.raises(ValueError, match="have one shape, but those of the column 'x' differ"):
        dense({"x": rows})
    text = np.array(["a", "b"], object)
    assert dense({"x": text})["x"] is text


def test_weights_that_nobody_named_are_left_out_where_there_are_no_targets():
    row = {"x": 1.0, "sample_weight": 2.0}
    assert ColumnRoles(None, None, None).example(row) == (1.0,)
    with pytest.raises(ValueError, match="The weights are 'sample_weight', but there are no"):
        ColumnRoles(None, None, "sample_weight").example(row)
