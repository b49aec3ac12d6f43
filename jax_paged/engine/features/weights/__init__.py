"""Weights and memory of a running engine: sleep mode and weight updates.

WeightUpdates adds `update_weights` to LLMEngine, which replaces the weights between two steps. Sleeping adds
`sleep` and `wake_up`, which free the device memory of weights and KV cache and allocate it again.
Reinforcement learning uses both to alternate between generation and training.
"""
