"""The pages of docs/tour: their links to lines, the names that they mention, their pictures.

A link whose text is code names a definition: [`EngineCatalog.engine`](../../FILE#LINE) must lead to
the line on which that is defined. `python -m tests.test_tour --write` corrects the line numbers.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour"
IMAGES = TOUR / "images"
PAGES = sorted(TOUR.glob("*.md"))
CODE = ("lenet", "trainer", "service", "benchmarks", "tests", "docs")

LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+)#L(\d+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
COMMIT = re.compile(r"[0-9a-f]{7}")
PATH = re.compile(r"[\w./-]+\.(py|cu|cuh|md|json|txt|safetensors)")

FOREIGN = {
    "nvtx_gpu_proj_sum",  # a report of Nsight Systems
}
"""Names in the pages that no source of ours has."""


@cache
def definitions(path):
    """The line of each definition in a Python or CUDA file, by its name."""
    text = path.read_text()
    found = {}
    if path.suffix != ".py":
        _cuda_definitions(text, found)
        return found
    _python_definitions(ast.parse(text), "", found)
    return found


def _python_definitions(node, owner, found):
    for child in node.body:
        names = []
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [child.name]
        elif isinstance(child, ast.Assign):
            names = [target.id for target in child.targets if isinstance(target, ast.Name)]
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            names = [child.target.id]
        found |= {f"{owner}{name}": child.lineno for name in names}
        if isinstance(child, ast.ClassDef):
            _python_definitions(child, f"{owner}{child.name}.", found)


def _cuda_definitions(text, found):
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
    for match in re.finditer(r"\b(?:struct|namespace) (\w+)[^;{]*\{", code):
        found.setdefault(match[1], code.count("\n", 0, match.start(1)) + 1)
    for match in re.finditer(r"\bconstexpr \w+ (?:\w+ = [^;]*?, )*?(\w+) = ", code):
        found.setdefault(match[1], code.count("\n", 0, match.start(1)) + 1)
    for match in re.finditer(r"\b(\w+)\(", code):
        depth, end = 1, match.end()
        while depth and end < len(code):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        named = match[1] not in ("if", "for", "while", "switch", "__launch_bounds__")
        if named and re.match(r"\s*(const)?\s*\{", code[end:]):
            found.setdefault(match[1], code.count("\n", 0, match.start(1)) + 1)


@cache
def tracked():
    """The files of the repository, with those that are about to be added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(listed.stdout.splitlines())


@cache
def vocabulary():
    """Every name in our sources: comments and documentation do not count."""
    words = set()
    for path in tracked():
        if not path.startswith(CODE) or not (ROOT / path).is_file():
            continue
        if path.endswith((".cu", ".cuh")):
            words |= set(re.findall(r"\w+", re.sub(r"//[^\n]*", "", (ROOT / path).read_text())))
        elif path.endswith(".py") and path != "tests/test_tour.py":
            words.add(Path(path).stem)
            # Without docstrings. A walk through the syntax tree takes three times as long.
            _names(compile((ROOT / path).read_text(), path, "exec", optimize=2), words)
    for path in tracked():
        words |= set(Path(path).parts)  # folders
    return words


def _names(code, words):
    """Add the names and the strings of a code object, and of those within it, to `words`."""
    words.update(code.co_names, code.co_varnames, code.co_cellvars, {code.co_name})
    constants = list(code.co_consts)
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):  # names of keyword arguments, too
            constants += constant
        elif isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, CodeType):
            _names(constant, words)


def prose(page):
    """The text of a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def corrected(page):
    """The page's text with the right lines, and what cannot be corrected."""
    problems = []

    def replaced(link):
        symbol, target, _ = link.groups()
        path = (page.parent / target).resolve()
        if not path.is_file():
            problems.append(f"{link[0]}: there is no such file")
            return link[0]
        line = definitions(path).get(symbol)
        if line is None:
            problems.append(f"{link[0]}: {path.name} does not define it")
            return link[0]
        return f"[`{symbol}`]({target}#L{line})"

    return LINK.sub(replaced, page.read_text()), problems


def test_each_link_to_a_definition_leads_to_its_line():
    for page in PAGES:
        text, problems = corrected(page)
        assert problems == []
        assert text == page.read_text(), "python -m tests.test_tour --write corrects the lines"


