"""Values that the paper publishes in its text or in the labels of its figures.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023.
"""

# Figure 2: percent of the KV cache. The bar of Oracle has only three labels. The middle one is interpreted as
# reserved, because the ratio of reserved to token states is then the same in all bars (0.65, 0.67, 0.66), and
# because a known length leaves no internal fragmentation.
MEMORY = {
    "Orca (Max)": {"token states": 20.4, "reserved": 13.3, "internal": 57.3, "other": 8.9},
    "Orca (Pow2)": {"token states": 26.8, "reserved": 17.9, "internal": 13.6, "other": 41.6},
    "Orca (Oracle)": {"token states": 38.2, "reserved": 25.2, "internal": 0.0, "other": 36.6},
    "vLLM": {"token states": 96.3, "reserved": 0.0, "internal": 0.0, "other": 3.7},
}
# Figure 12: request rate of vLLM divided by the rate of each baseline at a similar latency (section 6.2).
RATES = {"Orca (Oracle)": (1.7, 2.7), "Orca (Max)": (2.7, 8.0), "FasterTransformer": (1.0, 22.0)}
# Figure 13: mean number of running requests, OPT-13B.
BATCHES = {
    "ShareGPT": {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "vLLM": 30.42},
    "Alpaca": {"Orca (Max)": 7.00, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "vLLM": 132.44},
}
BATCH_RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}
# Figure 14: request rate of vLLM divided by the rate of Orca (Oracle), Alpaca, OPT-13B.
SEVERAL_OUTPUTS = {"1 sample": 1.3, "6 beams": 2.3}
# Figure 15: percent of the blocks that sharing saves; for ShareGPT a range.
SHARING = {
    "Alpaca": {
        "2 samples": 6.09,
        "4 samples": 8.53,
        "6 samples": 9.79,
        "2 beams": 37.56,
        "4 beams": 53.13,
        "6 beams": 55.16,
    },
    "ShareGPT": {"samples": (16.2, 30.5), "beams": (44.3, 66.3)},
}
# Figure 16: throughput of vLLM divided by that of Orca (Oracle), by the length of the shared prefix (tokens).
SHARED_PREFIX = {80: 1.67, 341: 3.58}
# Figure 17: request rate of vLLM divided by the rate of each Orca system, chat.
CHAT = {"Orca (Max)": 2.0, "Orca (Pow2)": 2.0, "Orca (Oracle)": 2.0}
# Figure 18a: additional time of the attention kernel, compared with FasterTransformer's (percent).
KERNEL_OVERHEAD = (20.0, 26.0)
# Figure 19a: times by block size (ms), read off the figure to one digit.
RECOVERY_MS = {"recompute": {1: 20, 256: 20}, "swap": {1: 140, 256: 30}}
