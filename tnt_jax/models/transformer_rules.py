"""How the Transformer is cut over an axis `tensor`: Megatron's columns and rows.

The first of two matrices in a row is cut by columns, that is by heads or by inner features, and the
second by rows, so that each pair needs one sum over the devices (Shoeybi et al. 2019,
arXiv:1909.08053, section 3).

    model = tnt.Model(Transformer(...), mesh={"data": 4, "tensor": 2}, sharding_rules=rules)
"""

rules: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("*/query/kernel", (None, "tensor", None)),
    ("*/key/kernel", (None, "tensor", None)),
    ("*/value/kernel", (None, "tensor", None)),
    ("*/attend*/output/kernel", ("tensor", None, None)),
    ("*/filter/filter/kernel", (None, "tensor")),
    ("*/filter/filter/bias", ("tensor",)),
    ("*/filter/output/kernel", ("tensor", None)),
)
