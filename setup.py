"""What pyproject.toml can't say of the build: the native CPU backend, compiled where there is a C++ compiler.

It is optional: if its build fails, the package installs without it, and the ops run in XLA.
"""

from glob import glob
from pathlib import Path

import jaxlib
from setuptools import Extension, setup

FOLDER = "jax_paged/pallas_kernels/native"

# What jax.ffi.include_dir() returns.
HEADERS = Path(jaxlib.__file__).parent / "include"

native = Extension(
    # A plain shared library, which native/__init__.py loads; it has no functions of Python's.
    "jax_paged.pallas_kernels.native._library",
    sources=sorted(glob(f"{FOLDER}/*.cc")),
    depends=sorted(glob(f"{FOLDER}/*.h")),
    # The instructions of newer processors are chosen when the library runs: no -march here. Vectors are only
    # passed between functions that are inlined (-Wno-psabi).
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-Wno-psabi", "-isystem", str(HEADERS)],
    language="c++",
    optional=True,
)

setup(ext_modules=[native])
