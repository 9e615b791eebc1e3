import pytest

from tnt_jax.distributed.hlo import Collective, read_collectives, read_planned

# Shortened from a step compiled for H100s: one pair with a kernel inside, one that blocks, one
# wrapped into a generic start.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%wrapped (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-gather.1 = f32[32]{0} all-gather(%p), replica_groups={{0,1}}
}

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %fusion.1 = f32[1024]{0} fusion(%a), kind=kLoop, calls=%f, metadata={op_name="jit(step)/transpose(jvp(Net))/dot"}
  %all-reduce-start = f32[1024]{0} all-reduce-start(%fusion.1), backend_config={"is_sync":false}
  %fusion.2 = f32[1024]{0} fusion(%a), kind=kLoop, calls=%f, metadata={op_name="jit(step)/transpose(jvp(Net))/dot"}
  %all-reduce-done = f32[1024]{0} all-reduce-done(%all-reduce-start)
  %ar2 = (f32[8]{0}, bf16[8]{0}) all-reduce-start(%fusion.2), backend_config={"is_sync":true}
  %ar2-done = (f32[8]{0}, bf16[8]{0}) all-reduce-done(%ar2)
  %ag-start = ((f32[4]{0}), f32[32]{0}) fusion-start(%fusion.2), calls=%wrapped
  %fusion.3 = f32[1024]{0} fusion(%a), kind=kLoop, calls=%f
  %ag-done = f32[32]{0} fusion-done(%ag-start), calls=%wrapped
  %fusion.4 = f32[1024]{0} fusion(%a), kind=kLoop, calls=%f
  ROOT %plain = f32[2]{0} all-reduce(%fusion.4), replica_groups={{0,1}}
}
"""


def test_collectives_are_read_with_their_places():
    collectives, num_backward = read_collectives(PROGRAM)
    assert num_backward == 2
    assert collectives == [
        Collective("all-reduce", 4096, True, 0.25, 0.5, 0.5),
        Collective("all-reduce", 48, False, 0.5, 0.5, 0.5),
        Collective("all-gather", 128, True, 0.5, 0.75, 0.5),
        Collective("all-reduce", 8, False, 1.0, 1.0, 0.5),
    ]


def test_sums_of_the_ring_last_from_their_start_to_what_waits_for_them():
    text = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8]) -> f32[8] {
  %first = (s32[]) custom-call(%a), operand_layout_constraints={s32[], s32[], f32[8]{0}}, metadata={op_name="x/ring_start/io"}
  %fusion = f32[8]{0} fusion(%a), kind=kLoop, calls=%f
  %last = (s32[]) custom-call(%a), operand_layout_constraints={s32[], s32[], f32[2]{0}}, metadata={op_name="x/ring_start/io"}
  %one = (s32[], f32[8]{0}) custom-call(%a), operand_layout_constraints={s32[], s32[]}, metadata={op_name="x/ring_wait/io"}
  ROOT %other = (s32[], f32[2]{0}) custom-call(%a), operand_layout_constraints={s32[], s32[]}, metadata={op_name="x/ring_wait/io"}
}
"""
    assert read_collectives(text)[0] == [
        Collective("ring-sum", 32, True, 0.0, 1.0, 0.0),
        Collective("ring-sum", 8, False, 1.0, 1.0, 0.0),
    ]


def test_a_program_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="Only a scheduled program"):
        read_collectives(PROGRAM.replace("is_scheduled=true", "x=1"))


def test_planned_collectives_are_read():
    text = """
    %1 = "stablehlo.all_reduce"(%0) <{channel_handle = #stablehlo.channel_handle<handle = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<3x4xf32>) -> tensor<3x4xf32>
    %2 = "stablehlo.all_to_all"(%1) <{split_count = 4 : i64}> : (tensor<4x8xui16>) -> tensor<4x8xui16>
    %3 = "stablehlo.all_gather"(%2) <{all_gather_dim = 0 : i64}> : (tensor<i32>) -> tensor<4xi32>
    """
    assert read_planned(text) == [("all-reduce", 48), ("all-to-all", 64), ("all-gather", 4)]
