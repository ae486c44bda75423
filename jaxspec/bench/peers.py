"""Peers in a benchmark: Hugging Face transformers on PyTorch, with the same weights, prompts and clock.

They need PyTorch, which is not required otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.errors import UserError, first_line
from jaxspec.generation.generate import Generation
from jaxspec.weights.load import save_model
from jaxspec.weights.model import Model

PEERS: dict[str, dict[str, Any]] = {"hf_greedy": {}, "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10}}
ASSISTED = "hf_assisted"


class Peer:
    """One way in which transformers decodes.

    Args:
      model: a torch model.
      settings: for its `generate`.
      ours: the base, whose tokenizer and end-of-text ids are used.
    """

    def __init__(self, model: Any, settings: dict[str, Any], ours: Model):
        self._model, self._settings, self._ours, self._warm = model, settings, ours, False

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: SamplingConfig, seed: int
    ) -> list[Generation]:
        """Answer prompts one after the other; the very first one twice, to warm up."""
        if not self._warm:
            self._answer(prompts[0], max_new_tokens, sampling, seed)
            self._warm = True
        return [self._answer(prompt, max_new_tokens, sampling, seed) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int, sampling: SamplingConfig, seed: int) -> Generation:
        import torch

        torch.manual_seed(seed)
        how: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature:
            filters = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            how |= filters | {"min_p": sampling.min_p or None}
        ids = torch.tensor([list(prompt)], device=self._model.device)
        began = _now()
        with _watched(self._model) as passes:
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, pad_token_id=0,
                eos_token_id=list(self._ours.eos) or None, **how, **self._settings,
            )  # fmt: skip
        tokens = out[0, len(prompt) :].tolist()
        emitted = tokens_by_pass([held for _, held in passes], len(prompt), len(tokens))
        prefill, decode = seconds([began, *(ended for ended, _ in passes), _now()], len(emitted) == len(passes))
        return Generation(
            prompt=self._ours.decode(list(prompt)),
            text=self._ours.decode(tokens),
            tokens=tokens,
            drafted_by=[0, *(int(place < count - 1) for count in emitted for place in range(count))],
            steps=len(emitted),
            offered=[],
            accepted=[],
            prefill_seconds=prefill,
            decode_seconds=decode,
            compile_seconds=0.0,
        )


def _now() -> float:
    """The time once the device has finished its work."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(clock: Sequence[float], shared: bool) -> tuple[float, float]:
    """Seconds of prefill and of decoding.

    Args:
      clock: the beginning, the end of every pass, the end of all.
      shared: whether the first pass also verified candidates; then the time of another pass counts as decoding.
    """
    first, passes = clock[1] - clock[0], np.diff(clock[1:-1])
    other = min(first, float(np.median(passes)) if len(passes) else first) if shared else 0.0
    return first - other, clock[-1] - clock[1] + other


def tokens_by_pass(held: Sequence[int], prompt: int, tokens: int) -> list[int]:
    """Tokens emitted by every pass after prefill.

    The pass over a prompt may also verify candidates: tokens that it emits beyond the first count as a pass.

    Args:
      held: tokens in the cache before each pass.
      prompt: number of tokens of the prompt.
      tokens: number of tokens of the complete answer.
    """
    ends = [*held[1:], prompt + tokens - 1]  # the newest token is in no cache
    first, *rest = (end - start for start, end in zip([prompt - 1, *held[1:]], ends, strict=True))
    return [*([first - 1] if first > 1 else []), *rest]


def cache_name(model: Any) -> str:
    """The name of the cache among a model's inputs and outputs, which transformers changed in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextlib.contextmanager
def _watched(model: Any) -> Iterator[list[tuple[float, int]]]:
    """Record when each pass of a model ended, and how many tokens the cache held before it."""
    passes: list[tuple[float, int]] = []
    held, name = 0, cache_name(model)

    def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal held
        cache = kwargs.get(name)
        held = 0 if cache is None else int(cache.get_seq_length())

    def after(module: Any, args: tuple, output: Any) -> None:
        passes.append((_now(), held))

    hooks = model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def library() -> str:
    """The libraries and the device that peers run on."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch"))
    return ", ".join(versions)


def load_peers(model: Model, assistant: str = "") -> dict[str, Peer]:
    """Every way in which transformers decodes, with the weights of a base.

    Args:
      model: the base.
      assistant: a smaller model for assisted generation, as transformers takes it; empty: without.

    Raises:
      UserError: torch is not there, or a model cannot be loaded.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("--peers needs PyTorch: pip install torch")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--peers: this PyTorch sees no GPU, and its speed on the CPU would say nothing; install it with CUDA"
        )

    dtype = getattr(torch, str(model.base.dtype))

    def load(path: str) -> Any:
        try:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
        except Exception as error:  # transformers raises many kinds
            reason = first_line(error)
            raise UserError(f"peers: {path}: transformers cannot load it ({reason})") from None

    with tempfile.TemporaryDirectory() as folder:  # the very weights that jaxspec decodes with, wherever they came from
        save_model(model, Path(folder) / "base")
        base = load(str(Path(folder) / "base"))
    settings = dict(PEERS)
    if assistant:
        settings[ASSISTED] = {"assistant_model": (helper := load(assistant))}
        if helper.config.vocab_size != base.config.vocab_size:
            sizes = f"{helper.config.vocab_size} tokens, {model.name!r} has {base.config.vocab_size}"
            raise UserError(f"assistant {assistant!r} has another vocabulary: {sizes}")
    return {name: Peer(base, chosen, model) for name, chosen in settings.items()}
