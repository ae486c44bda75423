"""Files that a kill must not lose."""

from pathlib import Path

import pytest

from jaxspec.files import restore_folder, swap_folder


def make(folder, content):
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


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


def test_nothing_to_restore(tmp_path):
    restore_folder(tmp_path / "best")
    assert not list(tmp_path.iterdir())
