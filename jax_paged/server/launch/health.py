"""Health check of a server on this machine, for containers: `jax-paged health`."""

import http.client
import ssl
from collections.abc import Sequence
from pathlib import Path

from jax_paged.errors import ArgumentError, check
from jax_paged.server.launch.options import ServerOptions

# Wildcard addresses that a server may listen on, each with the loopback address to connect to instead.
_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def check_health(options: ServerOptions, timeout_s: float) -> None:
    """Sends GET /health to a server, at the address and with the protocol (HTTP or HTTPS) in its options.

    Args:
        options: The options with which the server was started.
        timeout_s: Timeout of the check (seconds).

    Raises:
        ValueError: If the port is 0.
        OSError: If the server does not answer, or answers with a status other than 200.
    """
    check(options.port != 0, "port", 0, "the port on which the server listens")
    host = _WILDCARDS.get(options.host, options.host)
    if options.ssl_certfile is None:
        connection = http.client.HTTPConnection(host, options.port, timeout=timeout_s)
    else:
        context = _tls_context(options)
        connection = http.client.HTTPSConnection(host, options.port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(
            f"the server on {host}, port {options.port}, has not sent a valid HTTP response: {error!r}"
        ) from error
    finally:
        connection.close()
    if status != 200:
        raise OSError(f"the server on {host}, port {options.port}, has responded with status {status}")


def options_of_process(process_id: int) -> Sequence[str]:
    """Returns the arguments that follow `jax-paged` (or `serve.py`) in the command line of a running process.

    The command may follow the command of an init process, as in `docker-init -- jax-paged serve ...`.

    Args:
        process_id: Id of the process, such as 1 in a container.

    Raises:
        ValueError: If there is no such process, or its command line does not contain `jax-paged`.
    """
    path = Path("/proc") / str(process_id) / "cmdline"
    try:
        words = path.read_text(encoding="utf-8").split("\0")[:-1]
    except OSError as error:
        raise ArgumentError("pid", process_id, f"the id of a running process ({error})") from error
    places = [i for i, word in enumerate(words) if Path(word).name in ("jax-paged", "serve.py")]
    check(bool(places), "pid", process_id, "the id of a process that runs `jax-paged serve`")
    return words[places[0] + 1 :]


def _tls_context(options: ServerOptions) -> ssl.SSLContext:
    context = ssl.create_default_context()
    # The certificate is issued for the server's public address, and this connection stays on the machine.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if options.ssl_ca_certs is not None:
        # The server requires client certificates, and its own certificate is the only one available here.
        assert options.ssl_certfile is not None, "ssl_ca_certs is set without ssl_certfile"
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    return context