def test_every_name_of_code_in_the_prose_exists():
    for code in re.findall(r"`([^`\n]+)`", "\n".join(map(prose, PAGES))):
        if PATH.fullmatch(code):
            ending = f"/{code.lstrip('./')}"
            assert any(f"/{path}".endswith(ending) for path in tracked()), code
        elif NAME.fullmatch(code) and not COMMIT.fullmatch(code):
            missing = [part for part in code.split(".") if part not in vocabulary() | FOREIGN]
            assert missing == [], code


@pytest.mark.parametrize("check", sorted((TOUR / "checks").glob("*.py")), ids=lambda one: one.stem)
def test_each_check_of_a_page_passes_and_prints(check):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, check]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_pictures_are_what_their_script_draws(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, TOUR / "pictures.py", tmp_path]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made.keys() == {path.name for path in IMAGES.iterdir()}
    for name, content in made.items():
        assert (IMAGES / name).read_text() == content, f"{name}: python docs/tour/pictures.py"


def test_every_picture_is_shown_with_a_description():
    text = "\n".join(map(prose, PAGES))
    shown = dict(re.findall(r"!\[([^\]]+)\]\(images/([\w-]+\.svg)\)", text))
    assert set(shown.values()) == {path.name for path in IMAGES.iterdir()}
    assert all(len(description) > 20 for description in shown)


def rows(page, first):
    """The cells of the rows of a page's tables whose first cell matches."""
    found = re.findall(rf"^\| ({first}) \|(.*)\|$", (TOUR / page).read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def test_errors_and_times_are_those_of_the_recorded_benchmarks():
    engine = json.loads((ROOT / "docs/benchmarks/engine.json").read_text())
    errors = rows("precision.md", "`\\w+`")
    for precision in ("fp16", "tf32", "fp32"):
        for column, strategy in enumerate(("fused_network", "layer_by_layer")):
            found = [
                bucket["max_error"]
                for bucket in engine["buckets"]
                if (bucket["precision"], bucket["way"]) == (precision, strategy)
            ]
            assert errors[f"`{precision}`"][column] == (f"{max(found):.1e}" if found else "-")
    single = rows("fused-network.md", "fp16, fused network|TF32, layer by layer")
    ways = {"fp16": "fused_network", "tf32": "layer_by_layer"}
    for (precision, way), found in zip(ways.items(), single.values(), strict=True):
        (one,) = [
            bucket
            for bucket in engine["buckets"]
            if (bucket["rows"], bucket["precision"], bucket["way"]) == (1, precision, way)
        ]
        assert found == [f"{one[name]:.1f}" for name in ("device_us", "host_us")]
    lstm = json.loads((ROOT / "docs/benchmarks/lstm.json").read_text())
    times = rows("lstm.md", "`\\w+`, \\d+")
    assert len(times) == 6
    for case, cells in times.items():
        precision, batch = case.replace("`", "").split(", ")
        measured = lstm["precisions"][precision]["inference"][batch]
        names = ("cudnn_us", "emulated_us", "cudnn_called_us", "emulated_called_us")
        assert cells == [f"{measured[name] / 1e3:.1f}" for name in names]
    text = (TOUR / "lstm.md").read_text()
    for precision, by_version in lstm["differences"].items():
        assert f"{by_version['cudnn']['outputs']:.1e} in " in text, precision
    table = rows("one-convolution.md", "forward|gradient of the \\w+")
    recorded = (ROOT / "docs/benchmarks/inspect-mixed.txt").read_text()
    for part, found in zip(
        ("forward", "weight gradient", "input gradient"), table.values(), strict=True
    ):
        (line,) = re.findall(rf"^conv2 +{part} .*$", recorded, re.MULTILINE)
        *_, workspace, took, _, engine_name = line.split()
        assert found == [engine_name.split("_")[0].removeprefix("eng"), took, f"{int(workspace):,}"]


def main():
    """Correct the line numbers; 1 if a definition is missing."""
    failed = False
    for page in PAGES:
        text, problems = corrected(page)
        for problem in problems:
            print(f"{page.name}: {problem}")
            failed = True
        if sys.argv[1:] == ["--write"]:
            page.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
