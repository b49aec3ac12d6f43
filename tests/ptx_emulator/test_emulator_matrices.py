"""The emulator's matrix instructions, with fragments written out from the PTX ISA's figures."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from ptx_emulator.memory import SMEM_BASE
from ptx_emulator.ptx_by_hand import FENCE, copy, fails, run

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(0)


def load_fragments(array, registers):
    """Register i of each thread is a word of array [i, threads]."""
    out = "mul.wide.u32 %rd31, %r0, 4;\nmov.u32 %r160, %ntid.x;\nmul.wide.u32 %rd32, %r160, 4;\n"
    out += f"add.s64 %rd31, %rd31, %rd{40 + array};\n"
    return out + "".join(f"ld.global.b32 {r}, [%rd31];\nadd.s64 %rd31, %rd31, %rd32;\n" for r in registers)


def store_fragments(array, registers):
    text = load_fragments(array, registers).replace("ld.global.b32", "st.global.b32")
    for r in registers:
        text = text.replace(f"st.global.b32 {r}, [%rd31];", f"st.global.b32 [%rd31], {r};")
    return text


def names(first, count):
    return [f"%r{first + i}" for i in range(count)]


def vector(registers):
    return "{" + ", ".join(registers) + "}"


def load_addresses(array):
    """%r161 of each lane: base plus int32 [32]."""
    return load_fragments(array, ["%r161"]) + "add.s32 %r161, %r161, %r1;\n"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count, trans):
    matrices = RNG.integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
    rows = RNG.permutation(32)[: 8 * count]  # where each row lies, in units of 16 bytes
    shared = np.zeros((32, 8), np.uint16)
    shared[rows] = matrices.reshape(-1, 8)
    addresses = np.zeros(32, np.int32)
    addresses[: 8 * count] = rows * 16
    fragments = np.zeros((count, 32, 2), np.uint16)
    for i, lane, half in itertools.product(range(count), range(32), range(2)):
        row, column = lane // 4, lane % 4 * 2 + half
        fragments[i, lane, half] = matrices[i, column, row] if trans else matrices[i, row, column]

    registers, got = names(10, count), np.zeros((count, 32), np.uint32)
    kind = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
    body = (
        copy(0, 512, to_shared=True) + load_addresses(1) + f"ldmatrix.{kind} {vector(registers)}, [%r161];\n"
    )
    run(body + store_fragments(2, registers), shared, addresses, got)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(fragments.shape), fragments)

    back = np.zeros((32, 8), np.uint16)
    body = copy(3, 512, to_shared=True) + load_addresses(1) + load_fragments(0, registers)
    body += f"stmatrix.{kind} [%r161], {vector(registers)};\n" + copy(2, 512, to_shared=False)
    run(body, fragments, addresses, back, np.zeros(512, np.uint8))
    np.testing.assert_array_equal(back, shared)


def left_fragment(matrix):
    """uint32 [4, 32] of a matrix [16, 16]: rows g and g + 8, then the same of the columns from 8 on."""
    out = np.zeros((4, 32, 2), np.uint16)
    for lane, half in itertools.product(range(32), range(2)):
        group, column = lane // 4, lane % 4 * 2 + half
        places = [(group, column), (group + 8, column), (group, column + 8), (group + 8, column + 8)]
        for i, place in enumerate(places):
            out[i, lane, half] = matrix[place].view(np.uint16)
    return out.view(np.uint32)[..., 0]


def accumulator_of(registers):
    """Matrix [16, N] of a warp's registers [N / 2, 32]."""
    out = np.zeros((16, 2 * len(registers)), np.float32)
    for i, lane in itertools.product(range(len(registers)), range(32)):
        row = lane // 4 if i % 4 < 2 else lane // 4 + 8
        out[row, i // 4 * 8 + lane % 4 * 2 + i % 2] = registers[i, lane]
    return out


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("f16", np.float16)])
def test_mma(name, dtype):
    a, b = RNG.normal(size=(16, 16)).astype(dtype), RNG.normal(size=(16, 8)).astype(dtype)
    c, d = RNG.normal(size=(4, 32)).astype(np.float32), np.zeros((4, 32), np.float32)
    right = np.zeros((2, 32, 2), np.uint16)
    for i, lane, half in itertools.product(range(2), range(32), range(2)):
        right[i, lane, half] = b[lane % 4 * 2 + half + 8 * i, lane // 4].view(np.uint16)
    body = load_fragments(0, names(10, 4)) + load_fragments(1, names(20, 2)) + load_fragments(2, names(30, 4))
    body += f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {vector(names(40, 4))}, "
    body += f"{vector(names(10, 4))}, {vector(names(20, 2))}, {vector(names(30, 4))};\n"
    run(body + store_fragments(3, names(40, 4)), left_fragment(a), right, c, d)
    want = a.astype(np.float64) @ b.astype(np.float64) + accumulator_of(c)
    np.testing.assert_allclose(accumulator_of(d), want, atol=1e-5)


def tiled(matrix, swizzle, *, is_last_k):
    """Bytes of a matrix [rows, k] as wgmma reads it, and its leading and stride offsets.

    Where k is last, an atom is 8 rows of as many bytes as the swizzle has; atoms follow in rows. Else it is 8
    k's of so many bytes of rows; atoms follow in k, and then in rows.
    """
    width = swizzle // 2
    count, depth = matrix.shape
    data = np.zeros(count * depth, BF16)
    for row, k in np.ndindex(count, depth):
        if is_last_k:
            assert depth == width
            atom, line, column = row // 8, row % 8, k
        else:
            atom, line, column = row // width * (depth // 8) + k // 8, k % 8, row % width
        address = SMEM_BASE + (atom * 8 + line) * swizzle + column * 2
        chunk, number = address // 16 % 8, address // 128 % 8
        chunk ^= {32: number & 1, 64: number & 3, 128: number}[swizzle]
        data[(address // 128 * 128 + chunk * 16 + address % 16 - SMEM_BASE) // 2] = matrix[row, k]
    return data, 0 if is_last_k else depth * swizzle, 8 * swizzle


def descriptor(offset, leading, stride, swizzle):
    layout = {128: 1, 64: 2, 32: 3}[swizzle]
    start = SMEM_BASE + offset
    return start // 16 | leading // 16 << 16 | stride // 16 << 32 | layout << 62


def wgmma(a, b, *, adds, transposed_a=False, transposed_b=False):
    """One product of 64 x 64 x 16; the left operand is a descriptor or registers."""
    flags = ["1", "1", *([] if isinstance(a, list) else [str(int(transposed_a))]), str(int(transposed_b))]
    left = vector(a) if isinstance(a, list) else "%rd1"
    out = "" if isinstance(a, list) else f"mov.b64 %rd1, {a};\n"
    out += f"mov.b64 %rd2, {b};\n{{ .reg .pred p; setp.ne.b32 p, {int(adds)}, 0;\n"
    out += "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
    return out + f"{vector(names(50, 32))}, {left}, %rd2, p, {', '.join(flags)}; }}\n"


WAIT_GROUP = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
SHARE = FENCE + "bar.sync 0;\nwgmma.fence.sync.aligned;\n"


def fill(num_left, num_right):
    left = copy(0, num_left, to_shared=True, threads=128)
    return left + copy(1, num_right, to_shared=True, at=num_left, threads=128)


def operands(k):
    return RNG.normal(size=(2, 64, k)).astype(BF16)


def check(out, a, b):
    got = np.concatenate([accumulator_of(out[:, warp * 32 : warp * 32 + 32]) for warp in range(4)])
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-4)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_wgmma_k_major(swizzle):
    """All k of an atom, 32 bytes of it at a time; the second product is added to the first."""
    a, b = operands(swizzle // 2)
    (left, *offsets), (right, *_) = tiled(a, swizzle, is_last_k=True), tiled(b, swizzle, is_last_k=True)
    body = fill(left.nbytes, right.nbytes) + SHARE
    for step in range(swizzle // 32):
        starts = (descriptor(at + 32 * step, *offsets, swizzle) for at in (0, left.nbytes))
        body += wgmma(*starts, adds=step > 0)
    out = np.zeros((32, 128), np.float32)
    run(body + WAIT_GROUP + store_fragments(2, names(50, 32)), left, right, out, threads=128)
    check(out, a, b)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_wgmma_transposed(swizzle):
    a, b = operands(16)
    (left, *offsets), (right, *_) = tiled(a, swizzle, is_last_k=False), tiled(b, swizzle, is_last_k=False)
    starts = (descriptor(at, *offsets, swizzle) for at in (0, left.nbytes))
    body = (
        fill(left.nbytes, right.nbytes)
        + SHARE
        + wgmma(*starts, adds=False, transposed_a=True, transposed_b=True)
    )
    out = np.zeros((32, 128), np.float32)
    run(body + WAIT_GROUP + store_fragments(2, names(50, 32)), left, right, out, threads=128)
    check(out, a, b)


def from_registers(end, *, share=SHARE, adds=False):
    """Its left operand is in registers; `end` comes after the product."""
    a, b = operands(16)
    right, *offsets = tiled(b, 32, is_last_k=True)
    fragments = np.concatenate([left_fragment(rows) for rows in np.split(a, 4)], axis=1)
    body = load_fragments(0, names(10, 4)) + copy(1, right.nbytes, to_shared=True, threads=128) + share
    body += wgmma(names(10, 4), descriptor(0, *offsets, 32), adds=adds) + end
    return body, (np.ascontiguousarray(fragments), right), (a, b)


@pytest.mark.parametrize("adds", [False, True])
def test_wgmma_from_registers(adds):
    end = WAIT_GROUP + store_fragments(2, names(50, 32))
    body, arrays, (a, b) = from_registers(end, share=load_fragments(2, names(50, 32)) + SHARE, adds=adds)
    first = RNG.normal(size=(32, 128)).astype(np.float32)
    out = first.copy()
    run(body, *arrays, out, threads=128)
    check(out - first * adds, a, b)


def test_wgmma_mistakes():
    store, out = store_fragments(2, names(50, 32)), np.zeros((32, 128), np.float32)
    body, arrays, _ = from_registers(store + WAIT_GROUP)
    run(body, *arrays, out, threads=128)
    assert np.isnan(out).all()

    body, arrays, _ = from_registers(WAIT_GROUP, share=SHARE.replace(FENCE, ""))
    fails("wgmma reads what threads wrote, without fence.proxy.async", body, *arrays, threads=128)
    body, arrays, _ = from_registers(WAIT_GROUP, share=SHARE.replace("bar.sync 0;", ""))
    fails("race: .*wgmma", body, *arrays, threads=128)
    for register in ("%r10", "%r50"):
        written = SHARE + f"mov.b32 {register}, 0;\n"
        body, arrays, _ = from_registers(WAIT_GROUP, share=written)
        fails("not fenced by wgmma.fence", body, *arrays, threads=128)
    body, arrays, _ = from_registers("bar.sync 0;\nst.shared.b32 [%r1], 0;\n" + WAIT_GROUP)
    fails("wgmma of warp . may still read", body, *arrays, threads=128)
    body, arrays, _ = from_registers("mov.b32 %r50, 0;\n" + WAIT_GROUP)
    fails("written while wgmma worked on it", body, *arrays, threads=128)
    body, arrays, _ = from_registers("")
    fails("in flight", body, *arrays, threads=128)


def test_cp_async_before_wgmma_needs_a_fence():
    body, arrays, _ = from_registers(WAIT_GROUP)
    begin, end = body.index("mad.lo.u32"), body.index(FENCE)
    copies = "mad.lo.u32 %r20, %r0, 16, %r1;\nmul.wide.u32 %rd20, %r0, 16;\nadd.s64 %rd20, %rd20, %rd41;\n"
    copies += "cp.async.cg.shared.global [%r20], [%rd20], 16;\ncp.async.commit_group;\n"
    wait = "cp.async.wait_group 0;\n"
    run(body[:begin] + copies + wait + body[end:], *arrays, threads=128)
    fenced_too_early = body[:begin] + copies + body[end:].replace(FENCE, FENCE + wait)
    fails("without fence.proxy.async", fenced_too_early, *arrays, threads=128)
