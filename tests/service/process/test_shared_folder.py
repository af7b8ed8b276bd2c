from __future__ import annotations

import pytest

from service.process import shared_folder as folders
from service.process.shared_folder import shared_folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The only place for folders."""
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_SHARED_MEMORY", str(tmp_path / "nowhere"))
    return tmp_path


def test_a_folder_of_a_live_supervisor_stays_and_of_a_dead_one_goes(place):
    dead, foreign = place / "lenet-serve-metrics-dead", place / "other-folder"
    for folder in (dead, foreign):
        folder.mkdir()
    (dead / "1-1.json").touch()
    (place / "lenet-serve-metrics-link").symlink_to(foreign)
    with shared_folder(2) as first:
        with shared_folder(2) as second:
            assert first.is_dir()
            assert second.is_dir()
        assert not second.exists()
        assert not dead.exists()
    assert not first.exists()
    assert foreign.is_dir()


def test_a_place_without_room_is_one_warning_and_no_folder(place, monkeypatch, caplog):
    monkeypatch.setattr(folders.tempfile, "tempdir", "/dev/null/nowhere")
    with shared_folder(2) as folder:
        assert folder is None
    (message,) = caplog.messages
    assert "no folder for the metrics of several workers: /dev/null/nowhere (Not a dir" in message
    assert "set TMPDIR" in message


def test_shared_memory_is_used_when_the_place_of_temporary_files_cannot_be(
    place, monkeypatch, caplog
):
    monkeypatch.setattr(folders.tempfile, "tempdir", "/dev/null/nowhere")
    monkeypatch.setattr(folders, "_SHARED_MEMORY", str(place))
    with shared_folder(2) as folder:
        assert folder.parent == place
    assert caplog.messages == []
