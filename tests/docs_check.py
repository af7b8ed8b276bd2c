"""Run the shell commands of README.md and of docs in a temporary clone: `make docs-check`.

`python3 tests/docs_check.py docs/tutorial/first-minute.md ...` runs those of the named files only.

Fenced blocks of the language `sh` are run command by command, with bash, in the clone's root.
A word after the language skips a block and is not rendered, as in ```sh gpu. SKIPS has the words.
A block of the language `json` right after them is what their last command, a curl, has to answer.

- `make serve` runs in the background until the next `make serve` or the end of the document. It is
  started for the first command that talks to port 8000 or 8001, or names PID.
- PID is the process id of the service, and /tmp a folder that is removed at the end. What a
  document's commands change in the clone is undone at the end of the document.
- curl fails on every HTTP error, unless an answer is documented: then that is compared.
- Where LENET_TEST_MNIST names a folder with the MNIST files, the clone has them in data/mnist;
  elsewhere commands that read data/mnist are skipped, and blocks that need what these wrote: the
  word behind `sh` is then mnist.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
HTTP_ERROR = 22
"""Exit code of curl with --fail-with-body, where the status is 400 or more."""
SKIPS = {
    "gpu": "needs a GPU",
    "docker": "needs Docker",
    "promtool": "needs Prometheus",
    "network": "downloads from elsewhere than the package index",
    "long": "takes too long",
    "example": "an example, not run",
}
MNIST = "mnist"
NO_MNIST = "needs MNIST: set LENET_TEST_MNIST to the folder with its four files"
_FENCE = re.compile(
    r"^```sh\b([^\n]*)\n(.*?)^```(?:\s*^```json\n(.*?)^```)?", re.MULTILINE | re.DOTALL
)
_ELIDED = "..."
_SERVES = re.compile(r"make serve\b(?!.*--(help|version)\b)")
_TALKS = re.compile(r"(127\.0\.0\.1|localhost):800[01]|make load-test|\bPID\b")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a document.

    `skip` is the reason not to run it, `answer` the JSON that it has to print; "" for none.
    `mnist`: whether it reads MNIST, or what a command made of it.
    """

    line: int
    text: str
    skip: str
    answer: str = ""
    mnist: bool = False


def commands(document: str) -> Iterator[Command]:
    """The commands of a Markdown document, in order.

    Raises:
        KeyError: a fence bears a word that is not in SKIPS.
    """
    for fence in _FENCE.finditer(document):
        words = fence[1].split()
        skip = ", ".join(SKIPS[word] for word in words if word != MNIST)
        first = document.count("\n", 0, fence.start(2)) + 1
        text, found = "", []
        for number, line in enumerate(fence[2].splitlines(keepends=True), first):
            if not text and (not line.strip() or line.startswith("#")):
                continue
            text += line
            if _is_complete(text):
                mnist = MNIST in words or "data/mnist" in text
                line = number - text.count("\n") + 1
                found.append(Command(line, text.strip(), skip, mnist=mnist))
                text = ""
        if fence[3] is not None and found and "curl" in found[-1].text:
            found[-1] = replace(found[-1], answer=fence[3])
        yield from found


def _is_complete(text: str) -> bool:
    """Whether bash would run `text` now, rather than wait for another line."""
    if text.endswith("\\\n"):
        return False
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    return parsed.returncode == 0 and not parsed.stderr  # an open heredoc is only a warning


def difference(answer: str, expected: str) -> str:
    """The first difference between a JSON answer and the documented one, "" if none.

    `...` in `expected` stands for any value, any further items of a list, or any further keys.
    Numbers are compared to three decimal places.
    """
    text = re.sub(r"(?<=[,{])\s*\.\.\.(?=\s*})", f'"{_ELIDED}": 0', expected)
    text = re.sub(r'(?<!")\.\.\.(?!")', f'"{_ELIDED}"', text)
    try:
        return _difference("answer", json.loads(answer), json.loads(text))
    except ValueError as exc:
        return f"answer or document is not JSON ({exc}): {answer}"


def _difference(place: str, got: object, expected: object) -> str:
    problem = f"{place}: got {json.dumps(got)}, documented is {json.dumps(expected)}"
    if expected == _ELIDED:
        return ""
    if isinstance(got, dict) and isinstance(expected, dict):
        is_open = expected.pop(_ELIDED, None) is not None
        if expected.keys() - got.keys() or (not is_open and got.keys() - expected.keys()):
            return problem
        pairs = [(f"{place}.{key}", got[key], expected[key]) for key in expected]
    elif isinstance(got, list) and isinstance(expected, list):
        if expected[-1:] == [_ELIDED]:
            expected = expected[:-1]
            got = got[: len(expected)]
        if len(got) != len(expected):
            return problem
        both = enumerate(zip(got, expected, strict=True))
        pairs = [(f"{place}[{index}]", *values) for index, values in both]
    elif isinstance(got, float) and isinstance(expected, (int, float)):
        return "" if round(got, 3) == round(expected, 3) else problem
    else:
        return "" if got == expected else problem
    return next(filter(None, (_difference(*pair) for pair in pairs)), "")


