"""Serve a model behind the OpenAI interface, with a page to try it."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import tyro

from jaxspec.cli.options import DrafterOptions, parse
from jaxspec.cli.program import enable_compilation_cache
from jaxspec.config import MeshConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, AcceptanceName
from jaxspec.drafters import load_drafter
from jaxspec.errors import UserError, check_at_least
from jaxspec.serving.engine import Engine, Limits

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]*)?")
_USUAL_PORTS = {"http": 80, "https": 443}  # browsers leave them out
_NEEDED = ("starlette", "uvicorn", "prometheus_client")


@dataclasses.dataclass(frozen=True)
class ServeOptions(DrafterOptions):
    """Serve a model to clients of the OpenAI interface, and a chat at /.

    Attributes:
      tree: draft tree, as in `jaxspec decode`; best:4@1,8@1 chooses a size in every step, by load and acceptance, with
        step times measured at the start; default auto: the choice of `jaxspec tune`, else several such sizes, down to
        no draft.
      draft_vocabulary: draft only this many tokens, those that the base uses most; 0 drafts all; default the adapter's
        size.
      accept: match gives the text that the request alone would get; rejection and, of
        chains alone, block, when sampling, another text of the same distribution; typical, when sampling, is lossy.
      mesh: devices that share the work.
      limits: limits of the engine, which bound its memory.
      host: address to listen at; 0.0.0.0 for all.
      port: port to listen at; 0 takes a free one.
      name: name of the model for clients; default the model's name, and of a path also its last part.
      api_key: key that clients must send; empty for none. Default the environment variable JAXSPEC_API_KEY, which
        other users of the machine cannot see.
      allow_origin: origin of pages that browsers let use the server, as in http://localhost:3000; * for all; may be
        repeated. Default none.
      per_request_spec_decode_metrics: summary tells in each response how the drafts of its answer fared.
      penalties: clients may ask for repetition_penalty, presence_penalty and frequency_penalty; every step then takes
        a little longer, asked or not.
      max_body_bytes: largest request body, in bytes.
      grace: seconds that running requests have after SIGTERM.
    """

    default_method: ClassVar[str] = "hidden_transfer+prompt_lookup"
    tree: str = ""
    draft_vocabulary: int | None = None
    accept: AcceptanceName = "match"
    mesh: MeshConfig = MeshConfig()
    limits: Limits = Limits()
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    api_key: str = dataclasses.field(default="", repr=False)
    allow_origin: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ORIGIN"), tyro.conf.UseAppendAction] = ()
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    penalties: bool = False
    max_body_bytes: int = 4 * 2**20
    grace: float = 60.0


def main(args: list[str]) -> None:
    """Parse, check, serve."""
    options = parse(ServeOptions, args)
    check(options)
    serve(options)


def check(options: ServeOptions) -> None:
    """Raise UserError for options that make no sense, before anything is loaded."""
    check_at_least(options, {"port": 0, "max_body_bytes": 1, "grace": 0})
    if options.port > 65535:
        raise UserError(f"port must be at most 65535, got {options.port}")
    for origin in options.allow_origin:
        if origin == "null":
            raise UserError(
                "allow-origin null: browsers send it for every file and every sandboxed frame, whoever wrote it; serve "
                "the page from an origin of its own, as in http://localhost:3000, or allow all with *"
            )
        if origin != "*" and not is_origin(origin):
            raise UserError(
                "allow-origin must be * or an origin as browsers send it, in small letters and without a path or a "
                f"usual port, as in http://localhost:3000, got {origin!r}"
            )
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"the server needs {', '.join(missing)}; in a clone, install with: pip install -e '.[serve]'")


def is_origin(text: str) -> bool:
    """Whether a browser may send this as the origin of a page that can be told from others."""
    if not _ORIGIN.fullmatch(text):
        return False
    try:  # of parts that only look right
        parts = urlsplit(text)
        return parts.port is None or parts.port != _USUAL_PORTS.get(parts.scheme)
    except ValueError:
        return False


def serve(options: ServeOptions) -> None:
    """Load, compile, and answer until SIGTERM; requests that run then are finished first."""
    from jaxspec.serving.api import make_app
    from jaxspec.serving.server import bind, run

    enable_compilation_cache()
    _log_to_stderr()
    began = time.monotonic()
    sock = bind(options.host, options.port)
    model = options.load_model(options.mesh)
    spec = options.drafter(tree=options.tree or None, vocabulary=options.draft_vocabulary)
    acceptance = ACCEPTANCES[options.accept]()
    drafter = load_drafter(spec.accepted_by(acceptance), model, slots=options.limits.slots)
    engine = Engine(model, drafter, options.limits, acceptance, options.penalties)
    print("compiling what requests will need: minutes at the first start, less at later ones", file=sys.stderr)
    engine.warm_up()
    key = options.api_key or os.environ.get("JAXSPEC_API_KEY", "")
    name, *aliases = names(options.name, model.name)
    app = make_app(
        engine,
        name,
        key,
        options.max_body_bytes,
        options.grace,
        aliases=aliases,
        origins=options.allow_origin,
        draft_metrics=options.per_request_spec_decode_metrics == "summary",
    )

    def ready() -> None:
        print(
            f"{name} with {drafter.name}: {options.limits.slots} slots of {engine.max_length} tokens, "
            f"{engine.memory / 1e6:.0f} MB beside the weights; ready after {time.monotonic() - began:.0f} s at "
            f"http://{options.host}:{sock.getsockname()[1]}",
            file=sys.stderr,
        )

    run(app, sock, options.grace, ready)


def names(given: str, model: str) -> list[str]:
    """Names that clients may use, the one to tell them first: the given one, or those of a model's name or path."""
    if given:
        return [given]
    last = Path(os.path.abspath(model)).name
    return [model] if last == model else [last, model] if Path(model).exists() else [model, last]


def _log_to_stderr() -> None:
    """Log one line per request; not through the root logger, which libraries may have set up."""
    handler, log = logging.StreamHandler(), logging.getLogger("jaxspec.serving")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
