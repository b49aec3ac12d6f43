"""How long a step of one of the paper's models takes on its GPUs: a roofline of published peak figures."""

import dataclasses

# The one fitted number of the evaluation, in seconds per step: what the host and the gaps between kernels add
# to the roofline. Fitted to the batch of vLLM on Alpaca in figure 13; tests/test_paper.py fits it again.
HOST_S = 0.0122


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Peak figures of a GPU, from its data sheet.

    Args:
        name: Its name.
        bytes_per_s: Memory bandwidth.
        flop_per_s: Of dense products in half precision.
        link_bytes_per_s: NVLink, one direction.
    """

    name: str
    bytes_per_s: float
    flop_per_s: float
    link_bytes_per_s: float


A100_40 = Gpu("A100-40GB", 1.555e12, 312e12, 300e9)
A100_80 = Gpu("A100-80GB", 2.039e12, 312e12, 300e9)
PCIE_BYTES_PER_S = 32e9  # PCIe 4.0 with 16 lanes, one direction
COPY_CALL_S = 2.5e-6  # of one asynchronous copy, about what a driver takes to queue it
ALL_REDUCE_S = 10e-6  # of one all-reduce, besides its bytes


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model on its GPUs: table 1 of the paper.

    Args:
        name: Of the model.
        num_params: Weights, in 2 bytes each.
        num_layers: Of the model.
        hidden_size: Of the model.
        gpu: Kind of GPU.
        num_gpus: Over which the model is split.
        num_slots: Tokens whose keys and values the GPUs hold.
        host_s: Added to every step.
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
        """Of keys and values in all layers."""
        return 2 * 2 * self.num_layers * self.hidden_size

    def device(self, block_size: int = 16) -> "Device":
        """Returns how long steps take with blocks of a size."""
        return Device(self, block_size)


OPT_13B = Setup("OPT-13B", 13e9, 40, 5120, A100_40, 1, 15_700)
OPT_66B = Setup("OPT-66B", 66e9, 64, 9216, A100_40, 4, 9_700)
OPT_175B = Setup("OPT-175B", 173e9, 96, 12288, A100_80, 8, 60_100)
SETUPS = {setup.name: setup for setup in (OPT_13B, OPT_66B, OPT_175B)}


@dataclasses.dataclass(frozen=True)
class Device:
    """The time of a step: weights read or multiplied by, keys and values read, bytes moved, and the host.

    Products take what is more, reading the weights or the arithmetic; attention reads keys and values at full
    bandwidth; its arithmetic is left out. It is a simulator's StepTime.

    Args:
        setup: Model and GPUs.
        block_size: Tokens per block.
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
        """Returns the seconds of a step."""
        s, n = self.setup, self.setup.num_gpus
        num_tokens = num_prefill_tokens + num_decode_seqs
        block_bytes = s.bytes_per_token * self.block_size
        bytes_per_s = s.gpu.bytes_per_s * n
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
        """Seconds to move a block to or from host memory: keys and values of each layer on their own."""
        s = self.setup
        num_bytes = s.bytes_per_token * self.block_size / s.num_gpus
        return num_bytes / PCIE_BYTES_PER_S + 2 * s.num_layers * COPY_CALL_S
