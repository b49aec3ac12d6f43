"""Attention over paged keys and values: arrays in, arrays out; knows no engine type."""
