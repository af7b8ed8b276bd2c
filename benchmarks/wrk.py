"""wrk as a load generator: written in C, it uses far less CPU time than one in Python.

It sends prepared bodies in turn over kept-alive connections, in a closed loop, and checks only the
status of the answers; `benchmarks.load_test` checks their content.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """\
local file = io.open({bodies}, "rb")
local requests = {{}}
for _, length in ipairs({{{lengths}}}) do
  requests[#requests + 1] = file:read(length)
end
file:close()
local next_request = 0

function init(args)
  local headers = {{["Content-Type"] = {content_type}}}
  for i, body in ipairs(requests) do
    requests[i] = wrk.format("POST", {path}, headers, body)
  end
end

function request()
  next_request = next_request % #requests + 1
  return requests[next_request]
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\\nRESULT {{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"max_us":%d,' ..
    '"bad_status":%d,"socket_errors":%d}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    latency.max, errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
"""


class WrkFailed(Exception):
    """wrk is missing, ended in error, or got bad answers; the message says which."""


@dataclass(frozen=True, slots=True)
class WrkResult:
    """The numbers of a run in which every answer was 2xx."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def find_wrk() -> str:
    """The path of wrk.

    Raises:
        WrkFailed: it is not installed.
    """
    path = shutil.which("wrk")
    if path is None:
        raise WrkFailed(
            "wrk is not on the PATH; it generates the load. Install it (Debian and Ubuntu: "
            "apt-get install wrk; macOS: brew install wrk) and try again"
        )
    return path


def write_script(folder: Path, path: str, content_type: str, bodies: Sequence[bytes]) -> Path:
    """Write a Lua script to `folder` that sends `bodies` in turn and prints its result as JSON."""
    content = folder / "bodies"
    content.write_bytes(b"".join(bodies))
    script = folder / "requests.lua"
    script.write_text(
        _SCRIPT.format(
            bodies=_lua(str(content)),
            lengths=",".join(str(len(body)) for body in bodies),
            content_type=_lua(content_type),
            path=_lua(path),
        ),
        encoding="utf-8",
    )
    return script


def run_wrk(
    wrk: str, script: Path, url: str, connections: int, duration_s: int, threads: int = 1
) -> WrkResult:
    """One run on `threads` threads, at most one per connection.

    Raises:
        WrkFailed: it ended in error, or an answer was not 2xx, or a connection broke.
    """
    arguments = [f"-t{threads}", f"-c{connections}", f"-d{duration_s}s", "--timeout", "30s"]
    done = subprocess.run(
        [wrk, *arguments, "-s", str(script), url],
        capture_output=True,
        text=True,
        timeout=duration_s + 60,
        check=False,
    )
    return parse_output(done.stdout, done.stderr)


def parse_output(output: str, errors: str = "") -> WrkResult:
    """The result that the script printed in its last line.

    Raises:
        WrkFailed: there is none, or it counts failures.
    """
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise WrkFailed(f"wrk ended without a result: {(errors or output).strip()[-500:]}")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    if result["bad_status"] or result["socket_errors"] or not result["requests"]:
        raise WrkFailed(
            f"of {result['requests']} answers {result['bad_status']} were not 2xx, and "
            f"{result['socket_errors']} connections broke or timed out; expected neither"
        )
    return WrkResult(
        requests=result["requests"],
        requests_per_s=result["requests"] / result["duration_us"] * 1e6,
        p50_ms=result["p50_us"] / 1e3,
        p99_ms=result["p99_us"] / 1e3,
        max_ms=result["max_us"] / 1e3,
    )


def _lua(text: str) -> str:
    """`text` as a Lua string, with decimal escapes for everything but plain ASCII."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03d}"
        for byte in text.encode()
    )
    return f'"{plain}"'
