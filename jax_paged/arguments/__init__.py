"""Helpers for the classes that hold user arguments, such as EngineArgs and SamplingParams.

`command_line.add_options` makes command-line options from a dataclass, `ignored.ignores` accepts vLLM
arguments that have no effect here, `plain_values.plain` converts NumPy and JAX values to plain Python,
`suggestions.suggestion` proposes names for misspelled ones, and `shown_values.shown` formats values for error
messages. The package imports neither JAX nor the rest of jax_paged.
"""
