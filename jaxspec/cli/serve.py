"""Serve a model behind the OpenAI interface, with a page to try it."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import time
from typing import Literal

from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache
from jaxspec.config import MeshConfig
from jaxspec.decoding.acceptance import ACCEPTANCES
from jaxspec.errors import UserError, check_at_least
from jaxspec.methods import load_drafter
from jaxspec.serving.engine import Engine, Limits
from jaxspec.weights.load import DEFAULT_MODEL, load_model

_NEEDED = ("starlette", "uvicorn", "prometheus_client")


@dataclasses.dataclass(frozen=True)
class Options:
    """Serve a model to clients of the OpenAI interface, and a chat at /.

    Attributes:
      method: how to draft; several joined by a + draft together, as in hidden_transfer+prompt_lookup.
      model: a Hugging Face directory or hub name, a base that train.py or export.py made, or a GGUF file.
      adapter: folder of a trained adapter; default the one that ships for this method and model.
      tree: draft tree, as decode.py takes it; best:1@21,5@26 chooses in every step, by load and acceptance.
      draft_vocabulary: draft only so many of the tokens that the base itself uses most; 0 drafts all; default the
        adapter's own.
      template: a chat template by name: llama2, llama2-short, vicuna, vicuna-short or falcon; default the tokenizer's.
      accept: match gives the text that a request's seed has alone; rejection, when sampling, another text of the same
        distribution; typical, when sampling, is lossy.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      mesh: devices that share the work.
      limits: what is held at most.
      host: address to listen at; 0.0.0.0 for all.
      port: to listen at.
      name: of the model for clients; default the model's.
      api_key: what clients must show; default the environment variable JAXSPEC_API_KEY, which other users of the
        machine cannot see; empty: nothing.
      most_bytes: of a request's body.
      grace: seconds that running requests have after SIGTERM.
    """

    method: str = "hidden_transfer+prompt_lookup"
    model: str = DEFAULT_MODEL
    adapter: str = ""
    tree: str = ""
    draft_vocabulary: int | None = None
    template: str = ""
    accept: Literal["match", "rejection", "typical"] = "match"
    dtype: str = ""
    mesh: MeshConfig = MeshConfig()
    limits: Limits = Limits()
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    api_key: str = dataclasses.field(default="", repr=False)
    most_bytes: int = 4 * 2**20
    grace: float = 60.0


def main(args: list[str]) -> None:
    """Parse, check, serve."""
    options = parse(Options, args)
    check(options)
    serve(options)


def check(options: Options) -> None:
    """Raise UserError for options that make no sense, before anything is loaded."""
    check_at_least(options, {"port": 1, "most_bytes": 1, "grace": 0})
    if options.port > 65535:
        raise UserError(f"port must be at most 65535, got {options.port}")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"the server needs {', '.join(missing)}; install with: pip install 'jaxspec[serve]'")


def serve(options: Options) -> None:
    """Load, compile, and answer until SIGTERM; what runs then is finished first."""
    import uvicorn

    from jaxspec.serving.api import make_app

    enable_compilation_cache()
    _log_to_stderr()
    began = time.monotonic()
    model = load_model(options.model, options.dtype or None, options.mesh, options.template)
    settings = {"tree": options.tree or None, "draft_vocabulary": options.draft_vocabulary}
    drafter = load_drafter(options.method, model, options.adapter or None, **settings)
    engine = Engine(model, drafter, options.limits, ACCEPTANCES[options.accept]())
    engine.warm_up()
    key = options.api_key or os.environ.get("JAXSPEC_API_KEY", "")
    name = options.name or model.name
    app = make_app(engine, name, key, options.most_bytes, options.grace)
    limits, grace = options.limits, max(int(options.grace), 1)
    print(
        f"{name} with {drafter.name}: {limits.slots} slots of {engine.max_length} tokens, {engine.memory / 1e6:.0f} MB "
        f"beside the weights; ready after {time.monotonic() - began:.0f} s at http://{options.host}:{options.port}",
        file=sys.stderr,
    )
    # uvicorn raises the signal once more when it has ended well: that is no reason to die of it
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.run(
        app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=grace, ws="none"
    )


def _log_to_stderr() -> None:
    """A line per request; libraries may have set up the root logger, so it goes its own way."""
    handler, log = logging.StreamHandler(), logging.getLogger("jaxspec.serving")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
