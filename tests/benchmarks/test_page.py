import json
import shutil

import pytest

from benchmarks.page import main
from benchmarks.servers import lenet_serve
from lenet.weightfile import WeightFile


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_paints_and_the_pen_are_timed(tiny_file, capsys):
    pytest.importorskip("playwright")
    name = WeightFile.read(tiny_file).model.name
    with lenet_serve(tiny_file, name, ["--device=cpu"]) as server:
        assert main([f"--url={server.url}", "--visits=1", "--moves=20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_paint_ms"]["count"] == 1
    assert found["pen_to_bar_ms"]["median"] > 0
