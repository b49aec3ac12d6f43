"""The digest of the C++ sources, which identifies the sources that the library was compiled from.

setup.py runs this file, so it must not import other modules of jax-paged.
"""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str | None:
    """Returns the hexadecimal SHA-256 of the names and contents of the C++ sources; None if there are none.

    Args:
        folder: Folder of the sources.
    """
    paths = sorted([*folder.glob("*.cc"), *folder.glob("*.h")])
    if not paths:
        return None
    found = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        found.update(f"{path.name} {len(text)}\n".encode() + text)
    return found.hexdigest()
