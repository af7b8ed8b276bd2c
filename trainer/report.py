"""`report.html` of a run, and two runs side by side: one file, without anything from elsewhere.

The pictures are matplotlib's, as SVG in the page; digits are small PNGs.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from lenet.pixels import HEIGHT, WIDTH, Images
from trainer.augment import WarpLimits, warp
from trainer.mnist import Digits
from trainer.runs import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lenet.weightfile import WeightFile

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2733; background: #fff; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p.note { color: #556; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #dde3ea; }
th:first-child, td:first-child { text-align: left; }
.mistakes { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }
.mistakes figure { margin: 0; } .mistakes img { width: 100%; image-rendering: pixelated;
  border: 1px solid #dde3ea; } figcaption { font-size: .8rem; line-height: 1.3; }
.images figure { margin: 0 0 1rem; } .images img { width: 100%; image-rendering: pixelated;
  border: 1px solid #dde3ea; }
code { overflow-wrap: anywhere; font-size: .85rem; }
"""
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9691c", "#8a94a0"
_FILTERS = 64
"""At most so many of the first layer are drawn."""


_SHOWN_IMAGES, _ACROSS = 100, 20
"""Training images that are shown, and how many in a row."""


def report(run: FinishedRun, weights: WeightFile, images: Images, training: Digits) -> str:
    """The page of a run whose result is `weights`; `images` are the test images."""
    names, summary = weights.training.labels, run.summary
    title = f"{weights.model.name}, {summary['accuracy']:.2%} on the test images"
    sections = (
        _facts(run, weights),
        _section(
            "What it was trained on",
            _training_images(run, training),
            "; ".join(run.settings["images"]) + ".",
        ),
        _section("Loss and accuracy", _history([run]), _resumed(run)),
        *_results(summary, images, names),
        _section("Weights of the first layer", _filters(weights)),
        _section(
            "Time by phase",
            _figure(lambda figure: _phases(figure, summary["phases"]), 8, 2.4),
        ),
    )
    return _page(title, run.settings["started"], sections)


def evaluation(found: Mapping[str, Any], images: Images) -> str:
    """The page of what `trainer.evaluation.measured` found on `images`."""
    low, high = found["interval"]
    facts = {
        "accuracy": f"{found['accuracy']:.2%}, {found['wrong']} of {found['images']} wrong",
        "95 % interval": f"{low:.2%} to {high:.2%}",
        "loss": f"{found['loss']:.4f} nats",
        "data": f"{found['data']}, {found['which']}",
        "device": f"{found['device']}, {found['arithmetic']}",
        "sha256": found["sha256"][:16],
    }
    title = f"{found['weights']}, {found['accuracy']:.2%}"
    return _page(title, "", (_facts_table(facts), *_results(found, images, found["labels"])))


def comparison(one: FinishedRun, other: FinishedRun) -> str:
    """A page with two runs side by side."""
    rows = [("", one.path.name, other.path.name), *compared(one, other)]
    curves = _history([one, other])
    return _page(
        "Two runs",
        "",
        (_section("What differs", _table(rows)), _section("Loss and accuracy", curves)),
    )


def compared(one: FinishedRun, other: FinishedRun) -> list[tuple[str, ...]]:
    """Rows of a table: the settings that differ, the results, the times."""
    recipes = one.settings["recipe"], other.settings["recipe"]
    rows: list[tuple[str, ...]] = [
        (f"--{name.replace('_', '-')}", *(str(recipe.get(name, "")) for recipe in recipes))
        for name in dict.fromkeys((*recipes[0], *recipes[1]))
        if recipes[0].get(name) != recipes[1].get(name)
    ]
    for name in ("dataset_sha256", "device"):
        values = one.settings[name], other.settings[name]
        if values[0] != values[1]:
            rows.append((name.replace("_", " "), *(str(value)[:16] for value in values)))
    summaries = one.summary, other.summary
    rows.append(("epochs", *(str(len(run.epochs)) for run in (one, other))))
    for name, form in (
        ("accuracy", "{:.2%}"),
        ("loss", "{:.4f}"),
        ("calibration_error", "{:.4f}"),
        ("parameters", "{}"),
    ):
        label = f"test {name}" if name in ("accuracy", "loss") else name.replace("_", " ")
        rows.append((label, *(form.format(summary[name]) for summary in summaries)))
    phases = dict.fromkeys((*summaries[0]["phases"], *summaries[1]["phases"]))
    for phase in phases:
        times = (summary["phases"].get(phase, 0.0) for summary in summaries)
        rows.append((f"seconds of {phase}", *(f"{seconds:.2f}" for seconds in times)))
    if summaries[0]["labels"] == summaries[1]["labels"]:
        columns = (summary["recall"] for summary in summaries)
        for name, *recalls in zip(summaries[0]["labels"], *columns, strict=False):
            rows.append((f"recall of {name}", *(f"{recall:.2%}" for recall in recalls)))
    return rows


# Parts of a page


def _page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1><p class='note'>{escape(subtitle)}</p>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _section(title: str, content: str, note: str = "") -> str:
    text = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{content}</section>"


