"""Reads the text of GET /metrics."""

import re


def metric_values(text: str) -> dict[str, float]:
    """Returns metrics by name and labels, without "vllm:", "jax_paged_" and the labels of the one model."""
    lines = re.findall(r"^(?:vllm:|jax_paged_)([^\s{]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    values = {}
    for name, labels, value in lines:
        own = re.sub(r'(model_name|engine)="[^"]*",?', "", labels).rstrip(",")
        values[f"{name}{{{own}}}" if own else name] = float(value)
    return values
