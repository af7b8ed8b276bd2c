"""`make reference` writes docs/reference from the code.

Each page is a function that returns Markdown; PAGES says where it goes. A test compares them with
the files.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

from google.protobuf.descriptor_pool import Default
from prometheus_client import CollectorRegistry
from pydantic_core import PydanticUndefined
from pydantic_settings import CLI_SUPPRESS, BaseSettings

from benchmarks import load_test
from lenet import weightfile
from service import errors
from service.api import grpc_methods
from service.api.app import create_app
from service.api.endpoints import image_endpoint
from service.api.paths import image_routes
from service.errors import GRPC_STATUS, STATUS
from service.observe.metrics import Metrics
from service.settings import Settings
from service.warm import Warm
from tests.deploy.promql import registered
from trainer import __main__ as trainer
from trainer import settings as trainer_settings
from wire.errors import Forbidden, Refusal, Unauthorized
from wire.grpc import Method
from wire.keys import Keys

ROOT = Path(__file__).parents[1]


def settings() -> str:
    """Flags and variables of the service."""
    return _page(
        "Settings of the service",
        "`python -m service`, installed `lenet-serve`. A flag wins over a variable; "
        "[operations](../operations.md) says how they work together.",
        _settings_table(Settings),
    )


def metrics() -> str:
    """Metrics, in the order of /metrics."""
    registry = CollectorRegistry()
    Metrics(registry)
    rows = []
    series = registered()
    for family in registry.collect():
        if family.name.startswith("process_"):  # what there is differs between systems
            continue
        total = f"{family.name}_total"
        name = total if total in series else family.name
        sample = name if name in series else f"{name}_count"
        labels = [_label(label, series[sample][label]) for label in series[sample]]
        rows.append((f"`{name}`", family.type, ", ".join(labels), family.documentation))
    return _page(
        "Metrics",
        "`GET /metrics`, in its order. Durations are in seconds; a histogram has the series "
        "`_bucket`, `_sum` and `_count`. On Linux there are also `process_resident_memory_bytes`, "
        "`process_cpu_seconds_total` and `process_open_fds`, with several workers as sums. "
        "[Operations](../operations.md#metrics) has queries to start with, a dashboard and alerts.",
        _list(rows),
    )


def _label(name: str, values: Iterable[str]) -> str:
    closed = name in {"protocol", "stage", "reason", "result", "outcome"}
    return f"`{name}`" + (f" ({', '.join(sorted(values))})" if closed else "")


def routes() -> str:
    """Routes, from the OpenAPI document."""
    document = _openapi()
    sections: dict[str, list[str]] = {}
    first = document["paths"]["/predict"]["post"]
    for path, operations in document["paths"].items():
        if path.replace(_VERSION, "") != path and path.replace(_VERSION, "") in document["paths"]:
            continue
        for method, operation in operations.items():
            section = sections.setdefault(operation["tags"][0], [])
            section.append(_route(f"{method.upper()} {path}", operation, first))
    parts = [
        "Paths, parameters and answers over HTTP/1.1 and HTTP/2. The service shows the same at "
        "`GET /docs`, with schemas and examples, and as OpenAPI at `GET /openapi.json`. Where "
        "`LENET_API_KEYS` is set, every path needs a key but those marked *no key*. "
        "[HTTP](../http.md) explains `POST /predict`; the document has the [errors](errors.md) of "
        "each path. "
        f"A path of a model is also there for one of its versions, with `{_VERSION}` behind the "
        "model, but for those of the repository. A model or version that is not loaded is 404. "
        "All paths that take images have the header of `POST /predict`; `/invocations` and "
        "`/explain` have its query and its types of bodies, too.",
    ]
    for tag, found in sections.items():
        parts += [f"## {tag[0].upper()}{tag[1:]}", *found]
    return _page("Routes", *parts)


_VERSION = "/versions/{version}"


def _route(name: str, operation: dict[str, Any], first: dict[str, Any]) -> str:
    """A section; what it has in common with `first`, which is a route with images, is left out."""
    known = [] if operation is first else first["parameters"]
    text = " ".join((operation.get("description") or "").split())
    parts = [f"### `{name}`", f"{operation['summary']}. {text}".strip()]
    if operation.get("security") == []:
        parts[-1] += " *No key.*"
    rows = [
        (f"`{one['name']}`", one["in"], _kind(one["schema"]), one.get("description", ""))
        for one in operation.get("parameters", ())
        if one["in"] != "path" and one not in known
    ]
    if rows:
        parts.append(_list(rows))
    body = operation.get("requestBody")
    if body and (
        operation is first or set(body["content"]) != set(first["requestBody"]["content"])
    ):
        parts.append(f"Body: {_words(body['content'])}.")
    kinds = {
        kind: None
        for status, answer in operation["responses"].items()
        for kind in (answer.get("content", ()) if int(status) < 400 else ())
    }
    if kinds:
        parts.append(f"Answer: {_words(kinds)}.")
    return "\n\n".join(parts)


def error_codes() -> str:
    """Codes of errors with their status over both transports."""
    kinds = {kind.code: kind for kind in reversed(list(vars(errors).values())) if _is_error(kind)}
    meanings = dict(re.findall(r"^[│├└─\s]*(\w+) {2,}(.+)$", errors.__doc__ or "", re.MULTILINE))
    rows = []
    for code, status in STATUS.items():
        meaning = meanings.get(kinds[code].__name__, "an error of the program; the log has it")
        rows.append((f"`{code}`", str(status), GRPC_STATUS[code], meaning))
    return _page(
        "Errors",
        "Over HTTP the code is `error.code` of the answer, over gRPC the trailer "
        "`lenet-error-code`; `lenet_requests_total` counts by it. [HTTP](../http.md#errors) says "
        "what a client does about each.",
        _table(("code", "HTTP", "gRPC", "meaning"), rows),
        "HTTP alone has `not_found` (404) and `method_not_allowed` (405), of paths that do not "
        "exist, and answers a malformed request with 400, 417, 421, 431, 501 or 505 and "
        "`invalid_input`. A call of an unknown gRPC method ends with UNIMPLEMENTED. `cancelled` is "
        "never read by a client: it is in logs and metrics.",
    )


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Refusal)


def _refuses(method: Method) -> bool:
    """Whether it refuses a call without a key."""
    try:
        method.read({})
    except (Unauthorized, Forbidden):
        return True
    return False


def grpc() -> str:
    """Methods of gRPC, from the descriptors."""
    stand_in: Any = MagicMock()
    rows = []
    for path, method in sorted(grpc_methods.methods(stand_in, stand_in, Keys()).items()):
        service, _, name = path.decode().strip("/").rpartition("/")
        # Both versions of reflection have the same messages, and only one descriptor.
        described = Default().FindServiceByName(service.replace("v1alpha", "v1"))
        one = described.methods_by_name[name]
        stream = ("stream " * one.client_streaming, "stream " * one.server_streaming)
        key = "no" if method.is_open else "if there are keys"  # for which the gate asks
        key = "administrator's" if _refuses(method) else key
        messages = (f"{stream[0]}`{one.input_type.name}`", f"{stream[1]}`{one.output_type.name}`")
        rows.append((f"`{service}/{name}`", *messages, key))
    return _page(
        "gRPC",
        "Methods on both ports. Messages are described by "
        "[open_inference.proto](../../service/forms/open_inference.proto), "
        "[health.proto](../../service/api/health.proto) and "
        "[reflection.proto](../../service/api/reflection.proto); reflection lists them, too. "
        "[The Open Inference Protocol](../open-inference-protocol.md) says what tensors a model "
        "has, [errors](errors.md) with which status a call ends.",
        _table(("method", "request", "response", "needs a key"), rows),
    )


_METADATA = {
    "format_version": "version of this format",
    "model": "JSON: name, input shape and layers of the network",
    "batch_norm": "batch norm was folded into the layer before it; there is no other value",
    "training": "JSON: where the weights come from, below",
    "sha256": "digest of the other metadata and of all tensors",
}
_TRAINING = {
    "dataset_sha256": 'digest of the uncompressed dataset files, "" if unknown',
    "seed": "seed of the run, null of imported weights",
    "command": "command that made the weights",
    "epochs": "epochs trained, null of imported weights",
    "accuracy": "on the test set, 0 to 1, null if it was not measured",
    "labels": "names of the classes, in order",
}


def weight_file() -> str:
    """Metadata and tensors of a weight file, from the committed `lenet`."""
    with (ROOT / "weights" / "lenet" / "2.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    metadata = header.pop("__metadata__")
    training = json.loads(metadata["training"])
    tensors = [
        (f"`{name}`", one["dtype"], " x ".join(map(str, one["shape"])))
        for name, one in sorted(header.items())
    ]
    attacks = re.findall(r"^ {4}(\S.*?) {2,}(\S.*)$", weightfile.__doc__ or "", re.MULTILINE)
    return _page(
        "Weight file",
        "MODEL/VERSION.safetensors: a [safetensors](https://github.com/huggingface/safetensors) "
        "file with float32 tensors, batch norm folded in, and ten golden images with the logits "
        "that the trainer computed, by which every context is verified before it serves. A file is "
        "valid only if it is, byte for byte, what [weightfile.py](../../lenet/weightfile.py) "
        "writes. `python -m trainer inspect FILE` shows one, `python -m trainer import` makes one "
        "of weights from elsewhere.",
        "## Metadata",
        _list((f"`{key}`", _METADATA[key]) for key in metadata),
        "Keys of `training`:",
        _list((f"`{key}`", _json_type(value), _TRAINING[key]) for key, value in training.items()),
        "## Tensors",
        "Those of `lenet`. Filters are (outputs, inputs, height, width), matrices of dense layers "
        "(outputs, inputs). The tensors `golden.*` are the golden vectors.",
        _list(tensors),
        "## Limits and checks",
        f"At most {weightfile.MAX_FILE_BYTES >> 20} MiB, of which the header has at most "
        f"{weightfile.MAX_HEADER_BYTES >> 20} MiB; {weightfile.GOLDEN_IMAGES} golden images; "
        f"labels of at most {weightfile.MAX_LABEL_CHARACTERS} characters.",
        _list(attacks),
    )


def _json_type(value: object) -> str:
    return {str: "string", int: "integer", float: "number", list: "list"}[type(value)]


def commands() -> str:
    """Command lines of the service, the trainer and the load test."""
    out = io.StringIO()
    width = patch.dict(os.environ, COLUMNS="100")
    with width, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        load_test.main(["--help"])
    exits = "Exit codes:" + (trainer.__doc__ or "").partition("Exit codes:")[2]
    options = out.getvalue().partition("\n\n")[2]  # without the usage line
    parts = [
        "## `python -m service`",
        "Also `lenet-serve`. `--help` lists the [settings](settings.md), `--version` prints the "
        "version. [Exit codes](../operations.md#start-and-stop).",
        "### `lenet-serve warm`",
        f"{Warm.__doc__}",
        _settings_list(Warm, without=Settings),
        "## `python -m trainer`",
        f"Also `lenet-train`. `fit` is the default command.\n\n```text\n{exits.strip()}\n```",
    ]
    for command in ("fit", "search", "evaluate", "compare", "import", "export", "inspect"):
        kind = getattr(trainer_settings, command.capitalize())
        parts += [f"### `{command}`", f"{kind.__doc__}"]
        if kind is trainer_settings.Search:
            prefix = kind.model_config["env_prefix"].upper()
            parts.append(
                f"The recipe has the flags of `fit`, from `--model` to `--precision`, whose "
                f"variables begin with `{prefix}` here."
            )
            parts.append(_settings_list(kind, without=trainer_settings.Recipe))
        else:
            parts.append(_settings_list(kind))
    parts += ["## `make load-test`", f"```text\n{options.strip()}\n```"]
    return _page("Command lines", *parts)


class Statement(NamedTuple):
    """A row of the table of statements: the arguments of `pytest.mark.states`, and its test."""

    subject: str
    text: str
    found: str
    path: str
    test: str


class _Constants(ast.NodeTransformer):
    """Puts constants of a module in the place of their names."""

    def __init__(self, module: ast.Module) -> None:
        assigned = [node for node in module.body if isinstance(node, ast.Assign)]
        self._values = {ast.unparse(node.targets[0]): node.value for node in assigned}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._values.get(node.id, node)


def marked() -> list[Statement]:
    """Every row of `@pytest.mark.states` of the tests, by file and line."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        module = ast.parse(source if "pytest.mark.states(" in source else "")
        constants = _Constants(module)
        for test in module.body:
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
                # The decorators, and the marks of single parameters in them.
                nodes = [node for mark in test.decorator_list for node in ast.walk(mark)]
                for node in nodes:
                    if (
                        isinstance(node, ast.Call)
                        and ast.unparse(node.func) == "pytest.mark.states"
                    ):
                        values = (*node.args, *(one.value for one in node.keywords))
                        subject, *said = (ast.literal_eval(constants.visit(one)) for one in values)
                        rows = [said] if node.keywords else said[0].items()
                        place = str(path.relative_to(ROOT)), test.name
                        found += [Statement(subject, text, how, *place) for text, how in rows]
    return found


def statements() -> str:
    """What the program and its documents say, and the tests that find it out otherwise."""
    sections: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for one in marked():
        found = sections.setdefault(one.subject, {}).setdefault(one.text, [])
        found.append((one.found, f"`{one.path}::{one.test}`"))
    return _page(
        "Statements and their tests",
        "What the program prints, serves and documents, and how a test finds the same out in "
        "another way. Each is a marker of its test, "
        "`@pytest.mark.states(subject, text, found=...)`, or a pair in one, "
        "`@pytest.mark.states(subject, {text: found})`; "
        "`pytest -m states` runs them all.",
        *(
            part
            for subject in sorted(sections)
            for part in (
                f"## {subject}",
                "\n".join(_statement(text, found) for text, found in sections[subject].items()),
            )
        ),
    )


def _statement(text: str, found: list[tuple[str, str]]) -> str:
    """`found`: how, and the test, of each marker with this text."""
    how, tests = (dict.fromkeys(part) for part in zip(*found, strict=True))
    return f"- **{text}**: {'; '.join(how)}. {', '.join(tests)}"


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings,
    "reference/metrics.md": metrics,
    "reference/routes.md": routes,
    "reference/errors.md": error_codes,
    "reference/grpc.md": grpc,
    "reference/weight-file.md": weight_file,
    "reference/commands.md": commands,
    "reference/statements.md": statements,
}
"""The function that generates each page below docs."""


