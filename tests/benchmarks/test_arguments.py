import pytest

from benchmarks.arguments import latest_weights


def test_versions_are_compared_as_numbers(tmp_path):
    for name in ("9.safetensors", "10.safetensors", "notes.safetensors"):
        (tmp_path / name).touch()
    assert latest_weights(tmp_path).name == "10.safetensors"


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--weights"):
        latest_weights(tmp_path)
