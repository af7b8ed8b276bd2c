from contextlib import contextmanager
from pathlib import Path

from benchmarks import engine_cold
from benchmarks.engine_cold import CACHES, cold_start_s


def test_the_second_start_finds_what_the_first_left_in_empty_caches(monkeypatch):
    found, commands = [], []

    @contextmanager
    def running(name, command, port, paths, environment):
        folders = {Path(environment[variable]) for variable in CACHES}
        assert len(folders) == 1
        left = folders.pop() / "plans.json"
        found.append(left.exists())
        left.touch()
        commands.append(command)
        assert f"--port={port}" in command
        yield

    monkeypatch.setattr(engine_cold, "running", running)
    told = cold_start_s(("service", "--device=cuda"))
    assert list(told) == ["no_cache", "warm_cache"]
    assert found == [False, True]
    assert all(command[:2] == ["service", "--device=cuda"] for command in commands)
