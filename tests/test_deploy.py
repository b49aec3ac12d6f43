"""The files in deploy/ name options, files and routes that there are."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jax_paged.config import EngineArgs
from jax_paged.server.cli import parse_args
from jax_paged.server.life import REQUESTS_CUT_OFF
from jax_paged.server.options import ServerOptions

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


def command_lines():
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    yield "Dockerfile", [*json.loads(entry), *json.loads(command)]
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^    command: \[(.*)\]$", compose, re.MULTILINE)
    yield "compose.yaml", [*json.loads(entry), *listed.split(", ")]
    unit = (DEPLOY / "systemd" / "jax-paged.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (arguments,) = re.findall(r'^Environment="JAX_PAGED_ARGS=(.*)"$', unit, re.MULTILINE)
    yield "jax-paged.service", shlex.split(start.replace("$JAX_PAGED_ARGS", arguments))


@pytest.mark.parametrize(("file", "words"), command_lines())
def test_command_lines_are_understood(file, words):
    program, *rest = words
    assert Path(program).name == "jax-paged"
    args = parse_args(rest)
    assert EngineArgs.from_cli_args(args).model == "pagelet"
    options = ServerOptions.from_cli_args(args)
    assert options.log_format == "json"
    assert options.port == 8000


def test_the_unit_waits_longer_than_the_server_drains():
    unit = (DEPLOY / "systemd" / "jax-paged.service").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(seconds) > ServerOptions().shutdown_timeout
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^    stop_grace_period: (\d+)s", compose, re.MULTILINE)
    assert int(seconds) > ServerOptions().shutdown_timeout


def test_a_unit_that_cut_requests_off_when_it_stopped_has_not_failed():
    unit = (DEPLOY / "systemd" / "jax-paged.service").read_text(encoding="utf-8")
    assert re.findall(r"^SuccessExitStatus=(.*)$", unit, re.MULTILINE) == [str(REQUESTS_CUT_OFF)]


def test_files_that_compose_mounts_are_there():
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    mounted = re.findall(r"- (\./[^:]+):", compose)
    assert len(mounted) == 3
    for name in mounted:
        assert (DEPLOY / name).exists()
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "jax-paged.json").read_text(encoding="utf-8"))
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel lies over another
    assert max(x for x, _ in cells) < 24
