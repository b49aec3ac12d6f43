"""Options of the server and of run-batch; each field is a command-line option.

The options of the engine are in `jax_paged.config.engine_args`.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Literal, Self, get_args

from jax_paged.arguments.command_line import values_of
from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import suggests_fields
from jax_paged.errors import ArgumentError, check, check_choice, check_int, check_number
from jax_paged.sampling_params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

# Minimum value of each integer limit.
_LOWEST = {
    "max_connections": 1,
    "max_header_bytes": 1024,
    "max_headers": 10,
    "max_body_bytes": 1024,
    "max_buffered_bytes": 1024,
    "max_json_depth": 4,
    "max_json_containers": 16,
    "max_prompts": 1,
    "max_messages": 1,
    "max_stop_strings": 0,
    "max_stop_characters": 0,
}
# Maximum value of some limits. The nesting depth is bounded because nested values are validated recursively.
# For stop strings, the engine has the same limits.
_HIGHEST = {
    "max_json_depth": 200,
    "max_stop_strings": MAX_STOP_STRINGS,
    "max_stop_characters": MAX_STOP_CHARACTERS,
}

ToolCallParser = Literal[
    "hermes", "qwen3", "llama3", "llama3_json", "mistral", "deepseek_r1", "deepseek_v3", "openai"
]
ReasoningParser = Literal["deepseek_r1", "qwen3", "mistral", "openai_gptoss"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def check_parsers(options: "ServerOptions | BatchOptions") -> None:
    """Raises ValueError if `tool_call_parser` or `reasoning_parser` is not the name of a known format."""
    for name, choices in (("tool_call_parser", ToolCallParser), ("reasoning_parser", ReasoningParser)):
        check_choice(name, getattr(options, name), (None, *get_args(choices)))


@suggests_fields
@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP server: address, limits, security and logging.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 selects a free port.
        served_model_name: Name of the model in the API; None uses the value of --model.
        chat_template: Jinja chat template that replaces the tokenizer's own template, or the path of a file
            with it.
        tool_call_parser: Format in which the model writes tool calls. Calls in this format are returned as
            tool_calls.
        reasoning_parser: Format in which the model writes its reasoning. Reasoning in this format is returned
            as reasoning, separate from the content.
        strict: Whether requests with unknown fields are rejected. Otherwise, unknown fields are ignored and
            listed in the response header X-Ignored-Fields.
        lora_modules: LoRA adapters to load at start-up, each as name=path or as a JSON object with the keys
            name and path. Requests select an adapter with its name in the field model. Needs --enable-lora.
        allow_runtime_lora_updating: Whether clients may load and unload LoRA adapters. They can then make the
            server read any folder that it has permission to read.
        max_num_waiting: Maximum number of requests that wait for the engine. Further requests receive status
            429.
        shutdown_timeout: Time in seconds that running requests have to finish after SIGTERM or Ctrl-C. Then
            they are aborted. A second signal aborts them at once.
        step_timeout: Time in seconds after which a step of the engine is considered hung. All requests then
            fail, and the server ends.
        stay_on_engine_failure: Whether the server keeps running after the engine has failed, and responds to
            requests with the failure. Otherwise, the server exits with status 4.
        log_level: Minimum level of the messages that are logged; "warning" omits the line for each request.
        log_format: Format of the log: "text", or "json" for one JSON object per line.
        developer_routes: Whether the routes /sleep, /wake_up, /is_sleeping, /update_weights and
            /weight_version exist. Clients of these routes can interrupt the service and make the server read
            folders of this machine.
        ui: Whether there is a page at / that shows the state of the server and has a chat.
        api_key: Key that clients must send as "Authorization: Bearer KEY"; the option can be repeated. Other
            users of the machine can see command lines, so prefer --api-key-file or the environment variable
            JAX_PAGED_API_KEY. Keys from all three sources are accepted.
        api_key_file: File with one API key per line.
        allow_unauthenticated: Whether the server may run without an API key on an address that is not a
            loopback address. Everyone who can reach the address can then use it.
        allowed_origins: Origin whose web pages may send requests, such as https://chat.example.org, or * for
            all origins; the option can be repeated.
        root_path: Path under which a proxy serves this server, such as /llm.
        ssl_keyfile: File with the private key of the TLS certificate: PEM, not encrypted.
        ssl_certfile: File with the TLS certificate in PEM. The server then accepts only HTTPS.
        ssl_ca_certs: File with the certificate authorities that sign client certificates. Clients must then
            present a certificate.
        max_connections: Maximum number of open connections.
        max_header_bytes: Maximum size in bytes of a request's first line and headers together.
        max_headers: Maximum number of headers of a request.
        max_body_bytes: Maximum size in bytes of a request's body.
        max_buffered_bytes: Maximum size in bytes of all request bodies that are being received or wait to be
            parsed.
        max_json_depth: Maximum nesting depth of arrays and objects in a body.
        max_json_containers: Maximum number of arrays and objects in a body.
        max_prompts: Maximum number of prompts in a completion request.
        max_messages: Maximum number of messages in a chat.
        max_stop_strings: Maximum number of stop strings in a request.
        max_stop_characters: Maximum number of characters of all stop strings of a request together.
        head_timeout: Maximum time in seconds from the first byte of a request to the end of its headers, and
            from the opening of a connection to its first byte.
        body_timeout: Maximum time in seconds from the end of a request's headers to the end of its body.
        write_timeout: Time in seconds after which the connection is closed if the client reads nothing of a
            response.
        keep_alive_timeout: Time in seconds that an idle connection stays open.
        ray: Number of replicas of the server that Ray Serve runs on this machine behind one address; needs
            jax-paged[ray]. None runs one server without Ray.

    Raises:
        ValueError: If a value is out of range, or two options contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    chat_template: str | None = None
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None
    strict: bool = False
    lora_modules: tuple[str, ...] = dataclasses.field(default=(), metadata={"nargs": "+"})
    allow_runtime_lora_updating: bool = False
    max_num_waiting: int = 512
    shutdown_timeout: float = 30
    step_timeout: float = 120
    stay_on_engine_failure: bool = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    developer_routes: bool = False
    ui: bool = True
    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    api_key_file: str | None = None
    allow_unauthenticated: bool = False
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    max_connections: int = 1000
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_body_bytes: int = 4 * 1024 * 1024
    max_buffered_bytes: int = 256 * 1024 * 1024
    max_json_depth: int = 64
    max_json_containers: int = 65536
    max_prompts: int = 128
    max_messages: int = 1024
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_characters: int = MAX_STOP_CHARACTERS
    head_timeout: float = 10
    body_timeout: float = 60
    write_timeout: float = 30
    keep_alive_timeout: float = 5
    ray: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_int("port", self.port, 0, 65535)
        check_int("max_num_waiting", self.max_num_waiting, 0)
        if self.ray is not None:
            check_int("ray", self.ray, 1)
        check_number("shutdown_timeout", self.shutdown_timeout, 0, math.inf)
        check_number("step_timeout", self.step_timeout, 0, math.inf, low_open=True)
        check_parsers(self)
        check_choice("log_level", self.log_level, get_args(LogLevel))
        check_choice("log_format", self.log_format, get_args(LogFormat))
        for name, low in _LOWEST.items():
            check_int(name, getattr(self, name), low, _HIGHEST.get(name))
        if self.max_buffered_bytes < self.max_body_bytes:
            allowed = f"at least max_body_bytes ({self.max_body_bytes})"
            raise ArgumentError("max_buffered_bytes", self.max_buffered_bytes, allowed)
        for name in ("head_timeout", "body_timeout", "write_timeout", "keep_alive_timeout"):
            check_number(name, getattr(self, name), 0, 86400, low_open=True)
        root = self.root_path
        ok = not root or (root.startswith("/") and not root.endswith("/") and root.isascii())
        check(ok, "root_path", root, "empty or a path such as /llm without a trailing slash")
        for origin in self.allowed_origins:
            scheme, _, host = origin.partition("://")
            ok = origin == "*" or (scheme in ("http", "https") and bool(host) and "/" not in host)
            check(ok, "allowed_origins", origin, "* or an origin such as https://chat.example.org")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            ok = self.ssl_certfile is not None or getattr(self, name) is None
            check(ok, name, getattr(self, name), "unset unless ssl_certfile is set")
        ok = self.ssl_certfile is None or self.ssl_keyfile is not None
        check(ok, "ssl_keyfile", self.ssl_keyfile, "the file of the private key if ssl_certfile is set")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Returns options with the values of parsed arguments. Arguments of other classes are ignored.

        Raises:
            ValueError: If a value is out of range, or two options contradict each other.
        """
        values = values_of(args, ServerOptions)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)


@suggests_fields
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options of run-batch: its files, the output formats of the model, and logging.

    Args:
        input_file: File with one request per line, in the format of OpenAI's Batch API.
        output_file: File to which results are appended, one per line. Requests whose result it already
            contains are skipped.
        served_model_name: Name of the model in the requests. None uses the value of --model.
        tool_call_parser: Format in which the model writes tool calls. Calls in this format are returned as
            tool_calls.
        reasoning_parser: Format in which the model writes its reasoning. Reasoning in this format is returned
            as reasoning, separate from the content.
        log_level: Minimum level of the messages that are logged.
        log_format: Format of the log: "text", or "json" for one JSON object per line.

    Raises:
        ValueError: If both files are the same, or a format is unknown.
    """

    input_file: Path
    output_file: Path
    served_model_name: str | None = None
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None
    log_level: LogLevel = "warning"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        check_parsers(self)
        is_other = self.input_file.resolve() != self.output_file.resolve()
        check(is_other, "output_file", str(self.output_file), "a different file from input_file")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Returns options with the values of parsed arguments. Arguments of other classes are ignored.

        Raises:
            ValueError: If both files are the same, or a format is unknown.
        """
        return cls(**values_of(args, BatchOptions))
