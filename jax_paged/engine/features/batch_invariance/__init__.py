"""Start-up check of `batch_invariant=True`, and the choice of backends that pass it.

`check_invariance` runs a few small requests and raises NotInvariantError if their results depend on the
batch. `start_with_passing_backends` starts an engine and, if the check fails, tries other attention and
matrix-product backends. LLMEngine calls both when it is constructed.
"""
