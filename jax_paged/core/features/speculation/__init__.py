"""Speculative decoding: decides whether the next step verifies draft tokens, and how many per sequence.

`DraftPlanner` (draft_planner.py) is the step planner. It takes draft tokens from the n-gram index of each
sequence (ngram_index.py), from a grammar, or from a draft model on the device. acceptance.py tracks how many
of them are accepted, step_times.py how long steps take, num_drafts.py computes the best number of draft
tokens from both, and probing.py decides when to compute that number again. Sampled tokens are accepted up to
and including the first one that differs from its draft token, so outputs are the same as without drafts.
"""
