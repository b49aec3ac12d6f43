"""The emulator of PTX, on small kernels written by hand: what it computes, and what it finds.

What is expected is written from the PTX ISA, apart from the emulator's own code.
"""

import fractions
import struct

import numpy as np
import pytest

from ptx_emulator import gpu, host, ptx
from ptx_emulator.host import TensorMap
from ptx_emulator.memory import SMEM_BASE, KernelError
from ptx_emulator.ptx_by_hand import BARRIER, EXPECT, FENCE, INIT, STORE, WAIT, copy, fails, run

LANES = range(32)
RNG = np.random.default_rng(0)


def compute(instruction, out_dtype, *inputs):
    """Runs one instruction on 32 lanes: {d} is its result, {0} {1} {2} are its operands, after `before`."""
    prefix = {2: "%rs", 4: "%r1", 8: "%rd1"}
    names = [f"{prefix[x.dtype.itemsize]}{i + 1}" for i, x in enumerate(inputs)]
    out, body = np.zeros(32, out_dtype), ""
    result = f"{prefix[out.itemsize]}9"
    for i, (x, name) in enumerate(zip(inputs, names, strict=True)):
        body += f"mul.wide.u32 %rd30, %r0, {x.itemsize};\nadd.s64 %rd30, %rd30, %rd{40 + i};\n"
        body += f"ld.global.b{8 * x.itemsize} {name}, [%rd30];\n"
    body += instruction.format(*names, d=result) + f"\nmul.wide.u32 %rd30, %r0, {out.itemsize};\n"
    body += (
        f"add.s64 %rd30, %rd30, %rd{40 + len(inputs)};\nst.global.b{8 * out.itemsize} [%rd30], {result};\n"
    )
    run(body, *inputs, out)
    return out


def integers(dtype):
    """Random ones, and the ends of the range."""
    info = np.iinfo(dtype)
    ends = np.array([info.min, info.max, 0, 1], dtype)
    return RNG.permutation(np.concatenate([RNG.integers(info.min, info.max, 28, dtype, endpoint=True), ends]))


def wrapped(values, dtype):
    bits = 8 * np.dtype(dtype).itemsize
    return np.array([v % (1 << bits) for v in values], f"u{bits // 8}").view(dtype)


OF_INTEGERS = {
    "add.{t}": lambda x, y, bits: x + y,
    "sub.{t}": lambda x, y, bits: x - y,
    "mul.lo.{t}": lambda x, y, bits: x * y,
    "mul.hi.{t}": lambda x, y, bits: x * y >> bits,
    "min.{t}": lambda x, y, bits: min(x, y),
    "max.{t}": lambda x, y, bits: max(x, y),
    "xor.b{bits}": lambda x, y, bits: x ^ y,
    "and.b{bits}": lambda x, y, bits: x & y,
    "or.b{bits}": lambda x, y, bits: x | y,
}


