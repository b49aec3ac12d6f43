"""Pictures for tests, the same wherever they are drawn; needs NumPy alone."""

import numpy as np


def drawn(width: int, height: int, seed: int) -> np.ndarray:
    """Returns a picture, uint8 [height, width, 3]: waves whose directions depend on the seed."""
    y, x, channel = np.indices((height, width, 3))
    phase = (3 + seed % 7) * x + (5 + seed % 11) * y + 40 * channel + 17 * seed + (x * y) // (4 + seed % 5)
    return (phase % 256).astype(np.uint8)
