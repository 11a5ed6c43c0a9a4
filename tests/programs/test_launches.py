"""Kernel launches, read from handwritten programs in the syntax of XLA for an H100 (jax 0.12)."""

import pytest

from leanformer.programs import hlo, launches
from leanformer.programs.launches import Launch


GEMM = 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
PROGRAM = f"""
HloModule jit_train_step, is_scheduled=true

%gemm_computation (p0: bf16[35,6], p1: bf16[6,11]) -> bf16[35,11] {{
  %p0 = bf16[35,6]{{1,0}} parameter(0)
  %p1 = bf16[6,11]{{1,0}} parameter(1)
  ROOT %dot.1 = bf16[35,11]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%fused_add (p0: f32[5]) -> f32[5] {{
  %p0 = f32[5]{{0}} parameter(0)
  ROOT %add.1 = f32[5]{{0}} add(%p0, %p0)
}}

%fused_slice (p0: f32[3,5], p1: s32[]) -> f32[1,5] {{
  %p0 = f32[3,5]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[1,5]{{1,0}} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={{1,5}}
}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%body (arg: (s32[], f32[5])) -> (s32[], f32[5]) {{
  %arg = (s32[], f32[5]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[5]{{0}} get-tuple-element(%arg), index=1
  %fusion-start.1 = ((f32[3,5]{{1,0}}, s32[]), f32[1,5]{{1,0}}, u32[]) fusion-start(%x, %i), \
kind=kLoop, calls=%fused_slice
  %all-reduce-start.1 = f32[7,11]{{1,0}} all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add, \
metadata={{op_name="jit(train_step)/transpose(jvp())/while/body/dot_general"}}
  %gemm.1 = bf16[35,11]{{1,0}} fusion(%x, %x), kind=kCustom, calls=%gemm_computation, {GEMM}
  %loop_add.1 = f32[5]{{0}} fusion(%x), kind=kLoop, calls=%fused_add
  %fusion-done.1 = f32[1,5]{{1,0}} fusion-done(%fusion-start.1)
  %all-reduce-done.1 = f32[7,11]{{1,0}} all-reduce-done(%all-reduce-start.1)
  %loop_add.2 = f32[5]{{0}} fusion(%all-reduce-done.1), kind=kLoop, calls=%fused_add
  %cudnn.1 = (bf16[2,5]{{1,0}}, u8[0]{{0}}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %all-gather-start.1 = (f32[3,5]{{1,0}}, f32[12,5]{{1,0}}) all-gather-start(%x), replica_groups={{{{0,4}},{{1,5}}}}, \
backend_config={{"collective_backend_config":{{"is_sync":true}}}}
  %loop_add.3 = f32[5]{{0}} fusion(%x), kind=kLoop, calls=%fused_add
  %all-gather-done.1 = f32[12,5]{{1,0}} all-gather-done(%all-gather-start.1)
  ROOT %tuple.1 = (s32[], f32[5]{{0}}) tuple(%i, %loop_add.2)
}}

%draw_body (arg: (f32[1])) -> (f32[1]) {{
  %arg = (f32[1]{{0}}) parameter(0)
  %y = f32[1]{{0}} get-tuple-element(%arg), index=0
  %loop_add.4 = f32[1]{{0}} fusion(%y), kind=kLoop, calls=%fused_add
  ROOT %tuple.2 = (f32[1]{{0}}) tuple(%loop_add.4)
}}

%condition (arg: (f32[1])) -> pred[] {{
  %arg = (f32[1]{{0}}) parameter(0)
  ROOT %less = pred[] custom-call(%arg), custom_call_target="never_counted"
}}

ENTRY %main (x: f32[5]) -> f32[5] {{
  %x = f32[5]{{0}} parameter(0)
  %copy.1 = f32[5]{{0}} copy(%x)
  %while.1 = (f32[1]{{0}}) while(%copy.1), condition=%condition, body=%draw_body, \
metadata={{op_name="jit(train_step)/jit(_gamma)/while"}}
  %call.1 = f32[5]{{0}} call(%copy.1), to_apply=%command_buffer, control-predecessors={{%copy.1}}
  %gemm.9 = (f32[5]{{0}}, s8[32]{{0}}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %while.2 = (s32[], f32[5]{{0}}) while(%call.1), condition=%condition, body=%body, \
metadata={{op_name="jit(train_step)/transpose(jvp())/while"}}, \
backend_config={{"known_trip_count":{{"n":"7"}},"known_init_step":{{"init":"0","step":"1"}}}}
  ROOT %out = f32[5]{{0}} get-tuple-element(%while.2), index=1
}}

%command_buffer (p0: f32[5]) -> f32[5] {{
  %p0 = f32[5]{{0}} parameter(0)
  ROOT %loop_add.5 = f32[5]{{0}} fusion(%p0), kind=kLoop, calls=%fused_add
}}
"""
MESH = {"data": 2, "fsdp": 4}
ADD, SLICE, GEMM_LAUNCH = Launch("fusion", "XLA"), Launch("copy", "slice"), Launch("product", "Triton")


