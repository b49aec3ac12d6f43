"""LoRA adapters in host memory: each is read once and kept for later requests."""

import collections
import threading
from pathlib import Path
from typing import Any

from jax_paged.config.engine_config import EngineConfig
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.lora_request import LoRARequest
from jax_paged.models.features.lora.adapter_files import Adapter, AdapterLimits, read_adapter


class Adapters:
    """Cache of LoRA adapters. Adapters are read when they are first used. Thread-safe.

    Adapters that were added with `add` stay until they are removed. Adapters that were only named by requests
    are evicted, least recently used first, when there are more than `max_cpu_loras` adapters. An evicted
    adapter is read again when a request names it. A request keeps a reference to its own adapter, so eviction
    and removal do not affect it.

    Args:
        config: Engine configuration: the shapes that adapters must have, and how many are kept.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._limits = AdapterLimits(
            maps=config.lora_layer_sizes,
            max_rank=config.max_lora_rank,
            hidden_size=config.prompt_embed_size,
            max_prompt_tokens=config.max_model_len - 2,
            dtype=config.dtype,
        )
        self._is_on = config.max_loras > 0
        self._max_kept = config.max_cpu_loras
        self._lock = threading.Lock()
        self._requests: dict[int, LoRARequest] = {}  # by lora_int_id
        self._kept: collections.OrderedDict[int, Adapter] = collections.OrderedDict()
        self._added: set[int] = set()

    @property
    def ids(self) -> set[int]:
        """The ids of the adapters that are in host memory."""
        with self._lock:
            return set(self._kept)

    def get(self, request: Any) -> Adapter:
        """Returns the adapter of a LoRARequest, and reads it if necessary.

        Raises:
            ValueError: If the adapter can't be read or does not fit the model, if its id belongs to another
                adapter, or if LoRA is not enabled.
        """
        self._check(request)
        return self._get_or_read(request)

    def add(self, request: Any) -> bool:
        """Reads an adapter before any request uses it, and keeps it until it is removed.

        Returns:
            True if the adapter was added, False if it had already been added.

        Raises:
            ValueError: As for `get`, or if max_cpu_loras adapters have already been added.
        """
        self._check(request)
        self._get_or_read(request)
        with self._lock:
            if request.lora_int_id in self._added and self._requests[request.lora_int_id] == request:
                return False
            if len(self._added) >= self._max_kept:
                given, most = len(self._added) + 1, self._max_kept
                check_int("max_cpu_loras", most, given, condition="to add another adapter")
            self._added.add(request.lora_int_id)
            return True

    def remove(self, lora_int_id: int) -> bool:
        """Removes an adapter; returns whether it was known. Requests that already use it are not affected."""
        lora_int_id = check_int("lora_int_id", lora_int_id, 1)
        with self._lock:
            self._added.discard(lora_int_id)
            self._kept.pop(lora_int_id, None)
            return self._requests.pop(lora_int_id, None) is not None

    def _check(self, request: Any) -> None:
        ok = isinstance(request, LoRARequest)
        check(ok, "lora_request", request, "None or a LoRARequest")
        check(
            self._is_on, "lora_request", request, "None because the engine was made without enable_lora=True"
        )

    def _get_or_read(self, request: LoRARequest) -> Adapter:
        """Returns an adapter, either cached or newly read.

        The file is read without holding the lock, so that other threads do not wait for it.
        """
        with self._lock:
            adapter = self._get_cached(request)
        if adapter is None:
            try:
                adapter = read_adapter(Path(request.lora_path).expanduser(), self._limits)
            # Possible causes: a number out of range, deeply nested JSON, or `~user` for an unknown user.
            except (OverflowError, RecursionError, RuntimeError) as error:
                allowed = f"the folder of an adapter ({error})"
                raise ArgumentError("lora_path", request.lora_path, allowed) from error
        with self._lock:
            self._get_cached(request)  # raises an error if the id now belongs to another adapter
            number = request.lora_int_id
            self._requests[number] = request
            self._kept[number] = adapter
            self._kept.move_to_end(number)
            for other in list(self._kept):
                if len(self._kept) > self._max_kept and other not in self._added and other != number:
                    del self._kept[other]
        return adapter

    def _get_cached(self, request: LoRARequest) -> Adapter | None:
        """Returns the cached adapter of a request, or None.

        Raises:
            ValueError: If the request's id belongs to another adapter.
        """
        number = request.lora_int_id
        known = self._requests.get(number, request)
        if known != request:
            allowed = (
                f"another id for lora_name {request.lora_name!r} and lora_path {request.lora_path!r} because "
                f"{number} is the id of lora_name {known.lora_name!r} and lora_path {known.lora_path!r}"
            )
            raise ArgumentError("lora_int_id", number, allowed)
        return self._kept.get(number)
