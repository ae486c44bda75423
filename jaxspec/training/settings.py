"""Settings of training, beyond the method's own: where the text comes from, and how an adapter learns from it."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TextSource:
    """One of several sources of training text (a text source); all but the weight is as in `DataConfig`.

    Attributes:
      prompts: a file, or a data set on the hub.
      split: split of a data set on the hub.
      column: name of the prompt's column, or of the conversation's.
      regenerate: the base writes the answers to conversations itself.
      context_column: name of a column with what the prompt is about.
      answer_column: name of the column with the answers to learn.
      weight: the source's share of all answers is its weight over the sum of all weights; 0 leaves the source out.
    """

    prompts: str
    split: str = "train"
    column: str = "prompt"
    regenerate: bool = False
    context_column: str = ""
    answer_column: str = ""
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the training text comes from: the base's own greedy answers to these prompts, or given answers.

    Attributes:
      prompts: a JSONL file with a `prompt` per line, or a data set on the hub, `owner/name` or where it has several
        configs `owner/name:config`; empty for the small set that ships with the project.
      split: split of a data set on the hub.
      column: name of the prompt's column; where it holds conversations (lists of messages with `role` and `content`,
        or `from` and `value`), every turn of the assistant is an answer to learn.
      regenerate: the base writes the answers to conversations itself, each behind the turns that the data set gives.
      context_column: name of a column with what the prompt is about, as Alpaca's `input`: goes below it where it holds
        anything; empty: there is none.
      answer_column: name of the column with the answers to learn; empty: the base writes them itself.
      mixture: several sources in place of `prompts`, mixed by weight; `prompts`, where given, replaces the mixture.
      answers: how many answers to train on; fewer when there are fewer prompts, of every source of a mixture.
      held_out: how many further prompts are set aside for evaluation, never trained on.
      held_out_seed: chooses the held-out prompts; the same for every method, so that figures compare.
      max_prompt_tokens: longer prompts are left out.
      max_answer_tokens: training answers are cut there.
      held_out_tokens: held-out answers are cut there.
      chat: wrap prompts in the tokenizer's chat template, where it has one.
      template: another chat template by name: llama2, vicuna (both with a system message, or llama2-short and
        vicuna-short) or falcon, as in BiTA's Table 6, or another of docs/models.md; or variables for the tokenizer's,
        as in enable_thinking=false.
      templates: every prompt is asked under each of these, by name; empty: under one.
      batch_size: prompts answered at once.
      cache: folder of the generated answers; they are made once per base and prompt set.
    """

    prompts: str = ""
    split: str = "train"
    column: str = "prompt"
    regenerate: bool = False
    context_column: str = ""
    answer_column: str = ""
    mixture: tuple[TextSource, ...] = ()
    answers: int = 2000
    held_out: int = 100
    held_out_seed: int = 0
    max_prompt_tokens: int = 160
    max_answer_tokens: int = 128
    held_out_tokens: int = 256
    chat: bool = True
    template: str = ""
    templates: tuple[str, ...] = ()
    batch_size: int = 32
    cache: str = "runs/answers"

    @property
    def text_sources(self) -> tuple[TextSource, ...]:
        """What the text is taken from: the mixture, or the one source that the fields describe."""
        if self.mixture and not self.prompts:
            return tuple(source for source in self.mixture if source.weight)
        names = (field.name for field in dataclasses.fields(TextSource) if field.name != "weight")
        return (TextSource(**{name: getattr(self, name) for name in names}),)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How an adapter is trained.

    Attributes:
      steps: optimizer updates.
      together: updates per call of the device: 0 is 1 on CPUs and 16 on accelerators. A call ends early before a batch
        of another length, and at a checkpoint, an evaluation or a stage's end. On a mesh it is 1.
      batch_size: sequences per update.
      microbatch: sequences per forward and backward pass, which bounds the memory; 0 is all. On a mesh that divides the
        batch every part takes so many. Gradients of the passes are averaged, each with the same weight whatever its
        number of targets.
      sequence_length: T, prompt and answer together, in tokens; cut to it.
      lengths: lengths of batches at most, each of which is a program to compile: batches are padded to the next of so
        many equal steps of sequence_length.
      insertions: insertion points per sequence, fewer where there are fewer: each is one group of probes in one pass. A
        pass averages over the targets it has.
      positions: where they lie: among the tokens of the `answer`, which is what decoding meets, or of the whole `text`.
      learning_rate: the highest.
      schedule: its course after the warm-up: down along half a cosine or a line, or not at all.
      final_learning_rate: where that ends, as a share of the highest.
      warmup: updates of linear warm-up before that, divided over the stages of a method that has several.
      weight_decay: of AdamW.
      beta1: of AdamW.
      beta2: of AdamW.
      clip: largest global norm of a gradient; 0 does not clip.
      seed: of initialisation, data order and insertion points.
      eval_every: updates between evaluations on part of the held-out answers, also after the last one; 0 does without.
      eval_answers: held-out answers whose accuracies are measured at the end; 0 is all.
      save_every: updates between checkpoints.
      keep: how many of them.
      ema: the adapter is a moving average of the weights, of which every update keeps this share; 0: the last weights.
      tensorboard: write the log for TensorBoard too (needs the package tensorboardX).
      remat: recompute each layer's activations in the backward pass instead of storing them.
      adapter_dtype: of the adapter on disk; it trains in float32. int8 has a scale per column of every matrix.
    """

    steps: int = 1000
    together: int = 0
    batch_size: int = 4
    microbatch: int = 0
    sequence_length: int = 256
    lengths: int = 4
    insertions: int = 64
    positions: Literal["answer", "text"] = "answer"
    learning_rate: float = 1e-2
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_learning_rate: float = 0.0
    warmup: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 0.0
    seed: int = 0
    eval_every: int = 250
    eval_answers: int = 0
    save_every: int = 100
    keep: int = 2
    ema: float = 0.0
    tensorboard: bool = False
    remat: bool = False
    adapter_dtype: Literal["float32", "float16", "int8"] = "float16"
