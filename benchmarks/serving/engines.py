"""The engines that can be compared: their names on the command line, and how their processes are started."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.process import EngineProcess
from serving.runner import MAX_MODEL_LEN, MAX_NUM_SEQS, OUR_POOL_BYTES, POOL_GIB, Settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULES = {
    "ours": "run_jax_paged",
    "llm": "run_llm",
    "vllm": "run_vllm",
    "vllm-eager": "run_vllm",
    "openvino": "run_openvino",
    "llama.cpp": "run_llama_cpp",
}
KINDS = tuple(MODULES)
TREE_KINDS = ("ours", "llm")
# Options of optimum-cli for OpenVINO's copies of a checkpoint.
OPENVINO_WEIGHTS = {
    "fp32": "--weight-format fp32",
    "fp16": "--weight-format fp16",
    "int8": "--weight-format int8",
    "int4": "--weight-format int4 --group-size 64 --ratio 1.0 --sym",
}
WEIGHTS = {"ours": ("gguf",), "llm": ("gguf",), "openvino": tuple(OPENVINO_WEIGHTS)}


@dataclass(frozen=True)
class EngineSpec:
    """An engine and its arguments.

    Args:
        label: Name in tables: the text from the command line.
        kind: One of KINDS.
        tree: Source tree whose jax_paged is used; only for TREE_KINDS.
        arguments: Further arguments of the engine.
        weights: Which copy of the checkpoint the engine loads, one of WEIGHTS; empty for the usual one.
    """

    label: str
    kind: str
    tree: Path
    arguments: dict[str, Any]
    weights: str = ""

    @property
    def has_server(self) -> bool:
        """Whether the engine has a server with the OpenAI API that can be measured."""
        return self.kind not in ("llm", "openvino", "llama.cpp")

    @property
    def needs_gguf(self) -> bool:
        """Whether the engine loads the GGUF file."""
        return self.kind == "llama.cpp" or self.weights == "gguf"

    @property
    def is_quantized(self) -> bool:
        """Whether the engine's weights have been rounded, so that its outputs differ from other engines'."""
        return self.needs_gguf or self.weights in ("int8", "int4") or "quantization" in self.arguments


def parse_engine(text: str) -> EngineSpec:
    """Returns the engine for KIND[@TREE][:NAME=VALUE]..., such as ours@../other:max_num_batched_tokens=256.

    Raises:
        ValueError: If the text does not have this form.
    """
    head, *pairs = text.split(":")
    kind, _, tree = head.partition("@")
    if kind not in KINDS:
        raise ValueError(f"the engine must be one of {', '.join(KINDS)}, got {kind!r}")
    if tree and kind not in TREE_KINDS:
        raise ValueError(
            f"the tree of {kind} must be unset, as only {' and '.join(TREE_KINDS)} have one, got {tree!r}"
        )
    if tree and not (Path(tree) / "jax_paged").is_dir():
        raise ValueError(f"the tree must be a folder that holds jax_paged, got {tree!r}")
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"an argument of {kind} must be NAME=VALUE, got {pair!r}")
        arguments[name] = _value(value)
    weights = arguments.pop("weights", "")
    allowed = WEIGHTS.get(kind, ())
    if weights and weights not in allowed:
        raise ValueError(f"weights of {kind} must be {' or '.join(allowed) or 'unset'}, got {weights!r}")
    return EngineSpec(text, kind, Path(tree).resolve() if tree else ROOT, arguments, weights)


def commit_of(tree: Path) -> str:
    """Returns the commit of a source tree, with "+" if there are uncommitted changes; empty without git."""
    command = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


class Launcher:
    """Starts the processes of engines.

    Args:
        model: Checkpoint folder.
        peers: Folder with the environments of the peers.
        logs: Folder for the output of the processes.
        gguf: The model as a GGUF file, for engines that need it.
    """

    def __init__(self, model: Path, peers: Path, logs: Path, gguf: Path | None = None) -> None:
        self._model = model
        self._peers = peers
        self._logs = logs
        self._gguf = gguf

    def python(self, spec: EngineSpec) -> Path:
        """Returns the Python interpreter of an engine."""
        if spec.kind in TREE_KINDS:
            return Path(sys.prefix) / "bin" / "python"
        return self._peers / spec.kind.removesuffix("-eager") / "bin" / "python"

    def start(self, spec: EngineSpec, dtype: str, *, server: bool) -> EngineProcess:
        """Starts the process of an engine.

        Args:
            spec: The engine.
            dtype: Dtype of weights and KV cache.
            server: Whether to start the engine's server, with clients, instead of the engine alone.

        Raises:
            RuntimeError: If the process ends before it is ready.
        """
        module = MODULES[spec.kind]
        settings = Settings(str(self._checkpoint(spec)), dtype, _arguments(spec))
        if server:
            module = "run_http"
            settings = Settings(settings.model, dtype, {"command": list(self._server(spec, settings))})
        name = re.sub(r"[^\w.=-]+", "-", spec.label)[-150:]
        log = self._logs / f"{name}-{dtype}{'-http' if server else ''}.log"
        command = [str(self.python(spec)), "-m", f"serving.{module}"]
        return EngineProcess(command, settings, self._environment(spec), log)

    def _server(self, spec: EngineSpec, settings: Settings) -> Iterator[str]:
        yield str(self.python(spec))
        if spec.kind == "ours":
            yield from ("-c", "from jax_paged.server.launch.cli import main; main()")
            yield f"--kv-cache-memory-bytes={OUR_POOL_BYTES}"
        else:
            yield from ("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
            yield from ("--max-num-batched-tokens=2048", "--block-size=32", "--disable-uvicorn-access-log")
        yield from ("--model", settings.model, "--served-model-name", "benchmark", "--dtype", settings.dtype)
        yield from (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-seqs={MAX_NUM_SEQS}")
        for name, value in settings.arguments.items():
            option = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                yield option if value else option.replace("--", "--no-", 1)
            else:
                yield f"{option}={value}"

    def _checkpoint(self, spec: EngineSpec) -> Path:
        """Returns the checkpoint for an engine. For OpenVINO, it is converted once."""
        if spec.needs_gguf:
            assert self._gguf is not None, "checked by the command line"
            return self._gguf
        if spec.kind != "openvino":
            return self._model
        weights = spec.weights or "fp32"
        suffix = "openvino" if weights == "fp32" else f"openvino-{weights}"
        converted = ROOT / "benchmarks" / "checkpoints" / f"{self._model.name}-{suffix}"
        if not converted.exists():
            program = self._peers / "openvino" / "bin" / "optimum-cli"
            task = f"--task text-generation-with-past {OPENVINO_WEIGHTS[weights]}"
            command = [str(program), "export", "openvino", "-m", str(self._model), *shlex.split(task)]
            subprocess.run([*command, str(converted)], check=True, capture_output=True)
        return converted

    def _environment(self, spec: EngineSpec) -> dict[str, str]:
        paths = [HERE.parent]
        environment = {"HF_HUB_OFFLINE": "1"}
        if spec.kind in TREE_KINDS:
            paths.append(spec.tree)
        elif spec.kind == "llama.cpp":
            environment["LLAMA_CPP_LIB_PATH"] = str(self._peers / spec.kind / "build" / "bin")
            paths.append(self._peers / spec.kind / "source")
        elif spec.kind.startswith("vllm"):
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
        return {**environment, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _arguments(spec: EngineSpec) -> dict[str, Any]:
    return {**spec.arguments, "enforce_eager": True} if spec.kind == "vllm-eager" else spec.arguments


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else text