def _port(command: str) -> int:
    found = re.search(r"--port (\d+)", command) if _SERVES.match(command) else None
    return int(found[1]) if found else 8000


def taken(texts: Iterable[str]) -> str:
    """The message if another program has the port of a service that commands of `texts` need."""
    serving = [text for text in texts if _SERVES.match(text) or _TALKS.search(text)]
    for port in sorted({_port(text) for text in serving}):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"port {port} is taken by another program: stop that first"
    return ""


class Clone:
    """A clone of the repository's HEAD in `folder`, and the service that runs in it."""

    def __init__(self, folder: Path) -> None:
        self.root, self._tmp = folder / "lenet-serve", folder / "tmp"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.root], check=True)
        self._tmp.mkdir()
        (self._tmp / ".curlrc").write_text("fail-with-body\n")
        if mnist := os.environ.get("LENET_TEST_MNIST"):
            (self.root / "data").mkdir()
            (self.root / "data" / "mnist").symlink_to(Path(mnist).resolve())
        self._env = {name: v for name, v in os.environ.items() if not name.startswith("LENET_")}
        self._env["CURL_HOME"] = str(self._tmp)
        self._service: subprocess.Popen[bytes] | None = None
        self._log = self._tmp / "service.log"

    def lacks(self, command: Command) -> str:
        """The missing requirement of a command, "" if none."""
        mnist = self.root / "data" / "mnist"
        return NO_MNIST if command.mnist and not mnist.exists() else ""

    def run(self, command: str, answer: str = "") -> str:
        """Run a command to its end; the problem in words, "" if there is none.

        If there is a documented `answer`, one that differs is a problem.
        """
        if _SERVES.match(command):
            return self._serve(command)
        if self._service is None and _TALKS.search(command):
            problem = self._serve("make serve")
            if problem:
                return problem
        try:
            result = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", self._local(command)],
                cwd=self.root,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {LIMIT_S} s"
        if result.returncode and not (answer and result.returncode == HTTP_ERROR):
            return f"exit code {result.returncode}\n{result.stdout}"
        return difference(result.stdout, answer) if answer else ""

    def _local(self, command: str) -> str:
        command = command.replace("/tmp/", f"{self._tmp}/")
        if self._service is not None:
            command = re.sub(r"\bPID\b", str(self._pid(self._service.pid)), command)
        return command

    def _pid(self, make: int) -> int:
        children = Path(f"/proc/{make}/task/{make}/children").read_text().split()
        return int(children[0])

    def _serve(self, command: str) -> str:
        self._stop()
        port = _port(command)
        if problem := taken([command]):
            return problem
        with self._log.open("wb") as log:
            self._service = subprocess.Popen(
                ["bash", "-ec", self._local(command)],
                cwd=self.root,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(LIMIT_S):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).close()
                return ""
            except urllib.error.HTTPError as exc:  # it holds the connection
                exc.close()
            except OSError:
                pass
            if self._service.poll() is not None:
                self._service = None
                return f"the service did not start\n{self._log.read_text()}"
            time.sleep(1)
        return f"not ready after {LIMIT_S} s\n{self._log.read_text()}"

    def reset(self) -> None:
        """Stop the service and undo changes of the clone; .venv and data are kept."""
        self._stop()
        for arguments in (["checkout", "--quiet", "."], ["clean", "--quiet", "--force", "-d"]):
            subprocess.run(["git", *arguments], cwd=self.root, check=True)

    def _stop(self) -> None:
        if self._service is not None:
            os.killpg(self._service.pid, signal.SIGINT)  # as Ctrl-C does
            self._service.wait(timeout=60)
            self._service = None


def documents(root: Path, names: Sequence[str]) -> list[Path]:
    """The documents of `names`, relative to `root`, or else README.md and all of docs."""
    if names:
        return [root / name for name in names]
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(names: Sequence[str]) -> int:
    """Run the commands of `names`, or of every document; 1 if a command failed."""
    if subprocess.run(["git", "-C", ROOT, "diff", "--quiet", "HEAD"], check=False).returncode:
        print("uncommitted changes are not checked")
    found = [command for path in documents(ROOT, names) for command in commands(path.read_text())]
    if problem := taken(command.text for command in found if not command.skip):
        print(problem)
        return 1
    failed = 0
    with tempfile.TemporaryDirectory(prefix="lenet-serve-docs-") as folder:
        clone = Clone(Path(folder))
        for path in documents(clone.root, names):
            try:
                for command in commands(path.read_text()):
                    place = f"{path.relative_to(clone.root)}:{command.line}"
                    start_s = time.monotonic()
                    skip = command.skip or clone.lacks(command)
                    problem = "" if skip else clone.run(command.text, command.answer)
                    duration = f"{time.monotonic() - start_s:.1f} s"
                    outcome = "FAILED" if problem else skip or f"ok, {duration}"
                    print(f"{place}: {outcome}: {command.text.splitlines()[0]}", flush=True)
                    if problem:
                        failed += 1
                        print("\n".join(f"    {line}" for line in problem.splitlines()[-20:]))
            finally:
                clone.reset()
    print(f"{failed} commands failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
