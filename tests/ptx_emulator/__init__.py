"""An emulator of PTX: runs compiled kernels, instruction by instruction, on a machine without a GPU.

XLA compiles for a GPU that is not there. ptx.py reads the program and host.py its launch and TMA tensor
maps from what the compiler dumps, and machine.py runs them, one block of threads at a time. The
instructions are in instructions.py, arithmetic.py, copies.py and tensor_units.py; memory.py is what they
work on. Warps take turns at random, copies arrive late, memory in flight holds NaN, and every access to
shared memory is checked for races by vector clocks. So the emulator sees what the interpreter of Pallas
does not: cp.async, the layouts of wgmma, mma, ldmatrix and TMA, the proxies of shared memory, and barriers
at which nobody arrives.

This package knows nothing of jax_paged, except for gpu.py, which puts the emulator in the place of a GPU.
pytest_plugin.py adds the option --emulate; ptx_by_hand.py holds small kernels for the emulator's own tests.

What it does not see:

- Races between the lanes of a warp, which counts as one agent: a missing syncwarp, or a lane that reads what
  another lane's cp.async wrote without a barrier in between.
- Races in global memory between the warps of a block, and between kernels.
- Threads that read what TMA then overwrites: a barrier between them is enough here, without a proxy fence.
- What ptxas makes of the PTX: registers, spills, and mistakes of its own.
- Limits of the hardware, except for those of launches, tensor maps and barriers.
- Blocks that have to run at the same time.

It is stricter than PTX in a few things: the lanes of a warp must branch together, the proxy fence must be the
writer's, everything that is started must be waited for, and threads must not share words (4 bytes) of shared
memory.

It says nothing about speed. Approximate instructions are computed exactly, except for tanh.
"""
