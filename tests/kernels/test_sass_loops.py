"""What `make kernels-compile` counts in the inner loops of machine code, on listings written by hand."""

import json
import textwrap

import kernels_compile
import pytest
import sass_loops
from kernels_compile import worse_loops
from sass_loops import Loop

# A loop with a conditional part, which the longest way takes, a wait whose polling lies behind the end of the
# kernel, and a loop that is itself a wait; a function that is not called lies before it.
LISTING = """
    .text.another:
    .L_a:
       -:-:-:Y:05        /*0000*/                   BRA `(.L_a)
    .text.kernel:
       -:-:0:Y:02        /*0000*/                   LDG.E R0, [R2.64]
    .L_loop:
       0:-:-:Y:04        /*0010*/                   IADD3 R0, R0, 0x1, RZ
       -:-:-:Y:05        /*0020*/               @P1 BRA `(.L_rest)
       -:-:1:Y:01        /*0030*/                   LDS R4, [R5]
       -:-:-:Y:01        /*0040*/              @!PT LDS RZ, [RZ]
       1:-:-:Y:02        /*0050*/                   HMMA.16816.F32 R8, R4, R6, R8
    .L_rest:
       -:-:2:Y:01        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R3
       2:-:-:Y:05        /*0070*/              @!P2 BRA `(.L_poll)
    .L_back:
       -:-:-:Y:06        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80
       -:-:-:Y:05        /*0090*/               @P0 BRA `(.L_loop)
       -:-:-:Y:05        /*00a0*/                   EXIT
    .L_poll:
       -:-:2:Y:01        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R3
       2:-:-:Y:05        /*00c0*/              @!P2 BRA `(.L_poll)
       -:-:-:Y:05        /*00d0*/                   BRA `(.L_back)
"""


def loops(tmp_path, listing):
    path = tmp_path / "kernel.sass_ctrl"
    path.write_text(textwrap.dedent(listing))
    return [loop for loop in sass_loops.read_loops(path) if loop.barriers]


def test_the_longest_way_around_a_loop(tmp_path):
    # Stalls of 4 + 5 + 1 + 1 + 2 + 1 + 5 + 5 cycles and a barrier of 20; waits for LDS and SYNCS of 30 cycles
    # each, of which 2 and 1 have gone when they begin.
    assert loops(tmp_path, LISTING) == [Loop(9, barriers=1, waits=1, memory=1, tensor=1, cycles=44 + 28 + 29)]


def test_a_conditional_part_that_jumps_back_to_the_head_is_no_loop_of_its_own(tmp_path):
    listing = LISTING.replace("@P1 BRA `(.L_rest)", "@P1 BRA `(.L_loop)")
    assert [loop.instructions for loop in loops(tmp_path, listing)] == [9]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ([[105, 5, 1, 1, 1, 105]], None),
        ([[106, 5, 1, 1, 1, 100]], "loop 0 of k has 106 instructions, accepted are 100"),
        ([[100, 6, 1, 1, 1, 100]], "loop 0 of k has 6 barriers, accepted are 5"),
        ([[1, 1, 1, 1, 1, 1]] * 2, "k has 2 inner loops, accepted are 1"),
    ],
)
def test_a_loop_that_gets_worse_fails(new, message):
    keys = ("instructions", "barriers", "waits", "memory", "tensor", "cycles")
    found = {"k": [dict(zip(keys, loop, strict=True)) for loop in new]}
    assert worse_loops(found, {"k": [[100, 5, 1, 1, 1, 100]]}) == ([message] if message else [])
    assert worse_loops({}, {"k": []}) == ["k has other loops than accepted"]
    assert worse_loops(found, None) == ["its loops were never accepted (ARGS=--accept)"]


def test_loops_of_every_kernel_are_accepted() -> None:
    """A kernel whose loops nobody has looked at would fail `make kernels-compile`, which needs 4.5 GB."""
    accepted = json.loads(kernels_compile.ACCEPTED.read_text(encoding="utf-8"))["loops"]
    kernels = [
        check for check in kernels_compile.all_checks() if not isinstance(check, kernels_compile.StepCheck)
    ]
    assert {str(check) for check in kernels if check.op not in ("write_kv", "copy_blocks")} <= set(accepted)
