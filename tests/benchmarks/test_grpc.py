import json
import shutil

import pytest

from benchmarks.grpc import main


@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load")
def test_the_service_is_compared_with_a_constant_answer(tiny_file, tmp_path, capsys):
    path = tmp_path / "grpc.json"
    command = [f"--weights={tiny_file}", "--rounds=1", "--duration=1", f"--json={path}"]
    assert main([*command, "--connections=2", "--streams=3"]) == 0
    found = json.loads(path.read_text())
    ours, constant = (found["servers"][name]["rps"][0] for name in ("ours", "constant"))
    assert found["ratio"][0] == pytest.approx(ours / constant, rel=0.01)
    assert "ours/constant: calls/s" in capsys.readouterr().out
