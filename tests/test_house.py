"""Rules that span modules: imports, packaging, documents and deployment files."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import lenet
import service
import trainer
import wire
from service.errors import STATUS, ExitCode

ROOT = Path(__file__).parents[1]
GPU = {"cupy", "cupyx", "cudnn"}
WEB = {"fastapi", "starlette", "uvicorn", "grpc", "prometheus_client"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNMEASURED = PROJECT["tool"]["coverage"]["run"]["omit"]
"""Patterns of files without coverage: generated code, and modules that import a GPU library."""


def every_module(package):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [package.__name__, *(module.name for module in found)]


def needs_gpu(name):
    """Whether coverage omits the module for another reason than being generated."""
    path = f"/{name.replace('.', '/')}.py"
    return "_pb2" not in name and any(fnmatch(path, pattern) for pattern in UNMEASURED)


def modules(package):
    """Every module that needs no GPU."""
    return [name for name in every_module(package) if not needs_gpu(name)]


def test_only_the_edge_needs_a_gpu_library_when_modules_are_imported():
    every = {name for package in (lenet, service, trainer, wire) for name in every_module(package)}
    edge = {name for name in every if needs_gpu(name)}
    assert edge
    assert all(name.startswith(("lenet.cuda.", "trainer.ops_cuda.")) for name in edge)
    code = (
        "import importlib, sys\n"
        f"sys.modules |= dict.fromkeys({sorted(GPU)!r})\n"
        f"for name in {sorted(edge)!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: continue\n"
        "    raise SystemExit(f'{name} needs no GPU library: remove it from coverage omit')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        (lenet, GPU | WEB | {"trainer", "service", "wire"}),
        (service, GPU | {"trainer"}),
        (trainer, GPU | WEB | {"service", "wire"}),
        (wire, GPU | WEB | {"lenet", "numpy", "service", "trainer"}),
    ],
    ids=lambda found: getattr(found, "__name__", ""),
)
def test_importing_a_package_does_nothing_and_loads_no_more_than_it_needs(
    package, absent, tmp_path, tmp_path_factory
):
    empty = tmp_path_factory.mktemp("gpu")
    for name in GPU:  # so that they can be found, and loading one shows
        (empty / f"{name}.py").touch()
    code = (
        "import sys, threading, os\n"
        f"for name in {modules(package)!r}: __import__(name)\n"
        "print(' '.join({name.partition('.')[0] for name in sys.modules}))\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert os.listdir() == [], os.listdir()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{empty}{os.pathsep}{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    loaded = set(result.stdout.split())
    assert package.__name__ in loaded
    assert not loaded & absent


@pytest.mark.parametrize("script", PROJECT["project"]["scripts"])
def test_a_console_script_returns_its_exit_code_when_a_flag_is_wrong(script):
    module, function = PROJECT["project"]["scripts"][script].split(":")
    code = f"import sys; from {module} import {function} as run; sys.exit(run())"
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-such-flag"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "--no-such-flag" in result.stderr


ABOUT_OTHER_THINGS = {
    "lenet/cuda/test_emulated.py": "kernels of lenet and trainer, compiled for the host",
    "service/api/test_names.py": "the names of classes in answers of every door",
    "service/pictures/test_several.py": "numbers: `digits=several` of service/pictures/picture.py",
    "trainer/test_kill.py": "whole runs that are killed",
    "trainer/test_statements.py": "rows of docs/reference/statements.md",
    "trainer/test_weights.py": "the committed weight files",
    "wire/test_other_libraries.py": "what h11 and h2 read in our answers",
    "wire/test_readme.py": "wire/README.md",
    "wire/test_statements.py": "rows of docs/reference/statements.md",
}
"""Files of tests that belong to no module, and what they are about."""

NOT_MOVED = {
    "service/api/test_body.py",
    "service/test_every_route.py",
}
"""Files of tests whose module has moved without them."""


def test_a_file_of_tests_has_the_path_of_its_module():
    for package in ("lenet", "service", "trainer", "wire"):
        for path in sorted((ROOT / "tests" / package).rglob("test_*.py")):
            name = path.relative_to(ROOT / "tests").as_posix()
            if name in NOT_MOVED:
                continue
            folder, stem = ROOT / Path(name).parent, path.stem.removeprefix("test_")
            beside = (f"{stem}.py", f"__{stem}__.py", f"{stem}/__init__.py")
            is_package = folder.name == stem and (folder / "__init__.py").is_file()
            is_mirror = is_package or any((folder / one).is_file() for one in beside)
            assert is_mirror != (name in ABOUT_OTHER_THINGS), f"tests/{name} mirrors no module"


def table_rows(first_cell):
    """Rows of the tables, for users of the service, whose first cell matches."""
    documents = [ROOT / "README.md", ROOT / "docs/http.md", ROOT / "docs/operations.md"]
    text = "\n".join(document.read_text() for document in documents)
    return re.findall(rf"^\| {first_cell} \|.*$", text, re.MULTILINE)


def test_the_documents_list_every_exit_code():
    codes = [int(row.split("|")[1]) for row in table_rows(r"\d{1,2}")]
    assert codes == [int(code) for code in ExitCode]


def test_the_documents_list_every_http_error():
    documented = " ".join(table_rows(r"[45]\d\d[\d, ]*"))
    for code, status in STATUS.items():
        if code != "cancelled":  # the client is gone, nobody reads it
            assert f"`{code}`" in documented
            assert str(status) in documented


def test_the_image_bears_the_version_of_the_project():
    dockerfile = (ROOT / "Dockerfile").read_text()
    version = re.search(r'image\.version="(.*?)"', dockerfile)[1]
    assert version == PROJECT["project"]["version"]


def test_every_test_that_holds_a_promise_exists():
    text = (ROOT / "docs/reliability.md").read_text()
    promises = re.findall(r"`(tests/[\w/.]+)::(\w+)`", text)
    assert len(promises) > 40
    for path, name in promises:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name
    for row in re.findall(r"^- .*\btests?/.*$", text, re.MULTILINE):
        assert "::" in row, f"no test in: {row}"
