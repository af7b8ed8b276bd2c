from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import wire


@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load")
def test_wire_is_compared_with_other_servers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        wire, "_SERVERS", {name: wire._SERVERS[name] for name in ("wire", "uvicorn")}
    )
    path = tmp_path / "wire.json"
    assert wire.main(["--rounds=1", "--duration=1", "--connections=2", f"--json={path}"]) == 0
    found = json.loads(path.read_text())["servers"]
    assert set(found) == {"wire HTTP/1.1", "wire HTTP/2", "uvicorn HTTP/1.1"}
    assert all(numbers["rps"][0] > 0 for numbers in found.values())
    assert "wire HTTP/2" in capsys.readouterr().out
