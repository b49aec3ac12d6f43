"""Runs the PTX of the kernels, instruction by instruction, on a machine that has no GPU.

XLA compiles for a GPU that is not there (benchmarks/kernels_compile.py does so too); what it makes is read by
ptx.py (the program) and host.py (the launch and its TMA tensor maps), and run by machine.py, a block at a
time. Warps take turns at random, copies arrive late, what is in flight is NaN, and every access to shared
memory is checked for races by vector clocks. So it sees what the interpreter of Pallas does not: cp.async,
the layouts of wgmma, mma, ldmatrix and TMA, the proxies of shared memory, barriers that nobody arrives at.

What it does not see:

- Races between the lanes of a warp, which is one agent: a missing syncwarp, or a lane that reads what
  another one's cp.async wrote without a barrier.
- Races in global memory between the warps of a block, and between kernels.
- Reads by threads that TMA overwrites: a barrier between them is enough here, without a proxy fence.
- What ptxas makes of the PTX: registers, spills, its own mistakes. Limits of the hardware but for those of
  tensor maps and barriers. Blocks that have to run at the same time.

It is stricter than PTX in a few things: the lanes of a warp branch together, the proxy fence is the writer's,
all that is started is waited for, and threads do not share words of 4 bytes of shared memory.

It does not say how fast anything is. Approximate instructions are computed exactly but for tanh.
"""
