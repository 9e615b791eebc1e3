import pytest

from tnt_jax.distributed.sums.hlo import (
    Collective,
    Traffic,
    count_runs,
    read_collectives,
    read_planned,
    read_traffic,
)

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


def test_a_sum_in_shared_memory_is_an_all_reduce():
    text = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8]) -> f32[8] {
  %fusion = f32[8]{0} fusion(%a), kind=kLoop, calls=%f
  ROOT %sum = (f32[8]{0}, f32[2]{0}) custom-call(%fusion, %b), custom_call_target="tnt_jax_sum"
}
"""
    assert read_collectives(text)[0] == [Collective("all-reduce", 40, False, 1.0, 1.0, 0.0)]


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


# Shortened from a decoder compiled for H100s: a loop over layers, with a branch in it.
LOOP = """\
HloModule jit_step, is_scheduled=true

%branch (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %permute = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = (bf16[8,512]{1,0}, bf16[8,4096]{1,0}) all-gather-start(%x), replica_groups=[4,8]<=[32], backend_config={"is_sync":false}
  %ag-done = bf16[8,4096]{1,0} all-gather-done(%ag)
  %rs = ((f32[8,64]{1,0}), f32[8,8]{1,0}) reduce-scatter-start(%y), backend_config={"is_sync":true}
  %c = f32[4]{0} conditional(%index, %a, %a), branch_computations={%branch, %branch}
  ROOT %t = (s32[], f32[8]) tuple(%i, %z)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}
  ROOT %ar = f32[2]{0} all-reduce(%b), replica_groups={{0,1}}
}
"""


def test_traffic_counts_what_stands_in_loops_and_branches():
    assert read_traffic(LOOP) == [
        Traffic("all-reduce", 8, "f32", False, 1, 2),
        Traffic("all-gather", 8 * 4096 * 2, "bf16", True, 32, 8),
        Traffic("reduce-scatter", 8 * 64 * 4, "f32", False, 32),
        Traffic("collective-permute", 16, "f32", False, 32),
        Traffic("collective-permute", 16, "f32", False, 32),
    ]
    assert count_runs(LOOP) == {"": 1, "body": 32, "branch": 64}


def test_traffic_of_a_flat_program_is_its_collectives():
    assert [(x.kind, x.nbytes, x.is_asynchronous) for x in read_traffic(PROGRAM)] == [
        (x.kind, x.nbytes, x.is_asynchronous) for x in read_collectives(PROGRAM)[0]
    ]


def one_reduce_scatter(groups: str) -> str:
    return f"""\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[16]) -> f32[8] {{
  %a = f32[16]{{0}} parameter(0)
  ROOT %rs = f32[8]{{0}} reduce-scatter(%a), {groups}dimensions={{0}}, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("{{0,1,2,3}}", 4),
        ("[2,2]<=[4]", 2),
        ("[1,4]<=[2,2]T(1,0)", 4),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
        ("mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8),
        ("mesh['data'=2,'fsdp'=4], device_ids=([2,4]T(1,0)) {'data','fsdp':(1)2}", 4),
    ],
)
def test_bytes_of_a_blocking_reduce_scatter_are_those_of_its_operands(groups, size):
    program = one_reduce_scatter(f"replica_groups={groups}, ")
    assert read_traffic(program) == [Traffic("reduce-scatter", 8 * 4 * size, "f32", False, 1, size)]


def test_a_reduce_scatter_without_groups_is_refused():
    with pytest.raises(ValueError, match="replica_groups"):
        read_traffic(one_reduce_scatter(""))


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        ("all-reduce", 4, 2 * 750),
        ("all-gather", 4, 750),
        ("reduce-scatter", 8, 875),
        ("all-to-all", 2, 500),
        ("collective-permute", 0, 1000),
        ("all-reduce", 1, 0),
        # No fewer than this, whatever the number of devices.
        ("all-reduce", 0, 2000),
    ],
)
def test_a_ring_sends_what_its_formula_says(kind, size, sent):
    assert Traffic(kind, 1000, "f32", False, 3, size).sent_bytes == sent


def test_no_groups_are_one_of_all_devices():
    head = "HloModule jit_step, is_scheduled=true, replica_count=2, num_partitions=4"
    text = LOOP.replace("HloModule jit_step, is_scheduled=true", head)
    text = text.replace("replica_groups={{0,1}}", "replica_groups={}")
    assert read_traffic(text)[0].group_size == 8
