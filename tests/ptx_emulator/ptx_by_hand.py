"""Small kernels written in PTX by hand, for tests of the emulator."""

import pytest

from ptx_emulator import ptx
from ptx_emulator.host import Launch
from ptx_emulator.machine import launch_kernel
from ptx_emulator.memory import KernelError

BARRIER = 32768

# A kernel has its thread in %r0, shared memory at %r1, its barrier at %r2; %p0 is one thread of the block.
PROLOGUE = f"""
.reg .pred %p<10>;
.reg .b16 %rs<10>;
.reg .b32 %r<200>;
.reg .b64 %rd<50>;
.shared .align 16 .b8 smem;
mov.u32 %r0, %tid.x;
mov.b64 %rd0, smem;
cvt.u32.u64 %r1, %rd0;
add.s32 %r2, %r1, {BARRIER};
elect.sync %r3|%p9, -1;
setp.lt.and.u32 %p0, %r0, 32, %p9;
"""
INIT = """
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
EXPECT = "@%p0 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r2], {};\n"
WAIT = """
{
.reg .pred done;
WAIT: mbarrier.try_wait.parity.shared.b64 done, [%r2], 0;
@done bra.uni DONE;
bra.uni WAIT;
DONE:
}
"""
FENCE = "fence.proxy.async.shared::cta;\n"
STORE = """
@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd40, {0, 0}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""


def program(body, args):
    params = ",\n".join(
        f".param .u64 .ptr .align 256 k_param_{i}"
        if isinstance(arg, int)
        else f".param .align 64 .b8 k_param_{i}[{128 * len(arg)}]"
        for i, arg in enumerate(args)
    )
    pointers = "".join(
        f"ld.param::entry.b64 %rd{40 + i}, [k_param_{i}];\n"
        if isinstance(arg, int)
        else f"mov.b64 %rd{40 + i}, k_param_{i};\ncvta.param.u64 %rd{40 + i}, %rd{40 + i};\n"
        for i, arg in enumerate(args)
    )
    return ptx.parse(f".visible .entry k(\n{params}\n)\n{{{PROLOGUE}{pointers}{body}\nret;\n}}\n")


def run(body, *arrays, threads=32, blocks=1, args=None, seed=0):
    """Runs a kernel whose parameters are the arrays, at %rd40 and on."""
    args = tuple(range(len(arrays))) if args is None else args
    launch = Launch((blocks, 1, 1), threads, BARRIER + 64, args)
    launch_kernel(program(body, args), launch, list(arrays), seed=seed)


def fails(message, body, *arrays, **options):
    """It fails with any order of events."""
    for seed in range(5):
        with pytest.raises(KernelError, match=message):
            run(body, *(array.copy() for array in arrays), seed=seed, **options)


def copy(array, num_bytes, *, to_shared, at=0, threads=32):
    """Between the array at %rd<40 + array> and shared memory, 4 bytes per thread at a time."""
    out = "mad.lo.u32 %r150, %r0, 4, %r1;\nmul.wide.u32 %rd30, %r0, 4;\n"
    out += f"add.s64 %rd30, %rd30, %rd{40 + array};\n"
    for i in range(0, num_bytes, 4 * threads):
        far, near = f"[%rd30+{i}]", f"[%r150+{at + i}]"
        load, store = ("global", far), ("shared", near)
        (source, where), (target, there) = (load, store) if to_shared else (store, load)
        out += f"ld.{source}.b32 %r151, {where};\nst.{target}.b32 {there}, %r151;\n"
    return out