@pytest.mark.parametrize("t", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers(t):
    bits = int(t[1:])
    dtype = np.dtype(f"{t[0].replace('s', 'i')}{bits // 8}")
    x, y, z = (integers(dtype) for _ in range(3))
    for name, expected in OF_INTEGERS.items():
        got = compute(name.format(t=t, bits=bits) + " {d}, {0}, {1};", dtype, x, y)
        want = [expected(int(a), int(b), bits) for a, b in zip(x, y, strict=True)]
        np.testing.assert_array_equal(got, wrapped(want, dtype), name)
    got = compute(f"mad.lo.{t} {{d}}, {{0}}, {{1}}, {{2}};", dtype, x, y, z)
    triples = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    np.testing.assert_array_equal(got, wrapped([a * b + c for a, b, c in triples], dtype))
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{bits // 4}")
        got = compute(f"mul.wide.{t} {{d}}, {{0}}, {{1}};", wide, x, y)
        np.testing.assert_array_equal(got, [int(a) * int(b) for a, b in zip(x, y, strict=True)])
    counts = np.concatenate([RNG.integers(0, bits, 28), [bits - 1, bits, bits + 1, 2**32 - 1]]).astype(
        np.uint32
    )
    pairs = list(zip(x.tolist(), counts.tolist(), strict=True))
    got = compute(f"shl.b{bits} {{d}}, {{0}}, {{1}};", dtype, x, counts)
    np.testing.assert_array_equal(got, wrapped([a << b if b < bits else 0 for a, b in pairs], dtype))
    got = compute(f"shr.{t} {{d}}, {{0}}, {{1}};", dtype, x, counts)
    np.testing.assert_array_equal(got, [a >> min(b, bits) for a, b in pairs])


def test_floats():
    x, y, z = RNG.normal(size=(3, 32)).astype(np.float32)
    exact = [[fractions.Fraction(float(v)) for v in values] for values in (x, y, z)]
    for name, function in {
        "add.f32 {d}, {0}, {1};": lambda a, b, c: a + b,
        "sub.rn.f32 {d}, {0}, {1};": lambda a, b, c: a - b,
        "mul.f32 {d}, {0}, {1};": lambda a, b, c: a * b,
        "fma.rn.f32 {d}, {0}, {1}, {2};": lambda a, b, c: a * b + c,
        "div.full.f32 {d}, {0}, {1};": lambda a, b, c: a / b,
        "rcp.approx.f32 {d}, {1};": lambda a, b, c: 1 / b,
    }.items():
        want = [np.float32(float(function(*v))) for v in zip(*exact, strict=True)]
        np.testing.assert_array_equal(compute(name, np.float32, x, y, z), np.array(want), name)
    np.testing.assert_allclose(compute("ex2.approx.ftz.f32 {d}, {0};", np.float32, x), 2.0**x, 1e-6)
    assert not compute("ex2.approx.ftz.f32 {d}, {0};", np.float32, x - 140).any()
    tanh = compute("tanh.approx.f32 {d}, {0};", np.float32, x)
    np.testing.assert_allclose(tanh, np.tanh(x), 2.0**-10)
    assert (tanh != np.tanh(x)).all()


def test_conversions():
    x = np.concatenate([RNG.normal(size=28) * 100, [1 + 2**-8, 1 + 3 * 2**-8, np.inf, 0]]).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)  # ties to even
    np.testing.assert_array_equal(compute("cvt.rn.bf16.f32 {d}, {0};", np.uint16, x), nearest)
    packed = compute("cvt.rn.bf16x2.f32 {d}, {0}, {1};", np.uint32, x[::-1].copy(), x)
    np.testing.assert_array_equal(packed, nearest + (nearest[::-1].astype(np.uint32) << 16))
    halves = [struct.unpack("<H", struct.pack("<e", v))[0] for v in x]
    np.testing.assert_array_equal(compute("cvt.rn.f16.f32 {d}, {0};", np.uint16, x), halves)
    n = integers(np.int32)
    np.testing.assert_array_equal(compute("cvt.s64.s32 {d}, {0};", np.int64, n), n)
    np.testing.assert_array_equal(compute("cvt.u64.u32 {d}, {0};", np.uint64, n), n.view(np.uint32))
    np.testing.assert_array_equal(compute("cvt.rn.f32.s32 {d}, {0};", np.float32, n), n.astype(np.float32))
    halves = compute(
        "mov.b64 {{%r10, %r20}}, {0};\nmov.b64 {d}, {{%r20, %r10}};", np.uint64, n.astype(np.uint64)
    )
    np.testing.assert_array_equal(halves, n.astype(np.uint64) >> 32 | n.astype(np.uint64) << 32)


def test_bytes():
    x, y = integers(np.uint32), integers(np.uint32)
    both = [int(a) | int(b) << 32 for a, b in zip(x, y, strict=True)]
    for selector in (0x7770, 0x9991, 0xF4C2):
        want = []
        for word in both:
            picked = [word >> 8 * (digit & 7) & 255 for digit in (selector >> 4 * i & 15 for i in range(4))]
            signs = [selector >> 4 * i & 8 for i in range(4)]
            found = [(byte >> 7) * 255 if s else byte for byte, s in zip(picked, signs, strict=True)]
            want.append(int.from_bytes(bytes(found), "little"))
        got = compute(f"prmt.b32 {{d}}, {{0}}, {{1}}, {selector:#x}U;", np.uint32, x, y)
        np.testing.assert_array_equal(got, want)
    got = compute("cvt.s8.s32 {d}, {0};", np.int16, x.view(np.int32))
    np.testing.assert_array_equal(got, x.astype(np.uint8).view(np.int8))
    halves = RNG.normal(size=32).astype(np.float16)
    halves[:3] = 6e-8, np.inf, -0.0
    got = compute("cvt.f32.f16 {d}, {0};", np.float32, halves)
    np.testing.assert_array_equal(got, halves.astype(np.float32))


def test_comparisons_and_nan():
    x, y = np.repeat(np.float32([0, 1, np.nan, -1]), 8), np.tile(np.float32([0, 1, np.nan, -1]), 8)
    is_nan = np.isnan(x) | np.isnan(y)
    for name, want in {
        "lt": x < y, "eq": x == y, "ge": x >= y,
        "ne": (x != y) & ~is_nan, "neu": x != y, "ltu": (x < y) | is_nan,
    }.items():  # fmt: skip
        got = compute(f"setp.{name}.f32 %p1, {{0}}, {{1}};\nselp.b32 {{d}}, 7, 9, %p1;", np.uint32, x, y)
        np.testing.assert_array_equal(got, np.where(want, 7, 9), name)
    other = np.where(np.isnan(x), y, x)
    got = compute("max.f32 {d}, {0}, {1};", np.float32, x, y)
    np.testing.assert_array_equal(got, np.where(other > y, other, np.where(np.isnan(y), other, y)))
    got = compute("max.NaN.f32 {d}, {0}, {1};", np.float32, x, y)
    np.testing.assert_array_equal(np.isnan(got), is_nan)


def test_guards_and_shuffles():
    x, y = integers(np.int32), integers(np.int32)
    guarded = (
        "setp.lt.s32 %p1, {0}, {1};\nmov.b32 {d}, {0};\n@%p1 mov.b32 {d}, {1};\n@!%p1 add.s32 {d}, {d}, 1;"
    )
    np.testing.assert_array_equal(compute(guarded, np.int32, x, y), np.where(x < y, y, x + np.int32(1)))
    np.testing.assert_array_equal(
        compute("shfl.sync.bfly.b32 {d}, {0}, 5, 31, -1;", np.int32, x), [x[lane ^ 5] for lane in LANES]
    )
    np.testing.assert_array_equal(compute("shfl.sync.idx.b32 {d}, {0}, 3, 31, -1;", np.int32, x), [x[3]] * 32)


def test_vectors():
    array, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    run(
        "mul.wide.u32 %rd1, %r0, 16;\nadd.s64 %rd2, %rd1, %rd40;\nadd.s64 %rd3, %rd1, %rd41;\n"
        "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd2];\nst.global.v2.b32 [%rd3+8], {%r10, %r13};",
        array, out,
    )  # fmt: skip
    want = [v for i in range(0, 128, 4) for v in (0, 0, i, i + 3)]
    np.testing.assert_array_equal(out, want)


def test_loads_into_wider_registers():
    x, out = integers(np.int32), np.zeros((2, 32), np.int64)
    address = "mul.wide.u32 %rd1, %r0, {};\nadd.s64 %rd{}, %rd1, %rd{};\n"
    body = address.format(4, 2, 40) + address.format(8, 3, 41)
    for i, kind in enumerate("su"):
        body += f"ld.global.{kind}32 %rd4, [%rd2];\nst.global.b64 [%rd3+{256 * i}], %rd4;\n"
    run(body, x, out)
    np.testing.assert_array_equal(out, [x, x.view(np.uint32)])


def test_blocks_that_share_an_element():
    arrays = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    own = "mov.u32 %r10, %ctaid.x;\nmul.wide.u32 %rd1, %r10, 128;\nmul.wide.u32 %rd2, %r0, 4;\n"
    own += "add.s64 %rd1, %rd1, %rd2;\nadd.s64 %rd1, %rd1, %rd40;\nadd.s64 %rd2, %rd2, %rd41;\n"
    write, read = "st.global.b32 [{}], %r0;\n", "ld.global.b32 %r11, [{}];\n"
    for body in (write.format("%rd1"), read.format("%rd2"), write.format("%rd1") + read.format("%rd2")):
        run(own + body, *arrays, blocks=2)
    for body in (write.format("%rd2"), read.format("%rd2") + write.format("%rd2")):
        fails("used by another block", own + body, *arrays, blocks=2)
    one_reads = own + "setp.eq.u32 %p1, %r10, {};\n@%p1 ld.global.b32 %r11, [%rd40];\n"
    one_reads += "@!%p1 st.global.b32 [%rd40], 0;"
    fails("used by another block", one_reads.format(0), *arrays, blocks=2)
    fails("used by another block", one_reads.format(1), *arrays, blocks=2)


def test_accesses_out_of_bounds():
    array = np.zeros(32, np.uint32)
    address = "mul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd1, %rd40;\n"
    run(address + "ld.global.b32 %r10, [%rd2];", array)
    fails("bytes 4 to 132", address + "ld.global.b32 %r10, [%rd2+4];", array)
    fails("bytes 4 to 132", address + "st.global.b32 [%rd2+4], 0;", array)
    fails("misaligned", address + "ld.global.v2.b32 {%r10, %r11}, [%rd2];", np.zeros(64, np.uint32))
    fails("misaligned", "ld.shared.b32 %r10, [%r1+2];")
    fails("shared memory at", f"ld.shared.b32 %r10, [%r1+{BARRIER + 64}];")
    fails("no address", "ld.global.b32 %r10, [%r1];")
    fails("no array", "ld.global.b32 %r10, [%rd40+2000000000000];", array)
    fails("different values", "st.global.b32 [%rd40], %r0;", array)


WRITE_THEN_READ = """
setp.lt.u32 %p1, %r0, 32;
@%p1 bra WRITE;
{}
ld.shared.b32 %r10, [%r1];
bra END;
WRITE:
st.shared.b32 [%r1], 1;
{}
END:
"""


def test_a_race_of_two_warps():
    run(WRITE_THEN_READ.format("bar.sync 1, 64;", "bar.sync 1, 64;"), threads=64)
    fails("race", WRITE_THEN_READ.format("", ""), threads=64)  # a read that comes first is found by the write
    fails("race", WRITE_THEN_READ.format("bar.sync 1, 32;", "bar.sync 2, 32;"), threads=64)


def test_an_mbarrier_orders():
    arrive = "@%p0 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2], 1;"
    run(INIT + WRITE_THEN_READ.format(WAIT, arrive), threads=64)
    half, other_phase = INIT.replace("[%r2], 1;", "[%r2], 2;"), WAIT.replace("[%r2], 0;", "[%r2], 1;")
    fails("race", half + WRITE_THEN_READ.format(other_phase, arrive), threads=64)  # that phase is over
    late = WRITE_THEN_READ.replace("st.shared.b32 [%r1], 1;\n{}", "{}\nst.shared.b32 [%r1], 1;")
    fails("race", INIT + late.format(WAIT, arrive), threads=64)
    fails("no barrier was made|race", INIT.replace("bar.sync 0;", WAIT), threads=64)
    fails("more arrivals", INIT + arrive.replace("1;", "2;"))


def test_deadlocks():
    fails("deadlock: warp 0 at line 42: mbarrier.try_wait", INIT + ".loc 1 42 0\n" + WAIT)
    fails("deadlock: warp 0 at line 7: bar.sync", ".loc 1 7 0\nbar.sync 1, 64;\n.loc 1 8 0\n")
    fails("64 threads at barrier 1, and 96|96 threads at barrier 1, and 64", WRITE_THEN_READ.format(
        "bar.sync 1, 64;", "bar.sync 1, 96;"), threads=64)  # fmt: skip


def test_divergence_and_what_is_not_known():
    fails("different branches", "setp.lt.u32 %p1, %r0, 5;\n@%p1 bra END;\nEND:")
    for text in ("popc.b32 %r1, %r1;", "add.sat.s32 %r1, %r1, %r1;", "cvt.rz.f32.s32 %r1, %r1;"):
        with pytest.raises(ValueError, match=text.split()[0]):
            run(text)
    with pytest.raises(ValueError, match="is not known"):
        run("cp.async.bulk.prefetch.L2.global [%rd0], 16;")


def tma_kernel(y, x, num_bytes, *, wait=WAIT, init=INIT):
    load = "@%p0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    load += f" [%r1], [%rd40, {{{x}, {y}}}], [%r2];\n"
    return init + EXPECT.format(num_bytes) + load + wait + copy(1, num_bytes, to_shared=False)


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
def test_tma_load(swizzle):
    """The number of a 16-byte chunk in its line of 128 bytes is flipped by the line's, in as many bits."""
    array, columns = RNG.integers(0, 2**16, (32, 256)).astype(np.uint16), max(32, swizzle) // 2
    tensor = TensorMap(0, (32, 256), (256, 1), swizzle, (16, columns))
    num_bytes = 16 * columns * 2
    out = np.zeros(num_bytes, np.uint8)
    run(tma_kernel(8, 64, num_bytes), array, out, args=((tensor,), 1))
    tile = np.ascontiguousarray(array[8:24, 64 : 64 + columns]).reshape(-1).view(np.uint8)
    want = np.zeros_like(out)
    for offset in range(0, num_bytes, 16):
        chunk, line = offset // 16 % 8, (SMEM_BASE + offset) // 128 % 8
        chunk ^= {16: 0, 32: line & 1, 64: line & 3, 128: line}[swizzle]
        there = offset // 128 * 128 + chunk * 16
        want[there : there + 16] = tile[offset : offset + 16]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(("y", "x"), [(-3, 0), (5, 24), (30, 0), (5, -8), (5, 300), (-100, 5)])
def test_tma_fills_with_zeros(y, x):
    array, out = np.ones((32, 32), np.uint16), np.full((16, 32), 7, np.uint16)
    tensor = TensorMap(0, (32, 32), (32, 1), 16, (16, 32))
    run(tma_kernel(y, x, 1024), array, out, args=((tensor,), 1))
    ys, xs = np.arange(y, y + 16)[:, None], np.arange(x, x + 32)
    np.testing.assert_array_equal(out, (ys >= 0) & (ys < 32) & (xs >= 0) & (xs < 32))


def test_tma_mistakes():
    arrays = np.ones((32, 32), np.uint16), np.zeros(1024, np.uint8)
    tensor = TensorMap(0, (32, 32), (32, 1), 64, (16, 32))
    options = {"args": ((tensor,), 1)}
    fails("race: a load reads .* a TMA load wrote", tma_kernel(0, 0, 1024, wait=""), *arrays, **options)
    fails("deadlock", tma_kernel(0, 0, 1040), *arrays, **options)
    unfenced = INIT.replace("fence.mbarrier_init.release.cluster;", "")
    fails("without fence.mbarrier_init", tma_kernel(0, 0, 1024, init=unfenced), *arrays, **options)
    alone = tma_kernel(0, 0, 1024, wait="ret;\n")
    fails("nobody waited for a TMA load", alone, *arrays, **options)
    over = "st.shared.b32 [%r1], 1;\n"
    fails("without fence.proxy.async", INIT + over + tma_kernel(0, 0, 1024, init=""), *arrays, **options)
    run(INIT + over + FENCE + tma_kernel(0, 0, 1024, init=""), *arrays, **options)
    for wrong in ({"strides": (31, 1)}, {"box": (16, 16)}, {"box": (512, 32)}, {"swizzle": 32}):
        values = {"sizes": (32, 32), "strides": (32, 1), "swizzle": 64, "box": (16, 32)} | wrong
        fails(
            "not a tensor map|reaches", tma_kernel(0, 0, 1024), *arrays, args=((TensorMap(0, **values),), 1)
        )


def cp_async(offset):
    return (
        f"mad.lo.u32 %r20, %r0, 16, %r1;\nadd.s32 %r20, %r20, {offset};\nmul.wide.u32 %rd20, %r0, 16;\n"
        f"add.s64 %rd20, %rd20, %rd40;\ncp.async.cg.shared.global [%r20], [%rd20+{offset}], 16;\n"
        "cp.async.commit_group;\n"
    )


def test_cp_async():
    array, out = integers(np.int32).repeat(8).view(np.uint8), np.zeros(1024, np.uint8)
    both, read = cp_async(0) + cp_async(512), copy(1, 512, to_shared=False)
    run(both + "cp.async.wait_group 1;\n" + read + "cp.async.wait_group 0;", array, out)
    np.testing.assert_array_equal(out[:512], array[:512])
    wait_for_one = "cp.async.wait_group 1;\n"
    fails("cp.async of warp 0 wrote", both + read, array, out)
    fails("cp.async of warp 0 wrote", both + wait_for_one + copy(1, 1024, to_shared=False), array, out)
    fails("cp.async of warp 0 wrote", cp_async(0) + cp_async(0) + "cp.async.wait_group 0;", array)
    fails("in flight", both + wait_for_one, array)


def test_tma_store_needs_a_fence():
    array, out = RNG.integers(0, 2**16, (16, 16)).astype(np.uint16), np.zeros((16, 32), np.uint16)
    tensor = TensorMap(1, (16, 32), (32, 1), 16, (16, 16))
    fill = copy(0, 512, to_shared=True, threads=64).replace("%rd40", "%rd41")
    options = {"args": ((tensor,), 0), "threads": 64}
    good = fill + FENCE + "bar.sync 0;\n" + STORE
    run(good, array, out, **options)
    np.testing.assert_array_equal(out, np.concatenate([array, np.zeros_like(array)], 1))
    fails("without fence.proxy.async", fill + "bar.sync 0;\n" + STORE, array, out, **options)
    fails("race", fill + FENCE + STORE, array, out, **options)
    fails("without fence.proxy.async", fill + "bar.sync 0;\n" + FENCE + STORE, array, out, **options)
    again = (
        STORE.replace("cp.async.bulk.wait_group 0;", "")
        + "@%p0 st.shared.b32 [%r1], 0;\ncp.async.bulk.wait_group 0;"
    )
    fails("a TMA store of warp 0 may still read", good.replace(STORE, again), array, out, **options)


def test_programs_are_parsed():
    text = """//
.visible .entry k(
	.param .u64 .ptr .align 256 k_param_0,
	.param .align 64 .b8 k_param_1[256]
)
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<3>;
$L__func_begin0:
	.loc	1 12 3
	@!%p1 bra 	$L__BB0_1; // a comment
	{
.reg .pred P1;
LAB: setp.eq.u32 P1, %r1, %r2; @P1 bra LAB;
}
	{ .reg .pred P1; mov.b32 {%r1, %r2}, %rd1; }
$L__BB0_1:
	ret;
}
	.section .debug { .b8 1; }
"""
    made = ptx.parse(text)
    assert made.params == {"k_param_0": 8, "k_param_1": 256}
    assert set(made.registers) >= {"%p0", "%p1", "%r0", "%r1", "%r2"}
    first, compare, again, move, last = made.instructions
    assert (first.opcode, first.guard, first.location) == (("bra",), ("%p1", False), "line 12")
    assert made.labels[first.operands[0]] == 4
    assert made.labels[again.operands[0]] == 1
    assert again.guard == (compare.operands[0], True)
    assert move.operands == ("{%r1, %r2}", "%rd1")
    assert last.opcode == ("ret",)


def test_a_launch_is_parsed():
    constants = {
        "one": 1,
        "seven": 7,
        "two": 2,
        "n": 64,
        "w": 16,
        "line": 256,
        "bytes": 4096,
        "z": 0,
        "sw": 32,
    }
    lines = [f"    %{name} = llvm.mlir.constant({value} : i64) : i64" for name, value in constants.items()]
    for number in range(2):
        lines.append(
            f"    %at{number} = llvm.getelementptr %all[{number}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr"
        )
        lines.append(f"    %array{number} = llvm.load %at{number} : !llvm.ptr -> !llvm.ptr")
    lines.append("    %maps = llvm.alloca %one x !llvm.array<128 x i8> : (i64) -> !llvm.ptr")
    tables = {"sizes": ("%n", "%line"), "strides": ("%line", "%one"), "box": ("%two", "%w")}
    for name, values in tables.items():
        lines.append(f"    %{name} = memref.alloca() : memref<2xi64>")
        for i, value in zip(("%z", "%one"), values, strict=True):
            lines.append(f"    memref.store {value}, %{name}[{i}] : memref<2xi64>")
    lines += [
        "    call @mosaic_gpu_init_tma_desc(%maps, %array1, %seven, %two, %sizes, %strides, %sw, %box)",
        "    gpu.launch_func <%stream : !llvm.ptr> @k::@k blocks in (%n, %two, %one)"
        " threads in (%line, %one, %one) : i64 dynamic_shared_memory_size %bytes"
        " args(%array0 : !llvm.ptr, %maps : !llvm.array<128 x i8>)",
    ]
    head = "// IR Dump Before GpuLaunchLoweringPass\n"
    head += "  func.func @k_host(%stream: !llvm.ptr, %all: !llvm.ptr) {\n"
    launch = host.parse("something else\n" + head + "\n".join(lines))
    assert (launch.grid, launch.threads, launch.smem_bytes) == ((64, 2, 1), 256, 4096)
    assert launch.args == (0, (TensorMap(1, (64, 256), (256, 1), 32, (2, 16)),))


def test_limits_of_a_launch():
    config = (gpu.TARGETS / "h100.txtpb").read_text()
    host.check(host.Launch((2**31 - 1, 65535, 65535), 1024, 232448, ()), config)
    for grid, threads, smem_bytes, limit in (
        ((1, 1, 1), 128, 232449, "232449 of shared_memory_per_block_optin"),
        ((1, 65536, 1), 128, 0, "65536 of block_dim_limit_y"),
        ((1, 1, 1), 1056, 0, "1056 of threads_per_block_limit"),
    ):
        with pytest.raises(KernelError, match=limit):
            host.check(host.Launch(grid, threads, smem_bytes, ()), config)