def _openapi() -> dict[str, Any]:
    stand_in: Any = MagicMock()  # routes are described, none is called
    explain = image_endpoint(stand_in)
    return create_app(*[stand_in] * 4, image_routes(stand_in), explain).openapi()


def _settings_table(kind: type[BaseSettings]) -> str:
    return _table(("flag and variable", "value", "default", "meaning"), _settings(kind))


def _settings_list(kind: type[BaseSettings], without: type[BaseSettings] = BaseSettings) -> str:
    """Fields of `kind` that `without` does not have."""
    return _list(
        (name.replace("<br>", ", "), values, default, text)
        for name, values, default, text in _settings(kind, without)
    )


def _settings(
    kind: type[BaseSettings], without: type[BaseSettings] = BaseSettings
) -> Iterable[tuple[str, str, str, str]]:
    """Names, values, default and meaning of fields of `kind` that `without` does not have."""
    prefix = kind.model_config["env_prefix"]
    schemas = kind.model_json_schema()["properties"]
    for name, field in kind.model_fields.items():
        if CLI_SUPPRESS not in field.metadata and name not in without.model_fields:
            flag = f"--{name.rstrip('_').replace('_', '-')}"
            default = "" if field.default in (None, (), "", PydanticUndefined) else field.default
            if isinstance(default, tuple):
                default = ",".join(map(str, default))
            shown = f"`{default}`" if default is not False and default != "" else ""
            variable = f"{prefix}{name}".upper()
            yield (
                f"`{flag}`<br>`{variable}`",
                _kind(schemas[name]),
                shown,
                schemas[name]["description"],
            )


def _kind(schema: dict[str, Any]) -> str:
    """The values that a schema allows."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = {"path": "path", "password": "secret"}.get(schema.get("format", ""), schema["type"])
    if kind == "array":
        return f"list: {_kind(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if kind == "integer":
        low = low if above is None else above + 1
        high = high if below is None else below - 1
        above = below = None
    bounds = ((low, "at least"), (above, "more than"), (high, "at most"), (below, "less than"))
    if low is not None and high is not None:
        return f"{kind}, {low:,} to {high:,}"
    return ", ".join(
        (kind, *(f"{words} {bound:,}" for bound, words in bounds if bound is not None))
    )


def _words(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _page(title: str, *parts: str) -> str:
    note = "<!-- Generated by `make reference` -->"
    return "\n\n".join((note, f"# {title}", *parts)) + "\n"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _list(rows: Iterable[Iterable[str]]) -> str:
    """A line for each row: its cells, and behind a colon the last of them."""
    lines = []
    for row in rows:
        *cells, text = map(_cell, row)
        lines.append(f"- {', '.join(filter(None, cells))}: {text}")
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"(?<![`\w-])--[a-z][a-z-]*", r"`\g<0>`", text)


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(page())


if __name__ == "__main__":
    main()
