"""The arrays that a program holds when it holds most are told, with the lines that made them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tnt_jax.distributed.sums.hlo import in_units, largest_arrays

TEXT = """HloModule step, is_scheduled=true

FileNames
1 "/home/user/train.py"
2 "{library}/flax/linear.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

%body (carried: (f32[4], s32[])) -> (f32[4], s32[]) {{
  %carried = (f32[4]{{0}}, s32[]) parameter(0)
  %x.1 = f32[4]{{0}} get-tuple-element(%carried), index=0
  %n = s32[] get-tuple-element(%carried), index=1
  %inner = f32[100]{{0}} broadcast(%x.1), metadata={{op_name="jit(step)/while/body/mul" stack_frame_id=1}}
  %next = f32[4]{{0}} fusion(%x.1, %inner), kind=kLoop, calls=%f
  ROOT %both = (f32[4]{{0}}, s32[]) tuple(%next, %n)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0), metadata={{op_name="batch.inputs"}}
  %zero = s32[] constant(0)
  %gone = f32[80]{{0}} broadcast(%x), metadata={{op_name="jit(step)/first" stack_frame_id=2}}
  %small = f32[4]{{0}} reduce(%gone, %zero), to_apply=%add
  %kept = f32[60]{{0}} broadcast(%small), metadata={{op_name="jit(step)/Net/Dense_0/dot" stack_frame_id=2}}
  %start = (f32[4]{{0}}, s32[]) tuple(%small, %zero)
  %loop = (f32[4]{{0}}, s32[]) while(%start), condition=%c, body=%body
  %y = f32[4]{{0}} get-tuple-element(%loop), index=0
  ROOT %z = f32[4]{{0}} fusion(%y, %kept), kind=kLoop, calls=%g
}}
"""


def test_the_arrays_of_the_moment_that_holds_most_are_told():
    library = jax.__file__.rsplit("/", 2)[0]
    found = largest_arrays(TEXT.format(library=library))
    # Within the loop: its own array, and what waits for its end. The largest before is gone.
    assert list(map(str, found)) == [
        "f32[100] 400 B (while/body/mul, train.py:7)",
        "f32[60] 240 B (Net/Dense_0/dot, train.py:7)",
        "f32[4] 16 B (batch.inputs)",
    ]


def test_an_array_of_a_fusion_is_what_that_computes_last():
    text = """HloModule step, is_scheduled=true

%fused (a: f32[8]) -> (f32[8], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} negate(%a), metadata={op_name="jit(step)/Net/neg" source_file="t.py" source_line=3}
  %c = f32[8]{0} tanh(%b), metadata={op_name="jit(step)/Net/tanh" source_file="t.py" source_line=4}
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%b, %c)
}

%padded (a: f32[8]) -> f32[9] {
  ROOT %p = f32[9]{0} pad(%a, %n), padding=0_1
}

ENTRY %main (x: f32[8]) -> f32[9] {
  %x = f32[8]{0} parameter(0), metadata={op_name="batch.inputs"}
  %both = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%fused
  %one = f32[8]{0} get-tuple-element(%both), index=0
  ROOT %y = f32[9]{0} fusion(%one), kind=kLoop, calls=%padded
}
"""
    assert list(map(str, largest_arrays(text))) == [
        "f32[8] and f32[8] 64 B (Net/tanh, t.py:4)",
        "f32[9] 36 B (made by the compiler)",
        "f32[8] 32 B (batch.inputs)",
    ]


def test_what_it_adds_up_to_is_what_the_compiler_states():
    """It is an account of the text alone: places that are used again are not in it."""

    def step(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    weights = [jnp.ones((64, 64))] * 4
    compiled: Any = jax.jit(jax.grad(step)).lower(weights, jnp.ones((4096, 64))).compile()
    memory = compiled.memory_analysis()
    found = largest_arrays(compiled.as_text(), 1000)
    stated = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert sum(x.nbytes for x in found) == pytest.approx(stated, rel=0.25)
    largest = [x for x in found if x.shape == "f32[4096,64]"]
    assert any(x.line.startswith("test_hlo_memory.py:") for x in largest)


def test_bytes_have_units():
    assert [in_units(x) for x in (5, 3 * 2**20, 2**41)] == ["5 B", "3.0 MiB", "2048.0 GiB"]
