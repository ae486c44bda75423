"""The clients: their packages, and what their users do with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a client finds what it needs.

    Attributes:
      url: of the server, without a path.
      python: of the client's environment.
      tokenizer: folder with the tokenizer of the served model.
      work: empty folder for the client's files.
    """

    url: str
    python: Path
    tokenizer: Path
    work: Path

    def program(self, name: str) -> str:
        """A program of the client's environment."""
        return str(self.python.with_name(name))


@dataclasses.dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
      packages: what pip installs for it.
      commands: the commands that its users run.
    """

    packages: tuple[str, ...]
    commands: Callable[[Setting], list[list[str]]]


def _script(name: str) -> Callable[[Setting], list[list[str]]]:
    return lambda setting: [[str(setting.python), str(_HERE / "scripts" / f"{name}.py")]]


def _llm(setting: Setting) -> list[list[str]]:
    model = {"model_id": "tiny", "model_name": "tiny", "api_base": f"{setting.url}/v1", "api_key_name": "none"}
    (setting.work / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    ask = [setting.program("llm"), "prompt", "-m", "tiny", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    return [
        [*ask, "hello there"],
        [*ask, "--no-stream", "-s", "be brief", "hello"],
        [*ask, "-c", "and more"],  # continues the conversation
        [*ask, "-o", "seed", "3", "-o", "temperature", "0.9", "-o", "top_p", "0.8", "hello"],
    ]


def _guidellm(setting: Setting) -> list[list[str]]:
    run = [setting.program("guidellm"), "run", "--tokenizer", f"kind=hf_auto,model={setting.tokenizer}"]
    run += [
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=12",
        "--constraint",
        "kind=max_requests,count=4",
    ]
    run += ["--output", f"kind=json,path={setting.work / 'report.json'}", "--disable-progress"]
    backend = {"kind": "openai_http", "target": setting.url, "model": "tiny", "extras": {"body": {"temperature": 0}}}
    chat, text = (json.dumps(backend | {"request_format": f"/v1/{path}completions"}) for path in ("chat/", ""))
    return [
        [*run, "--profile", "kind=synchronous", "--backend", chat],
        [*run, "--profile", "kind=concurrent,streams=2", "--backend", text],
    ]


def _aiperf(setting: Setting) -> list[list[str]]:
    run = [setting.program("aiperf"), "profile", "--model", "tiny", "--url", setting.url, "--ui", "none"]
    run += ["--tokenizer", str(setting.tokenizer), "--request-count", "6", "--concurrency", "2"]
    run += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "12"]
    run += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    return [
        [*run, "--endpoint-type", "chat", "--streaming", "--output-artifact-dir", str(setting.work / "chat")],
        [*run, "--endpoint-type", "completions", "--output-artifact-dir", str(setting.work / "completions")],
    ]


def _lm_eval(setting: Setting) -> list[list[str]]:
    questions = [{"question": f"{a} and {b} make", "answer": str(a + b), "wrong": str(a)} for a, b in ((1, 2), (2, 2))]
    (setting.work / "sums.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(setting.work / "sums.jsonl")}}}
    shared = data | {"test_split": "test", "doc_to_text": "{{question}}"}
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_target": 0}
    choose["doc_to_choice"] = "{{[answer, wrong]}}"
    write = {"task": "write", "output_type": "generate_until", "doc_to_target": "{{answer}}"}
    write["generation_kwargs"] = {"until": ["\n\n", "."], "max_gen_toks": 12, "temperature": 0}
    for task in (choose, write):
        (setting.work / f"{task['task']}.yaml").write_text(json.dumps(shared | task))
    arguments = f"model=tiny,base_url={setting.url}/v1/completions,tokenizer={setting.tokenizer},max_length=512"
    run = [setting.program("lm_eval"), "--include_path", str(setting.work), "--tasks", "choose,write"]
    return [[*run, "--model", "local-completions", "--model_args", arguments]]


CLIENTS = {
    "openai": Client(("openai",), _script("openai_client")),
    "langchain": Client(("langchain-openai",), _script("langchain_client")),
    "llm": Client(("llm",), _llm),
    "guidellm": Client(("guidellm",), _guidellm),
    "aiperf": Client(("aiperf",), _aiperf),
    "lm-eval": Client(("lm-eval[api]", "transformers"), _lm_eval),
}
