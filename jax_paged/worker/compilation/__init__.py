"""Ahead-of-time compilation of the programs that the worker runs.

A `Program` is traced for a `TraceContext` (programs.py). `plan_steps` chooses the buckets, that is, the
shapes to which steps are padded. `CompiledPrograms` compiles the step of every bucket and all other programs,
mostly in the background. The model runner asks it for the smallest compiled bucket of a step and runs that
program. Features define further programs.
"""
