"""The built packages: a source archive, and a wheel that serves by itself."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes

import pytest

from tests.service_process import PATIENCE_S, PROJECT, Service

pytestmark = pytest.mark.process  # builds and installs the distribution

PACKAGES = ("lenet", "service", "trainer", "wire")
BESIDE = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


def python(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with both, built of a copy of the checkout in which earlier builds left files."""
    checkout, dist = (tmp_path_factory.mktemp(name) for name in ("checkout", "dist"))
    for name in (*PACKAGES, "weights", "tests"):
        shutil.copytree(PROJECT / name, checkout / name, symlinks=True)
    for name in (*BESIDE, "constraints.txt"):
        shutil.copy(PROJECT / name, checkout)
    for place in ("build/lib/service/removed.py", "service/engine/queue.py.orig", "lenet2/a.py"):
        (checkout / place).parent.mkdir(parents=True, exist_ok=True)
        (checkout / place).touch()
    # The wheel is built of the unpacked source archive. Without isolation no index is needed.
    python("build", "--no-isolation", "--outdir", dist, checkout)
    return dist


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def sources():
    """Every file of the packages, weight files included, as they are in the checkout."""
    for package in PACKAGES:
        for path in (PROJECT / package).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield path.relative_to(PROJECT).as_posix()
    for path in (PROJECT / "weights").glob("*/*.safetensors"):
        yield f"service/{path.relative_to(PROJECT).as_posix()}"


def test_archive_and_wheel_hold_the_packages_and_the_weights_and_nothing_else(built, wheel):
    with zipfile.ZipFile(wheel) as file:
        shipped = {name for name in file.namelist() if ".dist-info/" not in name}
    assert shipped == set(sources())
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        inside = {
            name.partition("/")[2] for name in file.getnames() if file.getmember(name).isfile()
        }
    made = {name for name in inside if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert inside - made == {*sources(), *BESIDE, "constraints.txt"}


def test_the_metadata_is_complete_when_an_index_or_pip_show_reads_it(built, wheel):
    python("twine", "check", "--strict", *built.iterdir())
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(file.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    for field in ("Summary", "Author", "Keywords", "Classifier", "Requires-Python"):
        assert metadata[field], field


def test_the_wheel_reads_a_digit_when_the_service_is_started_in_an_empty_folder(wheel, tmp_path):
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    python("pip", "install", "--quiet", "--no-index", "--no-deps", "--target", installed, wheel)
    ports = ("--port", "0", "--grpc-port", "0", "--device", "cpu")
    service = Service(ports, empty, (installed / "bin" / "lenet-serve",), root=installed)
    try:
        service.ready()
        service.wait_for(f"read lenet/2, .* from {installed}/service/weights: ")
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
        seven = (PROJECT / "docs" / "images" / "seven.png").read_bytes()
        connection.request("POST", "/predict", seven, {"Content-Type": "image/png"})
        assert b'"label":7,' in connection.getresponse().read()
        connection.close()
    finally:
        service.end()
    assert list(empty.iterdir()) == [service.temporary]
