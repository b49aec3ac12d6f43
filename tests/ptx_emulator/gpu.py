"""A GPU that is not there: plgpu.kernel compiles for it, and the emulator runs the PTX.

Needs jax[cuda13], whose compiler works without a GPU. jit is switched off: a kernel runs when it is called.
The only file of this package that knows jax_paged.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged.pallas_kernels import ops
from jax_paged.pallas_kernels.gpu import tuning
from ptx_emulator import host, ptx
from ptx_emulator.machine import launch_kernel
from ptx_emulator.memory import POISON, KernelError

TARGETS = pathlib.Path(__file__).parents[2] / "benchmarks" / "targets"


class EmulatedGpu:
    """Compiles and runs kernels.

    Args:
        name: Of a file in benchmarks/targets.
    """

    def __init__(self, name: str):
        self.config = config = (TARGETS / f"{name}.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology="1x1x1", target_config=config
        )
        self.device = topology.devices[0]
        with jax.default_device(self.device):
            target = tuning.target()
        # Few multiprocessors, so that small batches fill them.
        self.target = dataclasses.replace(target, num_sms=tuning.INTERPRETED_SMS)
        self.num_launches = 0
        self.num_schedules = 1
        self._kernel = plgpu.kernel
        self._programs: dict[str, tuple[ptx.Program, host.Launch]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Makes backend "pallas" run here; the order of events is the same each time."""
        self.num_launches = 0
        with (
            jax.disable_jit(),
            mock.patch.object(plgpu, "kernel", self.kernel),
            mock.patch.object(tuning, "target", return_value=self.target),
            mock.patch.object(ops, "_choose", lambda backend, *_: ops._implementation(backend)),
            mock.patch.object(ops, "resolve_backend", ops._implementation),
        ):
            yield

    def kernel(self, body: Callable[..., None], *, out_type: Any = (), **options: Any) -> Callable[..., Any]:
        """Stands for plgpu.kernel; references to arrays that the body closes over become arguments."""
        captured = inspect.getclosurevars(body).nonlocals
        refs = {n: v for n, v in captured.items() if isinstance(v, jax.Ref)}
        cells = dict(zip(body.__code__.co_freevars, body.__closure__ or (), strict=True))

        def call(*operands: Any) -> Any:
            outs, tree = jax.tree.flatten(out_type)
            # An operand may be None or a tuple of arrays, which the kernel takes as references.
            leaves, operands_tree = jax.tree.flatten(operands)
            arrays = [np.array(x) for x in (*leaves, *(ref[...] for ref in refs.values()))]
            specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

            def run(*args: Any) -> Any:
                made = [jax.new_ref(x) for x in args[len(leaves) :]]
                for name, ref in zip(refs, made, strict=True):
                    cells[name].cell_contents = ref
                extra = {} if not outs else {"out_type": out_type}
                given = jax.tree.unflatten(operands_tree, args[: len(leaves)])
                return self._kernel(body, **extra, **options)(*given), *map(jax.freeze, made)

            program, launch = self._compile(run, specs)
            for name, ref in refs.items():
                cells[name].cell_contents = ref
            made = [np.empty(x.shape, x.dtype) for x in outs]
            for x in made:
                x.reshape(-1).view(np.uint8)[:] = POISON
            self.num_launches += 1
            host.check(launch, self.config)
            before = [x.copy() for x in (*arrays, *made)]
            launch_kernel(program, launch, [*arrays, *made], seed=self.num_launches)
            for schedule in range(1, self.num_schedules):
                others = [x.copy() for x in before]
                launch_kernel(program, launch, others, seed=self.num_launches + (schedule << 32))
                for x, other in zip((*arrays, *made), others, strict=True):
                    if x.tobytes() != other.tobytes():
                        raise KernelError("the result depends on the order of events")
            for ref, array in zip(refs.values(), arrays[len(leaves) :], strict=True):
                ref[...] = array
            return jax.tree.unflatten(tree, map(jax.numpy.asarray, made))

        return call

    def _compile(self, run: Callable[..., Any], specs: list[Any]) -> tuple[ptx.Program, host.Launch]:
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in specs]
        with (
            jax.disable_jit(False),
            jax.default_device(self.device),
            tempfile.TemporaryDirectory() as dump,
            mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=dump),
        ):
            lowered = jax.jit(run).trace(*specs).lower()
            # Mosaic compiles a kernel once, and knows bytes without a sign only.
            key = lowered.as_text().replace("ui8", "i8")
            if key not in self._programs:
                lowered.compile()
                (program,) = pathlib.Path(dump).glob("*.ptx")
                log = program.with_suffix(".mlir-passes.log")
                self._programs[key] = ptx.parse(program.read_text()), host.parse(log.read_text())
        return self._programs[key]


@functools.cache
def emulated_gpu(name: str) -> EmulatedGpu:
    """Returns the one GPU of a name: what it has compiled stays."""
    return EmulatedGpu(name)
