"""Files that a kill must not lose."""

import os
import threading
from pathlib import Path

import pytest

from jaxspec.errors import UserError
from jaxspec.files import (
    check_writable,
    display_name,
    exclusive,
    locked,
    read_json,
    read_text,
    replacing,
    restore_folder,
    swap_folder,
    user_cache,
    write_atomically,
)


def make(folder, content):
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


def test_what_is_kept_names_no_folders(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    for name in (str(tmp_path / "model"), f"{tmp_path}/model/", ".", "../model"):
        assert display_name(name) == "model"
    for name in ("", "owner/name", "smollm2-135m"):
        assert display_name(name) == name


def test_without_a_home_the_cache_is_among_temporary_files(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_cache("unions", "ppd") == tmp_path / ".cache" / "jaxspec" / "unions" / "ppd"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_swap_that_is_killed_leaves_one_of_both(tmp_path, monkeypatch, renames):
    """Before its two renames, between them and behind them; what was there comes back, or what is new has come."""
    new, folder, real, done = make(tmp_path / "new", "new"), make(tmp_path / "best", "old"), Path.rename, []

    def dies(path, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(path)
        return real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", dies)
        patched.setattr("shutil.rmtree", lambda *args, **settings: len(done) == 2 and dies(None, None))
        with pytest.raises(KeyboardInterrupt):
            swap_folder(new, folder)
    restore_folder(folder)
    assert (folder / "file").read_text() == ("new" if renames == 2 else "old")
    assert not (tmp_path / ".best.old").exists()
    swap_folder(make(tmp_path / "newer", "newer"), folder)
    assert (folder / "file").read_text() == "newer"


def test_what_cannot_be_written_is_refused_and_nothing_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    check_writable(tmp_path / "new" / "folder")
    with pytest.raises(UserError, match="file is a file"):
        check_writable(tmp_path / "file" / "folder")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=f"{tmp_path} is read-only"):
        check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_process_at_a_time(tmp_path):
    with exclusive(tmp_path), pytest.raises(UserError, match="another process is writing there"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_one_after_another(tmp_path):
    """The second thread comes in when the first has gone."""
    inside, order, file = threading.Event(), [], tmp_path / "lock"

    def second():
        inside.wait()
        with locked(file):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with locked(file):
        inside.set()
        thread.join(0.3)
        assert thread.is_alive()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_nothing_to_restore(tmp_path):
    restore_folder(tmp_path / "best")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """And what killed processes have left goes with the next write; what others are writing stays."""
    file = tmp_path / "a.json"
    write_atomically(file, b"old")

    def full(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            write_atomically(file, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and file.read_bytes() == b"old"
    node = os.uname().nodename
    names = [f".a.json.{node}-{process}.tmp" for process in (2**22 + 7, os.getppid())]
    for name in names:
        (tmp_path / name).touch()
    write_atomically(file, b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", names[1]} and file.read_bytes() == b"new"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="file: cannot be written"),
        replacing(tmp_path / "file" / "best", tmp_path / "x"),
    ):
        pass


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    """Nothing stays beside it, whether the block ends well or not."""
    folder, new = make(tmp_path / "best", "old"), tmp_path / ".best.tmp"
    make(new, "of a killed process")
    with pytest.raises(OSError, match="full"), replacing(folder, new):
        make(new, "new")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["best"] and (folder / "file").read_text() == "old"
    with replacing(folder, new):
        make(new, "new")
        with pytest.raises(UserError, match="another process is writing there"), replacing(folder, new):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["best"] and (folder / "file").read_text() == "new"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_in_the_encodings_that_its_mark_tells(tmp_path, encoding):
    (tmp_path / "text").write_bytes("東京\r\n".encode(encoding))
    assert read_text(tmp_path / "text") == "東京\n"


def test_the_line_of_what_is_no_text_is_named(tmp_path):
    (tmp_path / "text").write_bytes(b"a\nb\xffc\n")
    with pytest.raises(UserError, match=r"text:2: not valid UTF-8 \(invalid start byte\); save it as UTF-8"):
        read_text(tmp_path / "text")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "too many lists or objects in each other"),
        ('{"a": ' * 100_000, "too many lists or objects in each other"),
        ("[1]", "expected a JSON object, found list"),
        ('{"a": ' + "1" * 10_000 + "}", "Exceeds the limit"),
        ("{}", "name is missing"),
    ],
)
def test_json_that_is_no_settings_is_refused_in_one_line(content, message, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        read_json(tmp_path / "x.json", ["name"])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_json_of_a_gigabyte_is_not_read(tmp_path):
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(UserError, match=r"x\.json: 1073741824 bytes, and a JSON file here has at most"):
        read_json(tmp_path / "x.json")
