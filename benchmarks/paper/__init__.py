"""Reproduction of the PagedAttention paper's evaluation: see benchmarks/README.md.

`lengths` draws request traces, `systems` and `buddy` define the compared systems, and `devices` models step
times. `points` computes the values of the figures; `measured` and `scale` measure some of them. `runner`
computes missing points, `store` saves them, and `published` has the paper's values. `figures` combines points
into figures, which `picture` and `page` write.
"""
