import sys

import pytest

from benchmarks.engine_figure import FigureMissing, draw

PNG = b"\x89PNG\r\n\x1a\n"


def bucket(rows, precision, compile_us=None):
    return {
        "rows": rows,
        "precision": precision,
        "device_us": 9.0 + rows / 30,
        "host_us": 20.0 + rows / 20,
        "torch": {"eager_us": 110.0, "graph_us": 47.0, "compile_us": compile_us},
    }


CONTENT = {
    "device": "NVIDIA H200",
    "date": "2026-11-20T10:00:00+00:00",
    "commit": "abc1234",
    "buckets": [bucket(1, "fp16", 40.0), bucket(2, "fp16"), bucket(8192, "fp16", 900.0)],
    "limits": {"copy_images_per_s": 7e7, "matmul_images_per_s": 1.7e8},
}


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="the extra `figure` is not installed")


@pytest.mark.parametrize(
    "content",
    [
        CONTENT,
        {**CONTENT, "buckets": [*CONTENT["buckets"], bucket(4, "fp32")]},
        {"buckets": [bucket(1, "tf32")]},
    ],
    ids=["one precision", "two precisions", "one bucket and nothing else"],
)
def test_a_picture_is_drawn_of_what_there_is(content, tmp_path, matplotlib):
    path = tmp_path / "new" / "engine.png"
    draw(content, path)
    assert path.read_bytes().startswith(PNG)


def test_each_precision_has_panels_of_its_own(tmp_path, matplotlib):
    heights = []
    for more in ([], [bucket(4, "fp32")]):
        path = tmp_path / "engine.png"
        draw({**CONTENT, "buckets": [*CONTENT["buckets"], *more]}, path)
        heights.append(int.from_bytes(path.read_bytes()[20:24]))  # of the header chunk
    assert heights[1] > 1.5 * heights[0]


def test_nothing_is_drawn_of_nothing(tmp_path, matplotlib):
    with pytest.raises(FigureMissing, match="--only buckets"):
        draw({"device": "NVIDIA H200"}, tmp_path / "engine.png")


def test_without_matplotlib_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FigureMissing, match="pip install"):
        draw(CONTENT, tmp_path / "engine.png")
