"""What pyproject.toml can't say of the build: the native CPU backend, and the compiler for it.

It is optional: if its build fails, the package installs without it, and the ops run in XLA.
"""

import os
import platform
import runpy
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

import jaxlib
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "jax_paged/pallas_kernels/native"

# What jax.ffi.include_dir() returns.
HEADERS = Path(jaxlib.__file__).parent / "include"

# Where no compiler is installed, pip brings Zig for the time of the build, which has Clang and the C++
# library in it. A target that is named keeps to the instructions that all processors of its kind have; the
# rest brings decode attention from 0.7 to 0.8 up to 0.8 to 1 times the speed of GCC's.
ZIG = (
    *(sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.27", "-fPIC", "-DNDEBUG"),
    *("-mtune=sapphirerapids", "-fomit-frame-pointer"),
)


def needs_zig() -> bool:
    """Returns whether there is no C++ compiler, and Zig can take its place."""
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    is_installed = any(shutil.which(name) for name in (compiler.split()[0], "c++", "g++", "clang++"))
    return not is_installed and sys.platform == "linux" and platform.machine() == "x86_64"


class BuildNative(build_ext):
    """Builds with the machine's compiler, or else with Zig."""

    def build_extensions(self) -> None:
        """Compiles and links the library."""
        if needs_zig():
            zig, link = list(ZIG), [*ZIG, "-shared", "-s"]
            self.compiler.set_executables(
                compiler=zig,
                compiler_so=zig,
                compiler_cxx=zig,
                compiler_so_cxx=zig,
                linker_exe=zig,
                linker_exe_cxx=zig,
                linker_so=link,
                linker_so_cxx=link,
            )
        super().build_extensions()


sources = runpy.run_path(f"{FOLDER}/sources.py")
native = Extension(
    # A plain shared library, which native/__init__.py loads; it has no functions of Python's.
    "jax_paged.pallas_kernels.native._library",
    sources=sorted(glob(f"{FOLDER}/*.cc")),
    depends=sorted(glob(f"{FOLDER}/*.h")),
    # The instructions of newer processors are chosen when the library runs: no -march here. Vectors are only
    # passed between functions that are inlined (-Wno-psabi). Products and sums are fused, as GCC does anyway.
    extra_compile_args=[
        *("-std=c++17", "-O3", "-g0", "-Wno-psabi", "-ffp-contract=fast"),
        *("-isystem", str(HEADERS)),
    ],
    define_macros=[("JAX_PAGED_SOURCES", f'"{sources["digest"](Path(FOLDER))}"')],
    language="c++",
    optional=True,
)

setup(
    ext_modules=[native],
    cmdclass={"build_ext": BuildNative},
    setup_requires=["ziglang>=0.15"] if needs_zig() else [],
)
