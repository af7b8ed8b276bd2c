import json
import shutil

import pytest

from benchmarks.grpc import Round, main, summarise, table


def test_the_ratio_is_the_median_of_the_turns_ratios():
    rounds = [Round("constant", rate, 100.0) for rate in (10, 5, 40)]
    rounds += [Round("ours", rate, None) for rate in (10, 30, 20)]
    found = summarise(rounds)
    assert found["ratio"] == [1.0, 0.5, 6.0]
    assert found["servers"]["ours"] == {"rps": [20, 10, 30]}
    _, ours, constant, ratio = table(found).splitlines()
    assert ours.split() == ["ours", "20", "(10..30)"]
    assert constant.split()[-2:] == ["100", "(100..100)"]
    assert ratio == "ours/constant: calls/s 1.00 (0.50..6.00)"


@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load")
def test_the_service_is_compared_with_a_constant_answer(tiny_file, tmp_path, capsys):
    path = tmp_path / "grpc.json"
    command = [f"--weights={tiny_file}", "--rounds=1", "--duration=1", f"--json={path}"]
    assert main([*command, "--connections=2", "--streams=3"]) == 0
    document = json.loads(path.read_text())
    assert all(document["servers"][name]["rps"][0] > 0 for name in ("ours", "constant"))
    assert "ours/constant: calls/s" in capsys.readouterr().out
