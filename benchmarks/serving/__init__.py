"""Compares engines that serve a language model on a CPU: `python -m serving --help`."""
