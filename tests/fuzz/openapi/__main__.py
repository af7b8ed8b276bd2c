"""Test a running service against its OpenAPI document: `make schemathesis ST_S=600`.

Starts `python -m service` on a free port, runs schemathesis (`build/schemathesis/bin/st`) on it,
and stops it. Exits with 1 if schemathesis found something, or if the service logged an error or did
not stop by itself.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.service_process import PROJECT, Service

FOLDER = Path(__file__).parent
KEY = "a-key-of-an-administrator"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.openapi", description=__doc__)
    parser.add_argument("--st", type=Path, default=PROJECT / "build/schemathesis/bin/st")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--weights", str(PROJECT / "weights"), "--port", "0", "--grpc-port", "0"]
        options += ["--admin-keys", KEY]
        service = Service(options, Path(folder))
        try:
            port = service.ready().port
            command = [
                *(arguments.st.resolve(), "--config-file", FOLDER / "schemathesis.toml"),
                *("run", f"http://127.0.0.1:{port}/openapi.json", "--checks", "all"),
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--max-time", str(arguments.seconds), "--seed", str(arguments.seed)),
            ]
            hooks = {**os.environ, "SCHEMATHESIS_HOOKS": str(FOLDER / "hooks.py")}
            found = subprocess.run(command, cwd=folder, env=hooks, check=False).returncode
            service.signal()
            stopped = service.wait()
        finally:
            if service.process.poll() is None:
                service.process.kill()
                service.process.wait()
            service._reader.join()
            service.process.stderr.close()
    errors = [line for line in service.lines if re.search("ERROR|WARNING|Traceback", line)]
    print(*errors, sep="\n")
    print(f"the service ended with {stopped}, and logged {len(errors)} errors")
    return int(bool(found or stopped or errors))


if __name__ == "__main__":
    sys.exit(main())
