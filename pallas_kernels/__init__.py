"""Attention over paged keys and values: arrays in, arrays out, and no type of the engine."""
