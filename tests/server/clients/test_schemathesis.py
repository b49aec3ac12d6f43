"""schemathesis: requests as the OpenAPI document allows and forbids them, route by route."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

# Not whether every request that fits the document is accepted: fields depend on each other and on the model.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def test_no_request_breaks_the_server_or_gets_an_answer_that_is_not_documented(start, tmp_path):
    url = start("--max-num-seqs=16", "--max-model-len=128")
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/openapi.json"]
    command += ["--max-examples=500", "--mode=all", "--seed=1", "--no-color", "--continue-on-failure"]
    command += [f"--checks={','.join(CHECKS)}", "--workers=4", "--request-timeout=120"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=3000, check=False)
    assert run.returncode == 0, run.stdout[-20_000:]
    with urllib.request.urlopen(f"{url}/openapi.json") as document:
        num_routes = sum(len(operations) for operations in json.load(document)["paths"].values())
    tested = re.search(r"Tested: (\d+)", run.stdout)
    assert tested is not None
    assert int(tested.group(1)) == num_routes
