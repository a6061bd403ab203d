"""The OpenAPI document is true: all routes are in it, and nothing that it allows breaks the gateway."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from starlette.routing import Route

from tests.gateway.conftest import Stack, Start


def test_all_routes_are_described(stack: Stack) -> None:
    described = stack.http.get("/openapi.json").json()["paths"]
    found = set()
    for route in stack.app.router.routes:
        assert isinstance(route, Route)
        path = re.sub(r":path}", "}", route.path)
        if path == "/openapi.json":
            continue
        methods = {m.lower() for m in (route.methods or set()) - {"HEAD"}}
        assert methods == set(described[path]) - {"parameters"}, path
        found.add(path)
    assert found == set(described)


def schemathesis(stack: Stack, examples: int) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{stack.url}/openapi.json"]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += ["--max-examples", str(examples), "--phases", "fuzzing", "--seed", "1", "--suppress-health-check", "all"]
    # What is refused as a whole, what needs a worker that exists, and what says 501 by design.
    command += ["--exclude-path", "/v1/embeddings", "--exclude-path-regex", "^/admin"]
    command += ["--header", "Authorization: Bearer client", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_schemathesis_finds_no_server_error(start: Start) -> None:
    stack = start(api_key="client")
    stack.engine.tolerant = True
    schemathesis(stack, 5)


@pytest.mark.long
def test_schemathesis_finds_no_server_error_in_many_examples(start: Start) -> None:
    stack = start(api_key="client")
    stack.engine.tolerant = True
    schemathesis(stack, 300)
