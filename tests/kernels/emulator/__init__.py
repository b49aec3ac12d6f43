"""Runs the PTX of the kernels, instruction by instruction, on a machine that has no GPU.

XLA compiles for a GPU that is not there (benchmarks/kernels_compile.py does so too); what it makes is read by
ptx.py (the program) and host.py (the launch and its TMA tensor maps), and run by machine.py, a block at a
time. Warps take turns at random, copies arrive late, what is in flight is NaN, and every access to shared
memory is checked for races by vector clocks. So it sees what the interpreter of Pallas does not: cp.async,
the layouts of wgmma, mma, ldmatrix and TMA, the proxies of shared memory, barriers that nobody arrives at.

It does not say how fast anything is. Approximate instructions are computed exactly but for tanh.
"""
