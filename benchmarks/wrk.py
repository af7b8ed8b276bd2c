"""wrk as a load generator: written in C, it uses far less CPU time than one in Python.

It sends prepared bodies in turn over kept-alive connections, in a closed loop, and checks only the
status of the answers; `benchmarks.load_test` checks their content.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HANG_S = 60

_SCRIPT = """\
local file = io.open({bodies}, "rb")
local requests = {{}}
for _, length in ipairs({{{lengths}}}) do
  requests[#requests + 1] = file:read(length)
end
file:close()

wrk.method, wrk.path, wrk.headers = "POST", {path}, {{{headers}}}
wrk.body = requests[1]

-- Without `request`, wrk formats one request and calls no Lua while it sends it.
if #requests > 1 then
  local next_request = 0

  function init(args)
    for i, body in ipairs(requests) do
      requests[i] = wrk.format(nil, nil, nil, body)
    end
  end

  function request()
    next_request = next_request % #requests + 1
    return requests[next_request]
  end
end

-- The 50th and 99th percentile of the requests that were sent. wrk has added to their latencies
-- those of requests that a caller at a constant rate would have sent meanwhile: behind each that
-- took n, more than twice the mean, it counts n - mean, n - 2 mean, ... down to the mean. So the
-- requests slower than x >= mean are as many as are now counted in (x, x + mean].
local function sent_percentiles(summary, latency)
  local per_connection = math.floor(summary.requests / tonumber(os.getenv("{connections}")))
  if per_connection == 0 then
    return latency:percentile(50), latency:percentile(99)
  end
  local mean = math.floor(summary.duration / per_connection)
  local values, counts, upper, slower, p99 = {{}}, {{}}, 1, 0, nil
  for i = #latency, 1, -1 do
    local value, count = latency(i)
    values[#values + 1], counts[#counts + 1] = value, count
    slower = slower + count
    while values[upper] > math.max(value - 1, mean) + mean do
      slower = slower - counts[upper]
      upper = upper + 1
    end
    if slower > summary.requests * 0.01 then
      p99 = p99 or value
    end
    if slower > summary.requests * 0.5 then
      return value, p99
    end
  end
  return 0, 0
end

function done(summary, latency, requests)
  local errors, start_s = summary.errors, os.clock()
  local p50, p99 = sent_percentiles(summary, latency)
  io.write(string.format(
    '\\nRESULT {{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"max_us":%d,' ..
    '"sent_p50_us":%d,"sent_p99_us":%d,"done_s":%f,"bad_status":%d,"socket_errors":%d}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    latency.max, p50, p99, os.clock() - start_s, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
"""

_CONNECTIONS = "WRK_CONNECTIONS"


class WrkFailed(Exception):
    """wrk is missing, ended in error, or got bad answers; the message says which."""


@dataclass(frozen=True, slots=True)
class WrkResult:
    """The numbers of a run in which every answer was 2xx.

    `p50_ms`, `p99_ms`: as wrk prints them, with the latencies that it adds behind slow answers for
    requests that were due meanwhile at a constant rate. `sent_p50_ms`, `sent_p99_ms`: of the
    requests that were sent. `busy`: wrk's CPU time as a share of the duration of all its threads;
    at 1 it is the limit.
    """

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    sent_p50_ms: float
    sent_p99_ms: float
    max_ms: float
    busy: float


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


def write_script(
    folder: Path,
    path: str,
    content_type: str,
    bodies: Sequence[bytes],
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Write a Lua script to `folder` that sends `bodies` in turn and prints its result as JSON.

    `headers` are sent with each, in addition to the content type.
    """
    content = folder / "bodies"
    content.write_bytes(b"".join(bodies))
    script = folder / "requests.lua"
    script.write_text(
        _SCRIPT.format(
            bodies=_lua(str(content)),
            lengths=",".join(str(len(body)) for body in bodies),
            headers=", ".join(
                f"[{_lua(name)}] = {_lua(value)}"
                for name, value in {"Content-Type": content_type, **(headers or {})}.items()
            ),
            path=_lua(path),
            connections=_CONNECTIONS,
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
    before_s = _children_cpu_s()
    try:
        done = subprocess.run(
            [wrk, *arguments, "-s", str(script), url],
            capture_output=True,
            text=True,
            timeout=duration_s + _HANG_S,
            check=False,
            env={**os.environ, _CONNECTIONS: str(connections)},
        )
    except subprocess.TimeoutExpired as exc:
        raise WrkFailed(f"wrk did not end {_HANG_S} s after its {duration_s} s") from exc
    return parse_output(done.stdout, done.stderr, _children_cpu_s() - before_s, threads)


def _children_cpu_s() -> float:
    """The CPU time of all ended child processes of this one."""
    times = os.times()
    return times.children_user + times.children_system


def parse_output(output: str, errors: str = "", cpu_s: float = 0.0, threads: int = 1) -> WrkResult:
    """The result that the script printed in its last line; `cpu_s` is the CPU time of wrk.

    Raises:
        WrkFailed: there is none, or it counts failures.
    """
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise WrkFailed(f"wrk ended without a result: {(errors or output).strip()[-500:]}")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    if result["bad_status"] or result["socket_errors"]:
        raise WrkFailed(
            f"of {result['requests']} answers {result['bad_status']} were not 2xx, and "
            f"{result['socket_errors']} connections broke or timed out; expected neither"
        )
    if not result["requests"]:
        raise WrkFailed("no answer arrived during the run: it was too short, or nothing answers")
    return WrkResult(
        requests=result["requests"],
        requests_per_s=result["requests"] / result["duration_us"] * 1e6,
        p50_ms=result["p50_us"] / 1e3,
        p99_ms=result["p99_us"] / 1e3,
        sent_p50_ms=result["sent_p50_us"] / 1e3,
        sent_p99_ms=result["sent_p99_us"] / 1e3,
        max_ms=result["max_us"] / 1e3,
        busy=(cpu_s - result["done_s"]) / (result["duration_us"] / 1e6 * threads),
    )


def _lua(text: str) -> str:
    """`text` as a Lua string, with decimal escapes for everything but plain ASCII."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03d}"
        for byte in text.encode()
    )
    return f'"{plain}"'
