"""Which C++ sources the library was compiled from. setup.py runs this file, so it imports nothing of ours."""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str | None:
    """Returns the SHA-256, in hexadecimal, of the names and texts of sources; None if there are none.

    Args:
        folder: Where they lie.
    """
    paths = sorted([*folder.glob("*.cc"), *folder.glob("*.h")])
    if not paths:
        return None
    found = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        found.update(f"{path.name} {len(text)}\n".encode() + text)
    return found.hexdigest()