@pytest.fixture
def loops():
    return launches.read(PROGRAM, MESH)


def test_launches_per_loop(loops):
    outside, draw, backward = loops
    assert (outside.name, outside.turns) == ("outside", 1)
    cublas = Launch("product", "cuBLASLt")
    assert outside.launches == {Launch("copy", "copy"): 1, ADD: 1, cublas: 1}  # with the command buffer's
    assert (backward.name, backward.turns) == ("backward", 7)
    collectives = {Launch("collective", kind): 1 for kind in ("all-reduce", "all-gather")}
    assert backward.launches == {SLICE: 1, GEMM_LAUNCH: 1, ADD: 3, Launch("cuDNN", "fmhaSoftmax"): 1} | collectives
    assert (draw.name, draw.operation, draw.turns) == ("loop", "jit(train_step)/jit(_gamma)/while", None)
    assert draw.launches == {ADD: 1}


def test_totals_exclude_loops_of_unknown_length(loops):
    assert launches.total(loops) == 3 + 7 * 8
    assert launches.total(loops, "fusion") == 1 + 7 * 3
    assert launches.total(loops, "product", "cuDNN") == 1 + 7 * 2
    assert launches.by_name(loops, "product") == {"cuBLASLt": 1, "Triton": 7}
    assert launches.by_name(loops, "cuDNN") == {"fmhaSoftmax": 7}


def test_overlapped_launches_lie_between_start_and_done(loops):
    reduce, gather = loops[2].collectives
    assert (reduce.kind, reduce.axes, reduce.size, reduce.times) == ("all-reduce", ("fsdp",), 7 * 11 * 4, 7)
    assert reduce.between == {"product": 1, "fusion": 1}  # without the copy, and without launches after it
    # The size is that of the result, not of the operand. It has a start and a done, but with is_sync nothing overlaps.
    assert (gather.kind, gather.axes, gather.size, gather.between) == ("all-gather", ("data",), 12 * 5 * 4, {})


def test_collective_inside_a_fusion_is_recognised():
    """XLA writes collectives that have separate kernels in this form."""
    fused = (
        "%fused_all-reduce (p0: f32[7,11]) -> f32[7,11] {\n  %p0 = f32[7,11]{1,0} parameter(0)\n"
        "  ROOT %all-reduce.9 = f32[7,11]{1,0} all-reduce(%p0), replica_groups=[2,4]<=[8], to_apply=%add\n}\n\n"
    )
    start = "%all-reduce-start.1 = f32[7,11]{1,0} all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add"
    assert start in PROGRAM
    wrapped = "((f32[7,11]{1,0}), f32[7,11]{1,0}) fusion-start(%x), kind=kCustom, calls=%fused_all-reduce"
    program = PROGRAM.replace(start, f"%all-reduce-start.1 = {wrapped}").replace("all-reduce-done(", "fusion-done(")
    assert launches.read(program.replace("%body (", fused + "%body (", 1), MESH) == launches.read(PROGRAM, MESH)


def test_iterations_of_nested_loops_multiply():
    outer = PROGRAM.replace("ENTRY %main", "%inner").replace("%while.1 = (f32[1]", "%while.7 = (f32[1]") + (
        "ENTRY %step (x: f32[5]) -> f32[5] {\n  %x = f32[5]{0} parameter(0)\n"
        "  ROOT %while.3 = f32[5]{0} while(%x), condition=%condition, body=%inner, "
        'backend_config={"known_trip_count":{"n":"3"}}\n}\n'
    )
    loops = launches.read(outer, MESH)
    assert [loop.turns for loop in loops] == [1, 3, None, 21]
    assert launches.total(loops) == 3 * (3 + 7 * 8)


def test_call_does_not_run_its_control_predecessors():
    (line,) = [x for x in hlo.parse(PROGRAM).computations["main"] if x.op == "call"]
    assert hlo.computations(line) == ["command_buffer"]


@pytest.mark.parametrize(
    ("line", "launch"),
    [
        ('%c = f32[5]{0} custom-call(%x), custom_call_target="__cublas$gemm"', Launch("product", "cuBLAS")),
        ('%c = f32[5]{0} custom-call(%x), custom_call_target="__cudnn$convForward"', Launch("cuDNN", "convForward")),
        ('%c = f32[5]{0} custom-call(%x), custom_call_target="cu_threefry2x32"', Launch("other", "cu_threefry2x32")),
        ("%c = (f32[5]{0}, f32[5]{0}, u32[]) copy-start(%x)", Launch("copy", "copy")),
        ("%c = f32[5]{0} copy-done(%x)", None),
        ("%c = f32[5]{0} bitcast(%x)", None),
        ("%c = (f32[5]{0}) sort(%x), to_apply=%add", Launch("other", "sort")),
    ],
)
def test_types_of_launches(line, launch):
    program = hlo.parse(f"ENTRY %main (x: f32[5]) -> f32[5] {{\n  {line}\n}}\n")
    (result,) = program.computations["main"]
    assert launches._Reader(program, {}).launch(result) == launch
