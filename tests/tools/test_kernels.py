"""Bytes and FLOPs by kind of kernel, counted by hand in a small program."""

import dataclasses

from tools.gpu import kernels


PROGRAM = """HloModule step
%one_of_three (p2: f32[3,4,8], p3: s32[]) -> f32[4,8] {
  %p2 = f32[3,4,8]{2,1,0} parameter(0)
  %p3 = s32[] parameter(1)
  %slice = f32[1,4,8]{2,1,0} dynamic-slice(%p2, %p3), dynamic_slice_sizes={1,4,8}
  ROOT %bitcast = f32[4,8]{1,0} bitcast(%slice)
}
%body (state: (f32[3,4,8], s32[], f32[8,8], f32[4,8])) -> (f32[3,4,8], s32[], f32[8,8], f32[4,8]) {
  %state = (f32[3,4,8], s32[], f32[8,8], f32[4,8]) parameter(0)
  %stack = f32[3,4,8]{2,1,0} get-tuple-element(%state), index=0
  %turn = s32[] get-tuple-element(%state), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%state), index=2
  %layer = f32[4,8]{1,0} fusion(%stack, %turn), kind=kLoop, calls=%one_of_three
  %dot = f32[4,8]{1,0} dot(%layer, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (f32[3,4,8], s32[], f32[8,8], f32[4,8]) tuple(%stack, %turn, %w, %dot)
}
ENTRY %main (x: (f32[3,4,8], s32[], f32[8,8], f32[4,8])) -> f32[4,8] {
  %x = (f32[3,4,8], s32[], f32[8,8], f32[4,8]) parameter(0)
  %loop = (f32[3,4,8], s32[], f32[8,8], f32[4,8]) while(%x), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %last = f32[4,8]{1,0} get-tuple-element(%loop), index=3
}
"""


def test_kernels_of_a_loop_count_every_turn_and_slices_only_their_part():
    layer = "casts and copies", 128 + 4 + 128, 0, 3  # a third of the stack, the index of the turn, the layer
    product = "matmul", 128 + 256 + 128, 2 * 4 * 8 * 8, 3
    assert [dataclasses.astuple(kernel) for kernel in kernels.Program(PROGRAM).kernels()] == [layer, product]


def test_a_table_adds_kinds_and_a_kernel_takes_the_longer_of_its_times():
    some = [kernels.Kernel("matmul", int(3.35e9), 0, 2), kernels.Kernel("optimizer", 0, int(0.989e12), 1)]
    total, *kinds = kernels.tabulate("vit", some)
    assert (total["launches"], total["GB"], total["TFLOP"], total["H100: least ms"]) == (3, 6.7, 0.99, 3.0)
    assert [(row["kind"], row["H100: least ms"]) for row in kinds] == [("matmul", 2.0), ("optimizer", 1.0)]
    assert (total["H100: could save"], kinds[1]["H100: could save"]) == ("67%", "0%")
