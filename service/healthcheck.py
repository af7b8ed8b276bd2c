"""`python -m service.healthcheck`: asks the service on this machine whether it is ready.

Exit code 0 is ready; otherwise 1, and a line says why not. Docker and systemd run it.

It reads the variables of the service, not its flags: LENET_HOST (0.0.0.0 and :: are asked at the
loopback address), LENET_PORT, LENET_TLS_CERTIFICATE and LENET_TLS_CLIENT_CA. For a service that was
started with --port 9000: LENET_PORT=9000 python -m service.healthcheck
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection

# Read here, although `settings` knows them: importing it takes 0.18 s of a core, this 0.04.
_HOST, _PORT = "127.0.0.1", "8000"
_PORT_VARIABLES = ("LENET_PORT", "AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT")
_LOOPBACK = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}  # noqa: S104 - not bound
_TIMEOUT_S = 2.0


def main(arguments: Sequence[str]) -> str | None:
    """Print the help or check; what `sys.exit` takes."""
    if list(arguments) in (["--help"], ["-h"]):
        print(__doc__)
        return None
    if arguments:
        return f"got {arguments[0]}, expected no argument but --help"
    return obstacle()


def obstacle() -> str | None:
    """Why the service on this machine is not ready, at `LENET_HOST` and `LENET_PORT`.

    Where clients need certificates (`LENET_TLS_CLIENT_CA`), which this one has not: why the port is
    not open, as it is once the service is ready.
    """
    host = os.environ.get("LENET_HOST") or _HOST
    variable = next(filter(os.environ.get, _PORT_VARIABLES), "LENET_PORT")
    given = os.environ.get(variable) or _PORT
    if not given.isdecimal():
        return f"{variable} is {given!r}, expected the number of the service's port"
    problem = None
    for name in host.split(","):
        for address in _LOOPBACK.get(name.strip(), (name.strip(),)):
            problem = _ask(address, int(given))
            if problem is None:
                return None
    return problem


def _ask(host: str, port: int) -> str | None:
    connection = HTTPConnection(host, port, timeout=_TIMEOUT_S)
    if os.environ.get("LENET_TLS_CERTIFICATE"):
        # Nobody else listens at this address, and the certificate has another name.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    asked = f"/readyz at {f'[{host}]' if ':' in host else host}:{port}"
    try:
        if os.environ.get("LENET_TLS_CLIENT_CA"):
            socket.create_connection((host, port), _TIMEOUT_S).close()
            return None
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            status = connection.getresponse().status
    except (OSError, OverflowError, HTTPException) as exc:
        return f"{asked}: {type(exc).__name__}: {exc}"
    return None if status == 200 else f"{asked}: got {status}, expected 200"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
