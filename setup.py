"""Build of the native CPU backend; everything else of the build is configured in pyproject.toml.

The native backend is an optional C++ extension. If its build fails, the package installs without it and the
operations run in XLA.
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

# Equal to jax.ffi.include_dir(), without importing jax.
HEADERS = Path(jaxlib.__file__).parent / "include"

# Zig contains Clang and a C++ library, and pip can install it for the duration of the build. A fixed target
# restricts the code to instructions that all x86-64 processors have. The tuning options speed up decode
# attention from 0.7-0.8 to 0.8-1 times the speed of a GCC build.
ZIG = (
    *(sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.27", "-fPIC", "-DNDEBUG"),
    *("-mtune=sapphirerapids", "-fomit-frame-pointer"),
)


def needs_zig() -> bool:
    """Returns True if no C++ compiler is installed and Zig supports this platform."""
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    is_installed = any(shutil.which(name) for name in (compiler.split()[0], "c++", "g++", "clang++"))
    return not is_installed and sys.platform == "linux" and platform.machine() == "x86_64"


class BuildNative(build_ext):
    """Build command that uses the machine's C++ compiler, or Zig if there is none."""

    def build_extensions(self) -> None:
        """Compiles and links the extension."""
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
    # A plain shared library without Python functions. native/__init__.py loads it.
    "jax_paged.pallas_kernels.native._library",
    sources=sorted(glob(f"{FOLDER}/*.cc")),
    depends=sorted(glob(f"{FOLDER}/*.h")),
    # No -march here: the library selects newer instructions at run time. -Wno-psabi: vectors are only passed
    # between inlined functions, so the ABI warning does not apply. -ffp-contract=fast fuses multiply and add,
    # which is GCC's default.
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
