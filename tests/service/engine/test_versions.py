from __future__ import annotations

import hashlib

import pytest

from lenet.errors import InvalidWeightFile
from service.engine.versions import read_models


def refusal(folder, wanted=(), default="a"):
    with pytest.raises(InvalidWeightFile) as caught:
        read_models(folder, wanted, default)
    return str(caught.value)


def test_every_model_is_found_when_none_is_named(folder, write):
    for place in ("b/1", "a/1", "a/2"):
        write(place)
    (folder / "notes.txt").write_text("no model")
    (folder / "empty").mkdir()
    found = read_models(folder, (), "a")
    assert [(file.name, file.version) for file in found] == [("a", "2"), ("b", "1")]
    assert found[0].path == folder / "a" / "2.safetensors"
    assert found[0].weights.model.name == "a"
    assert found[0].sha256 == hashlib.sha256(found[0].path.read_bytes()).hexdigest()


def test_the_highest_version_is_a_number_when_there_are_many(folder, write):
    for version in ("9", "10", "1"):
        write(f"a/{version}")
    ((file,)) = read_models(folder, (), "a")
    assert file.version == "10"


@pytest.mark.parametrize(
    "stem", ["01", "0", "-3", "1.5", "latest", "", "\N{FULLWIDTH DIGIT TWO}", "+7", "1e3"]
)
def test_a_file_is_no_version_when_its_name_is_no_positive_integer(folder, write, stem):
    write(f"a/{stem}")
    assert "holds no VERSION.safetensors with VERSION a positive integer" in refusal(folder)
    write("a/1")
    (file,) = read_models(folder, (), "a")
    assert file.version == "1"


def test_only_the_wanted_are_read_once_each_when_models_are_named(folder, write):
    write("a/1")
    write("b/1")
    (folder / "broken").mkdir()
    (folder / "broken" / "1.safetensors").write_bytes(b"not read")
    found = read_models(folder, ("b", "a", "b"), "a")
    assert [file.name for file in found] == ["b", "a"]


def test_the_start_is_refused_when_the_folder_is_missing_or_a_file(folder):
    (folder / "file").write_bytes(b"")
    for name in ("absent", "file"):
        assert refusal(folder / name) == (
            f"{folder / name}: is not a folder, expected one with MODEL/VERSION.safetensors in it"
        )


def test_the_start_is_refused_when_the_default_model_is_missing(folder, write):
    assert "default model 'a' is not among the models []" in refusal(folder)
    write("b/1")
    assert "default model 'a' is not among the models [b]" in refusal(folder)


def test_the_start_is_refused_when_a_wanted_model_has_no_version(folder, write):
    write("a/1")
    write("b/latest")
    message = refusal(folder, ("a", "b"))
    assert message.startswith(f"{folder / 'b'}: holds no VERSION.safetensors")


def test_the_start_is_refused_when_a_file_is_broken(folder, write):
    path = write("a/1")
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(folder).startswith(f"{path}: is not a valid safetensors file")


def test_the_start_is_refused_when_the_folder_bears_another_name(folder, write):
    path = write("a/1", name="b")
    assert refusal(folder) == f"{path}: metadata model is 'b', expected 'a' as its folder"


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_is_refused_when_it_leaves_the_folder(folder, write, tmp_path, linked):
    inside = write("a/1")
    outside = tmp_path / "secret"
    inside.parent.rename(outside)
    if linked == "folder":
        inside.parent.symlink_to(outside)
    else:
        inside.parent.mkdir()
        inside.symlink_to(outside / "1.safetensors")
    assert refusal(folder) == f"{inside}: leads out of {folder} through a symlink"


def test_a_link_is_followed_when_it_stays_in_the_folder(folder, write):
    path = write("a/2")
    path.rename(folder / "kept")
    path.symlink_to(folder / "kept")
    (file,) = read_models(folder, (), "a")
    assert (file.version, file.path) == ("2", path)


def test_a_link_to_itself_is_refused_when_it_is_read(folder):
    path = folder / "a" / "1.safetensors"
    path.parent.mkdir()
    path.symlink_to(path)
    assert refusal(folder) == f"{path}: cannot be read (Too many levels of symbolic links)"
