"""Step times of the paper's models on its GPUs: a roofline model with peak rates from data sheets."""

import dataclasses

# Time per step that the host and the gaps between kernels add to the roofline (seconds). It is the only
# fitted number: with it, vLLM's batch size on Alpaca equals the one in figure 13.
HOST_S = 0.0122


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU, from its data sheet.

    Args:
        name: Name of the GPU.
        bytes_per_s: Memory bandwidth.
        flop_per_s: Rate of dense matrix products in half precision.
        link_bytes_per_s: Bandwidth of NVLink in one direction.
    """

    name: str
    bytes_per_s: float
    flop_per_s: float
    link_bytes_per_s: float


A100_40 = Gpu("A100-40GB", 1.555e12, 312e12, 300e9)
A100_80 = Gpu("A100-80GB", 2.039e12, 312e12, 300e9)
PCIE_BYTES_PER_S = 32e9  # PCIe 4.0 with 16 lanes, one direction
COPY_CALL_S = 2.5e-6  # time for a driver to queue one asynchronous copy
ALL_REDUCE_S = 10e-6  # latency of one all-reduce, without the transfer of its bytes


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model and its GPUs, as in table 1 of the paper.

    Args:
        name: Name of the model.
        num_params: Number of weights. Each has 2 bytes.
        num_layers: Number of layers.
        hidden_size: Hidden size.
        gpu: GPU type.
        num_gpus: Number of GPUs. The model runs with tensor parallelism on all of them.
        num_slots: Size of the KV cache of all GPUs together (tokens).
        host_s: Time that the host adds to every step (seconds).
    """

    name: str
    num_params: float
    num_layers: int
    hidden_size: int
    gpu: Gpu
    num_gpus: int
    num_slots: int
    host_s: float = HOST_S

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values in all layers."""
        return 2 * 2 * self.num_layers * self.hidden_size

    def step_time(self, block_size: int = 16) -> "RooflineStepTime":
        """Returns the model of step times for a block size (tokens)."""
        return RooflineStepTime(self, block_size)


# Table 1 of the paper. OPT-175B has 173e9 weights there (346 GB).
OPT_13B = Setup("OPT-13B", 13e9, 40, 5120, A100_40, 1, 15_700)
OPT_66B = Setup("OPT-66B", 66e9, 64, 9216, A100_40, 4, 9_700)
OPT_175B = Setup("OPT-175B", 173e9, 96, 12288, A100_80, 8, 60_100)
SETUPS = {setup.name: setup for setup in (OPT_13B, OPT_66B, OPT_175B)}


@dataclasses.dataclass(frozen=True)
class RooflineStepTime:
    """Roofline model of step times for the simulator (a StepTime).

    The time of a step is a sum:

    - Matrix products: the time to read the weights, or the time of the arithmetic if that is longer.
    - Attention and copied blocks: the time to read (and write) the bytes at full bandwidth. The arithmetic of
      attention is left out.
    - Two all-reduces per layer, if there are several GPUs.
    - Swapped blocks, and the time of the host.

    Args:
        setup: Model and GPUs.
        block_size: Number of tokens per block.
    """

    setup: Setup
    block_size: int

    def step_s(
        self,
        num_prefill_tokens: int,
        num_decode_seqs: int,
        num_context_tokens: int,
        num_blocks_swapped: int,
        num_blocks_copied: int,
    ) -> float:
        """Returns the duration of a step (seconds); see StepTime."""
        s, n = self.setup, self.setup.num_gpus
        num_tokens = num_prefill_tokens + num_decode_seqs
        block_bytes = s.bytes_per_token * self.block_size
        bytes_per_s = s.gpu.bytes_per_s * n
        # Each weight has 2 bytes, and takes 2 operations per token.
        products_s = 2 * s.num_params * max(1 / bytes_per_s, num_tokens / (s.gpu.flop_per_s * n))
        moved = s.bytes_per_token * num_context_tokens + 2 * block_bytes * num_blocks_copied
        seconds = s.host_s + products_s + moved / bytes_per_s
        if n > 1:
            all_reduced = 2 * (n - 1) / n * 2 * s.hidden_size * num_tokens
            seconds += 2 * s.num_layers * (ALL_REDUCE_S + all_reduced / s.gpu.link_bytes_per_s)
        if num_blocks_swapped:
            seconds += num_blocks_swapped * self.swap_s
        return seconds

    @property
    def swap_s(self) -> float:
        """The time to copy a block to or from host memory (seconds), with two copies per layer."""
        s = self.setup
        num_bytes = s.bytes_per_token * self.block_size / s.num_gpus
        return num_bytes / PCIE_BYTES_PER_S + 2 * s.num_layers * COPY_CALL_S
