"""The adapters that an engine knows: read once, and kept in host memory for the requests to come."""

import collections
import threading
from pathlib import Path
from typing import Any

from jax_paged.config.engine_args import EngineConfig
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.lora_request import LoRARequest
from jax_paged.models.features.lora.adapter_files import Adapter, AdapterLimits, read_adapter


class Adapters:
    """Reads adapters when they are first asked for. May be used from any thread.

    Those that were added stay until they are removed. Of the others, which only a request has named, as many
    stay as there is room for in max_cpu_loras, and those that were used last; one that is gone is read again.
    A request holds its own adapter, whatever becomes of it here.

    Args:
        config: What adapters must fit, and how many are kept.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._limits = AdapterLimits(
            maps=config.lora_maps,
            max_rank=config.max_lora_rank,
            hidden_size=config.embed_size,
            max_prompt_tokens=config.max_model_len - 2,
            dtype=config.dtype,
        )
        self._is_on = config.max_loras > 0
        self._max_kept = config.max_cpu_loras
        self._lock = threading.Lock()
        self._requests: dict[int, LoRARequest] = {}  # what the ids stand for
        self._kept: collections.OrderedDict[int, Adapter] = collections.OrderedDict()
        self._added: set[int] = set()

    @property
    def ids(self) -> set[int]:
        """The ids of the adapters that are in host memory now."""
        with self._lock:
            return set(self._kept)

    def get(self, request: Any) -> Adapter:
        """Returns the adapter of a LoRARequest.

        Raises:
            ValueError: If it can't be read or does not fit, if its id is another adapter's, or if the engine
                takes no adapters.
        """
        self._check(request)
        return self._found(request)

    def add(self, request: Any) -> bool:
        """Reads an adapter ahead of its requests, and keeps it until it is removed.

        Returns:
            Whether it was not added before.

        Raises:
            ValueError: As `get`; also if max_cpu_loras adapters are there already.
        """
        self._check(request)
        self._found(request)
        with self._lock:
            if request.lora_int_id in self._added and self._requests[request.lora_int_id] == request:
                return False
            if len(self._added) >= self._max_kept:
                given, most = len(self._added) + 1, self._max_kept
                check_int("max_cpu_loras", most, given, condition="to add another adapter")
            self._added.add(request.lora_int_id)
            return True

    def remove(self, lora_int_id: int) -> bool:
        """Forgets an adapter; requests that have it already go on. Returns whether there was one."""
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

    def _found(self, request: LoRARequest) -> Adapter:
        """Returns an adapter, kept or read anew: without the lock, as nobody may wait for a file."""
        with self._lock:
            adapter = self._known(request)
        if adapter is None:
            try:
                adapter = read_adapter(Path(request.lora_path).expanduser(), self._limits)
            except (OverflowError, RecursionError, RuntimeError) as error:  # numbers, nesting, ~nobody
                allowed = f"the folder of an adapter ({error})"
                raise ArgumentError("lora_path", request.lora_path, allowed) from error
        with self._lock:
            self._known(request)
            number = request.lora_int_id
            self._requests[number] = request
            self._kept[number] = adapter
            self._kept.move_to_end(number)
            for other in list(self._kept):
                if len(self._kept) > self._max_kept and other not in self._added and other != number:
                    del self._kept[other]
        return adapter

    def _known(self, request: LoRARequest) -> Adapter | None:
        """Returns what is kept of an adapter, whose id is no other's."""
        number = request.lora_int_id
        known = self._requests.get(number, request)
        if known != request:
            allowed = (
                f"another number for lora_name {request.lora_name!r} and lora_path {request.lora_path!r} "
                f"because {number} is the adapter {known.lora_name!r} of {known.lora_path!r}"
            )
            raise ArgumentError("lora_int_id", number, allowed)
        return self._kept.get(number)
