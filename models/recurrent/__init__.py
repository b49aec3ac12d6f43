"""Layers with recurrent states: convolutions and linear attention.

`recurrence` reads the states of a step's sequences from the pool, advances them by the step's tokens, and
writes them back. A layer calls it through `context.recur` with a `Rule`, which defines how a state changes:
`recurrence.Convolution` or `delta_rule.GatedDeltaRule`. Families such as Qwen3.5 and LFM2 use these rules.
The scheduler assigns the slots of the states; they reach this package in `AttentionMetadata.state_slots`.
"""