def _results(summary: Mapping[str, Any], images: Images, names: Sequence[str]) -> tuple[str, ...]:
    """The sections about an evaluation on `images`."""
    return (
        _section(
            "Which class is taken for which",
            _figure(lambda figure: _confusion(figure, summary["confusion"], names), 7, 5.6),
            "The right answers, on the diagonal, are written without colour.",
        ),
        _section("Precision and recall", _classes(summary, names)),
        _section(
            "Calibration",
            _figure(lambda figure: _calibration(figure, summary), 9, 3.6),
            "On the line, an answer with confidence 0.9 is right nine times of ten. Expected "
            f"calibration error {summary['calibration_error']:.4f}.",
        ),
        _section(
            f"The {len(summary['worst'])} most confident mistakes",
            _mistakes(summary, images, names),
        ),
    )


def _facts_table(facts: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def _facts(run: FinishedRun, weights: WeightFile) -> str:
    summary, settings = run.summary, run.settings
    written = weights.training.epochs or len(run.epochs)  # with --patience the best, not the last
    facts = {
        "test accuracy": f"{summary['accuracy']:.2%}",
        "test loss": f"{summary['loss']:.4f} nats",
        "validation accuracy": f"{run.epochs[written - 1]['validation_accuracy']:.2%}",
        "epochs": str(len(run.epochs)),
        "weights of epoch": str(written),
        "parameters": f"{summary['parameters']:,}",
        "device": settings["device"],
        "weight file": summary["weights"],
        "sha256": weights.digest()[:16],
    }
    return f"{_facts_table(facts)}<p><code>{escape(settings['command'])}</code></p>"


def _resumed(run: FinishedRun) -> str:
    resumed = sum("seconds" not in epoch for epoch in run.epochs)
    return f"The run was resumed after epoch {resumed}." if resumed else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"


def _history(runs: Sequence[FinishedRun]) -> str:
    """Curves over the epochs, or a table where no run has two."""
    if max(len(run.epochs) for run in runs) > 1:
        return _figure(_curves(runs), 9, 3.7)
    rows = [("", *(run.path.name for run in runs))]
    for key, form in (
        ("loss", "{:.4f} nats"),
        ("accuracy", "{:.2%}"),
        ("validation_accuracy", "{:.2%}"),
    ):
        name = key if "_" in key else f"training {key}"
        cells = (form.format(run.epochs[0][key]) for run in runs)
        rows.append((name.replace("_", " "), *cells))
    return _table(rows)


def _classes(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    images = [sum(row) for row in summary["confusion"]]
    rows = zip(names, images, summary["precision"], summary["recall"], strict=True)
    return _table(
        [
            ("class", "images", "precision", "recall"),
            *(
                (name, str(count), f"{p:.2%}", f"{r:.2%}" if count else "-")
                for name, count, p, r in rows
            ),
        ]
    )


def _mistakes(summary: Mapping[str, Any], images: Images, names: Sequence[str]) -> str:
    worst = summary["worst"]
    if not worst:
        return "<p>None.</p>"
    files = summary["worst_files"] or [f"image {image}" for image, *_ in worst]
    figures = (
        f"<figure><img alt='' src='{_png(255 - images[image])}'><figcaption>"
        f"{escape(names[true])}, taken for {escape(names[predicted])} with {confidence:.1%}"
        f"<br>{escape(file)}</figcaption></figure>"
        for (image, true, predicted, confidence), file in zip(worst, files, strict=True)
    )
    return f"<div class='mistakes'>{''.join(figures)}</div>"


def _training_images(run: FinishedRun, training: Digits) -> str:
    """Some training images, in the order of their classes, and as one step augments them."""
    order = np.argsort(training.labels, kind="stable")
    count = min(len(order), _SHOWN_IMAGES)
    some = training.images[order[np.linspace(0, len(order) - 1, count).astype(int)]]
    recipe = run.settings["recipe"]
    limits = WarpLimits(**{name: recipe[name] for name in WarpLimits.__dataclass_fields__})
    figures = (
        f"<figure><img alt='' src='{_png(_mosaic(shown))}'><figcaption>{caption}</figcaption>"
        "</figure>"
        for shown, caption in (
            (some, f"{count} training images as they go in, class after class"),
            (warp(some, limits, recipe["seed"], 0), "the same, augmented as in a step"),
        )
    )
    return f"<div class='images'>{''.join(figures)}</div>"


def _mosaic(images: Images) -> Images:
    """The images, dark on white, side by side: (height, width)."""
    rows = -(-len(images) // _ACROSS)
    tiles = np.zeros((rows * _ACROSS, HEIGHT, WIDTH), np.uint8)
    tiles[: len(images)] = images
    grid = tiles.reshape(rows, _ACROSS, HEIGHT, WIDTH).swapaxes(1, 2)
    mosaic: Images = 255 - grid.reshape(rows * HEIGHT, _ACROSS * WIDTH)
    return mosaic


def _png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# Pictures


def _figure(draw: Callable[[Figure], None], width: float, height: float) -> str:
    """SVG of `width` x `height` inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {
            "svg.hashsalt": "lenet",
            "font.size": 9,
            "axes.spines.right": False,
            "axes.spines.top": False,
        }
    ):
        figure = Figure((width, height), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]


def _curves(runs: Sequence[FinishedRun]) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        loss, accuracy = figure.subplots(1, 2)
        for run, colour in zip(runs, (_BLUE, _ORANGE), strict=False):
            epochs = np.arange(1, len(run.epochs) + 1)
            mark = {"marker": "."} if len(epochs) < 30 else {}
            name = f"{run.path.name}, " if len(runs) > 1 else ""
            for axes, key, factor, style in (
                (loss, "loss", 1, "--"),
                (accuracy, "accuracy", 100, "--"),
                (accuracy, "validation_accuracy", 100, "-"),
            ):
                label = "" if axes is loss else "training" if key == "accuracy" else "validation"
                axes.plot(
                    epochs,
                    [factor * one[key] for one in run.epochs],
                    colour,
                    linestyle=style,
                    label=label and name + label,
                    **mark,
                )
        losses = [one["loss"] for run in runs for one in run.epochs]
        scale = "log" if max(losses) > 10 * min(losses) else "linear"
        loss.set(xlabel="epoch", ylabel="training loss, nats", yscale=scale)
        accuracy.set(xlabel="epoch", ylabel="accuracy, %")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        for axes in (loss, accuracy):
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True)

    return draw


def _confusion(figure: Figure, confusion: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    counts = np.array(confusion)
    axes: Axes = figure.subplots()
    mistakes = np.where(np.eye(len(counts), dtype=bool), 0, counts)
    image = axes.imshow(mistakes, cmap="Oranges", vmin=0, vmax=max(1, int(mistakes.max())))
    ticks = range(len(names))
    long = max(map(len, names)) > 3
    axes.set_xticks(ticks, names, rotation=60 if long else 0, ha="right" if long else "center")
    axes.set_yticks(ticks, names)
    axes.set(xlabel="predicted class", ylabel="true class")
    if len(names) <= 20:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                dark = row != column and count > 0.6 * mistakes.max()
                axes.text(
                    column,
                    row,
                    str(count),
                    ha="center",
                    va="center",
                    color="white" if dark else _GREY if row == column else "black",
                    fontsize=7 if len(names) > 12 else 8,
                )
    figure.colorbar(image, label="mistakes, images")


def _calibration(figure: Figure, summary: Mapping[str, Any]) -> None:
    diagram, counts = figure.subplots(1, 2)
    confidence, accuracy, images = (
        np.array(column) for column in zip(*summary["calibration"], strict=True)
    )
    diagram.plot([0, 1], [0, 1], color=_GREY, linestyle="--", linewidth=1)
    diagram.plot(confidence, accuracy, color=_BLUE, marker="o")
    diagram.set(
        xlabel="mean confidence", ylabel="share of right answers", xlim=(0, 1.02), ylim=(0, 1.02)
    )
    counts.bar(confidence, images, width=0.06, color=_BLUE)
    counts.set(xlabel="mean confidence", ylabel="images", yscale="log", xlim=(0, 1.05))
    for axes in (diagram, counts):
        axes.grid(alpha=0.3)


def _phases(figure: Figure, phases: Mapping[str, float]) -> None:
    axes: Axes = figure.subplots()
    names = list(phases)
    bars = axes.barh(names, list(phases.values()), color=_BLUE)
    axes.bar_label(bars, [f"{seconds:.2f} s" for seconds in phases.values()], padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="time, s", xlim=(0, 1.15 * max(*phases.values(), 1e-3)))


def _filters(weights: WeightFile) -> str:
    name = weights.model.shapes()[0].name
    weight = weights.tensors[f"{name}.weight"]
    drawn = weight[:_FILTERS]
    drawn = drawn[:, 0] if drawn.ndim == 4 else drawn.reshape(-1, HEIGHT, WIDTH)
    columns = min(len(drawn), 10)
    rows = -(-len(drawn) // columns)
    largest = float(np.abs(drawn).max())
    # One image with gaps: with axes for each of mlp's 20 it took 2.0 s of a core instead of 0.24
    # (two EPYC cores, 2026-11-27).
    gap = 1 + drawn.shape[1] // 10
    tiles = np.pad(
        drawn,
        ((0, rows * columns - len(drawn)), (0, gap), (0, gap)),
        constant_values=np.nan,
    )
    _, h, w = tiles.shape
    mosaic = tiles.reshape(rows, columns, h, w).swapaxes(1, 2).reshape(rows * h, columns * w)

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        axes.set_axis_off()
        image = axes.imshow(
            mosaic, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest"
        )
        figure.colorbar(image, label="weight", shrink=0.9)

    shown = (
        f"the first {len(drawn)} of {len(weight)}"
        if len(drawn) < len(weight)
        else f"all {len(weight)}"
    )
    kernel = f"{drawn.shape[1]} x {drawn.shape[2]}"
    note = f"<p class='note'>{name}: {shown}, {kernel} pixels; red is positive, blue negative.</p>"
    return note + _figure(draw, 9, 0.9 * rows + 0.3)
