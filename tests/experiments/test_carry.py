"""What is carried to a machine without network."""

import subprocess

from experiments.carry import INSTALL, cut


def test_parts_are_put_together_again(tmp_path):
    """install.sh hands pip the wheel that was cut, and those that were not."""
    there = tmp_path / "there"
    there.mkdir()
    content = bytes(range(256)) * 10
    (there / "large-1-py3-none-any.whl").write_bytes(content)
    (there / "small-1-py3-none-any.whl").write_bytes(b"small")
    cut(there / "large-1-py3-none-any.whl", 1000)
    assert [file.stat().st_size for file in sorted(there.glob("large*"))] == [1000, 1000, 560]
    (there / "install.sh").write_text(INSTALL)
    python = tmp_path / "bin" / "python3"  # stands in for pip: keeps the wheels that it is given
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nfor word in "$@"; do case $word in *.whl) cp "$word" {tmp_path};; esac; done\n')
    python.chmod(0o755)
    path = f"{python.parent}:/usr/bin:/bin"
    subprocess.run(["sh", str(there / "install.sh"), str(tmp_path / "site")], check=True, env={"PATH": path})
    assert (tmp_path / "large-1-py3-none-any.whl").read_bytes() == content
    assert (tmp_path / "small-1-py3-none-any.whl").read_bytes() == b"small"
