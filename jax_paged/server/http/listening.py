"""Server socket settings: uvicorn's configuration, TLS files, and checks before listening."""

import ipaddress
import resource
import ssl
from collections.abc import Callable
from socket import socket
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from jax_paged.errors import ArgumentError
from jax_paged.server.http.http_protocol import limited_protocol
from jax_paged.server.launch.options import ServerOptions

# Number of open files that the server needs in addition to its connections.
_OWN_FILES = 128


def uvicorn_config(app: ASGIApp | str, options: ServerOptions, **settings: Any) -> uvicorn.Config:
    """Returns a uvicorn configuration that enforces the limits in the options.

    Args:
        app: The application, or "" if the caller sets it later.
        options: Options of the server.
        settings: Further arguments of uvicorn.Config.
    """
    return uvicorn.Config(
        cast("Callable[..., Any] | str", app),
        options.host,
        options.port,
        http=cast("Any", limited_protocol(options)),
        ws="none",
        log_config=None,  # uvicorn's default configuration would close existing log handlers.
        server_header=False,
        timeout_keep_alive=cast("int", options.keep_alive_timeout),
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
        **settings,
    )


def check_tls(options: ServerOptions) -> None:
    """Checks that the TLS files in the options can be loaded.

    Raises:
        ValueError: If a file cannot be loaded.
    """
    if options.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a callback, OpenSSL would ask for the password of an encrypted key at the terminal.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        allowed = (
            f"a PEM certificate with its unencrypted key in ssl_keyfile, {options.ssl_keyfile!r} ({error})"
        )
        raise ArgumentError("ssl_certfile", options.ssl_certfile, allowed) from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            allowed = f"a PEM file with CA certificates ({error})"
            raise ArgumentError("ssl_ca_certs", options.ssl_ca_certs, allowed) from error


def check_exposure(listener: socket, options: ServerOptions) -> None:
    """Checks that a server without API keys uses a loopback address, unless the options allow another.

    Args:
        listener: The bound socket.
        options: Options of the server, with the API keys from all sources.

    Raises:
        ValueError: If other machines can reach the address, there is no API key, and allow_unauthenticated is
            not set.
    """
    address = listener.getsockname()[0]
    if options.api_key or options.allow_unauthenticated or ipaddress.ip_address(address).is_loopback:
        return
    allowed = "a loopback address such as 127.0.0.1 if the server has no API key"
    remedy = ", which others can reach. Set JAX_PAGED_API_KEY, --api-key-file or --allow-unauthenticated"
    raise ArgumentError("host", options.host, allowed, remedy=remedy)


def allow_open_files(num_connections: int) -> None:
    """Raises the process's limit of open files to `num_connections` plus a reserve for its other files.

    Raises:
        ValueError: If the hard limit of the operating system is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _OWN_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        allowed = f"at most {hard - _OWN_FILES} because the process may open {hard} files (ulimit -Hn)"
        raise ArgumentError("max_connections", num_connections, allowed)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
