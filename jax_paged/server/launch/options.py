"""The server's own settings, each an option of the command line; the engine's are in config.py."""

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

# The least and the highest value of each limit that is a number of things.
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
# A check of nested values calls itself, and the engine has limits of its own.
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
    """Raises ValueError if options name a format that is not known."""
    for name, choices in (("tool_call_parser", ToolCallParser), ("reasoning_parser", ReasoningParser)):
        check_choice(name, getattr(options, name), (None, *get_args(choices)))


@suggests_fields
@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How the server listens, and what it lets clients do.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        served_model_name: The model's name for clients; None takes the value of --model.
        chat_template: A Jinja template in place of the tokenizer's own, or the file that holds it.
        tool_call_parser: How the model writes calls of tools, which answers then have as tool_calls.
        reasoning_parser: How the model thinks; answers then have its thoughts apart, as reasoning.
        strict: Whether fields that the server does not know are errors; else they are ignored, and the header
            X-Ignored-Fields of the answer names them.
        lora_modules: Adapters that requests may name as their model, as name=path; needs enable_lora.
        allow_runtime_lora_updating: Whether clients may load and unload adapters, from any folder of this
            machine that the server can read.
        max_num_waiting: Requests that may wait for the engine; more are answered with status 429.
        shutdown_timeout: Seconds that running requests have to end after SIGTERM or Ctrl-C, before they are
            cut off; a second signal cuts them off at once.
        step_timeout: Seconds after which a step of the engine counts as hung: all requests are ended with an
            error, and so is the server.
        stay_on_engine_failure: Whether a server whose engine has failed stays, and answers that it has,
            instead of exiting with status 4.
        log_level: The least severe level that is logged; "warning" leaves out the line per request.
        log_format: "text", or "json" for an object per line.
        developer_routes: Whether there are /sleep, /wake_up, /is_sleeping, /update_weights, /weight_version:
            whoever may call them can stop the service, and have it read folders of this machine.
        ui: Whether there is a page at / that shows what runs here, and chats.
        api_key: A key that clients must send as "Authorization: Bearer KEY"; may be given several times.
            Other users of the machine see command lines: --api-key-file and the environment variable
            JAX_PAGED_API_KEY, whose keys are added, are better places.
        api_key_file: File of keys, one per line.
        allow_unauthenticated: Serve everybody who can reach the address, although it is not a loopback
            address and there is no key.
        allowed_origins: Origin whose web pages may send requests, such as https://chat.example.org, or * for
            all; may be given several times.
        root_path: Path under which a proxy serves this server, such as /llm.
        ssl_keyfile: File of the TLS certificate's private key, in PEM and not encrypted.
        ssl_certfile: File of the TLS certificate, in PEM; makes the server speak HTTPS only.
        ssl_ca_certs: File of the authorities that sign clients' certificates; clients must then show one.
        max_connections: Connections that are open at the same time.
        max_header_bytes: Bytes of a request's first line and its headers.
        max_headers: Number of a request's headers.
        max_body_bytes: Bytes of a request's body.
        max_buffered_bytes: Bytes of all bodies together that are being received.
        max_json_depth: How deep arrays and objects of a body may be nested.
        max_json_containers: Number of arrays and objects of a body.
        max_prompts: Prompts of a completion request.
        max_messages: Messages of a chat.
        max_stop_strings: Stop strings of a request.
        max_stop_characters: Characters of all stop strings of a request.
        head_timeout: Seconds from the first byte of a request to the end of its headers; a new connection has
            as long to send its first byte.
        body_timeout: Seconds from the end of a request's headers to the end of its body.
        write_timeout: Seconds after which a client that reads nothing of its answer is cut off.
        keep_alive_timeout: Seconds that a connection stays open without a request.
        ray: Replicas of the server that Ray Serve runs on this machine, behind one address; needs
            jax-paged[ray]. None runs one server without Ray.

    Raises:
        ValueError: If a value is out of range.
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
            allowed = f"at least max_body_bytes, which is {self.max_body_bytes}"
            raise ArgumentError("max_buffered_bytes", self.max_buffered_bytes, allowed)
        for name in ("head_timeout", "body_timeout", "write_timeout", "keep_alive_timeout"):
            check_number(name, getattr(self, name), 0, 86400, low_open=True)
        root = self.root_path
        ok = not root or (root.startswith("/") and not root.endswith("/") and root.isascii())
        check(ok, "root_path", root, "empty or a path such as /llm")
        for origin in self.allowed_origins:
            scheme, _, host = origin.partition("://")
            ok = origin == "*" or (scheme in ("http", "https") and bool(host) and "/" not in host)
            check(ok, "allowed_origins", origin, "* or an origin such as https://chat.example.org")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            ok = self.ssl_certfile is not None or getattr(self, name) is None
            check(ok, name, getattr(self, name), "unset without ssl_certfile")
        ok = self.ssl_certfile is None or self.ssl_keyfile is not None
        check(ok, "ssl_keyfile", self.ssl_keyfile, "the file of the key with ssl_certfile")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If a value is out of range.
        """
        values = values_of(args, ServerOptions)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)


@suggests_fields
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Which file of requests is run, and where the answers go.

    Args:
        input_file: Requests, one per line, in the format of OpenAI's Batch API.
        output_file: Takes the answers, one per line; what it names already is not run again.
        served_model_name: The model's name in the requests; None takes the value of --model.
        tool_call_parser: As for the server, as is reasoning_parser.
        reasoning_parser: How the model thinks.
        log_level: The least severe level that is logged.
        log_format: "text", or "json" for an object per line.

    Raises:
        ValueError: If both files are the same.
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
        check(is_other, "output_file", str(self.output_file), "another file than input_file")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If both files are the same.
        """
        return cls(**values_of(args, BatchOptions))
