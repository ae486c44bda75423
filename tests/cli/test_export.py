"""Bases written for other software."""

import dataclasses
import json

import jax
import pytest

from jaxspec.cli import decode, export
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.errors import UserError
from jaxspec.methods import SPACE
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.params import params_fingerprint
from tests.helpers.cli import named
from tests.helpers.tiny import make_text_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "ppd"], "ppd leaves the base as it is"),
        ([], "ppd leaves the base as it is"),
        (["--output", "."], "give a new directory"),
    ],
)
def test_what_cannot_be_exported_is_refused(files, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        export.main([*named(files), "--output", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_the_base_that_a_method_has_tuned_is_exported_with_what_drafts_on_it(files, tmp_path, capsys):
    model = load_model(str(files / "model"))
    method = SPACE(rank=2)
    trainable = jax.tree.map(lambda x: x + 0.1, method.init(jax.random.key(0), model.base))
    space, out = tmp_path / "space", tmp_path / "out"
    save_adapter(space, Adapter(method, trainable, model.fingerprint, {"tree": [[0]]}))
    export.main(["--model", str(files / "model"), "--method", "space", "--adapter", str(space), "--output", str(out)])
    tuned = load_drafter("space", model, space).model.fingerprint
    assert tuned in capsys.readouterr().out and load_model(str(out)).fingerprint == tuned
    options = ["--model", str(out), "--method", "space", "--adapter", str(out / "adapter"), "--max-new-tokens", "8"]
    decode.main([*options, "--prompt", "one", "--compare", "--json"])
    assert json.loads(capsys.readouterr().out)["identical_to_autoregressive"]


def test_a_dtype_that_makes_another_base_is_pointed_out(tmp_path, capsys):
    model = make_text_model(num_layers=1)
    params = jax.tree.map(lambda x: x * 1e-6, model.params)  # float16 loses digits
    model = dataclasses.replace(model, params=params, fingerprint=params_fingerprint(model.config, params))
    save_model(model, tmp_path / "base", "orbax")
    for dtype, same in (("float32", True), ("float16", False)):
        export.main(["--model", str(tmp_path / "base"), "--dtype", dtype, "--output", str(tmp_path / dtype)])
        said, written = capsys.readouterr().out, load_model(str(tmp_path / dtype)).fingerprint
        assert f"fingerprint {written}" in said
        assert (written == model.fingerprint) == same == ("do not fit this one" not in said)
