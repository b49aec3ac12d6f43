"""Check of the kernels on the user's own GPU, before the engine uses them.

`runner.py` compares every operation with the backend "reference", and then compares its speed with another
backend. `expert_check.py` has the part for experts. worker/loading/kernel_check.py runs `runner.main` in a
separate process, and chooses "pallas" for `attention_backend="auto"` only if the kernels are correct and not
slower than "xla".
"""
