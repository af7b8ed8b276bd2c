"""Each example against the running service: it says that the picture shows a seven."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.service_process import PATIENCE_S, PROJECT, committed

EXAMPLES = {
    "predict.sh": (("sh",), "http://127.0.0.1:{http}", r'"label":7,.*\n.*"label":7,.*"label":3,'),
    "predict.py": ((sys.executable,), "http://127.0.0.1:{http}", r"^7 99.*\n7 99"),
    "triton_http.py": ((sys.executable,), "127.0.0.1:{http}", r"^7 [\d.]+:7:7 "),
    "triton_grpc.py": ((sys.executable,), "127.0.0.1:{grpc}", r"^7 1 different of 32"),
    "kserve_client.py": ((sys.executable,), "http://127.0.0.1:{http}", r"^7 [\d.]+\n7 [\d.]+$"),
    "predict.mjs": (("node",), "http://127.0.0.1:{http}", r"^7 [\d.]+$"),
}
NEEDS = {"predict.sh": "curl", "predict.mjs": "node"}
PACKAGES = {
    "predict.py": "httpx",
    "kserve_client.py": "kserve",
    "triton_http.py": "tritonclient",
    "triton_grpc.py": "tritonclient",
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    with committed(tmp_path_factory.mktemp("service"), "--models", "lenet") as service:
        yield service


def test_every_example_is_tested():
    names = {path.name for path in (PROJECT / "examples").iterdir() if path.suffix != ".md"}
    assert names - {"__pycache__"} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_reads_the_seven(serving, name):
    program, address, said = EXAMPLES[name]
    tool, package = NEEDS.get(name), PACKAGES.get(name)
    if tool is not None and shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    address = address.format(http=serving.port, grpc=serving.grpc_port)
    line = [*program, str(PROJECT / "examples" / name), address]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout
