import json

import numpy as np
import pytest

from benchmarks.reload import Caller, main
from benchmarks.servers import Server


def test_both_versions_answer_while_they_are_reloaded_in_turns(tiny_file, tmp_path):
    path = tmp_path / "reload.json"
    command = [f"--weights={tiny_file}", "--duration=1", "--reloads=4", "--images=70"]
    assert main([*command, f"--json={path}"]) == 0
    found = json.loads(path.read_text())
    for rows in ("1 at a time", "70 at a time"):
        assert found["without reloads"][rows]["answers"]["1"] > 0
        assert found["without reloads"][rows]["answers"]["2"] == 0
        assert sum(found["with reloads"][rows]["answers"].values()) > 0
        assert found["with reloads"][rows]["p100_ms"] >= found["with reloads"][rows]["p50_ms"] > 0


@pytest.mark.parametrize(
    ("answer", "version", "correct"),
    [(0.5, "1", True), (0.500002, "1", False), (0.5, "2", False), (0.5, "", False)],
)
def test_an_answer_is_compared_with_the_version_that_it_names(answer, version, correct):
    expected = {name: np.full((1, 10), value, np.float32) for name, value in (("1", 0.5), ("2", 1))}
    server = Server("ours", "http://nowhere", {}, 0, None)
    caller = Caller(server, np.zeros((1, 28, 28), np.uint8), expected, tolerance=1e-6)
    content = np.full((1, 10), answer, np.float32).tobytes()
    assert caller.is_correct(content, version) == correct
    assert not caller.is_correct(content[4:], version)
