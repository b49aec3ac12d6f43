"""The PagedAttention paper's evaluation, run again: see benchmarks/README.md."""
