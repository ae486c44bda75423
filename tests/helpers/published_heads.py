"""Published Medusa, Hydra and PPD drafters of random weights, and what they compute, by PyTorch and transformers."""

import json

import numpy as np
import safetensors.numpy

from jaxspec.weights.load import save_model

WIDTH, TOKENS = 32, 16  # of the tiny base
MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
HYDRA = {
    "hydra_num_heads": 3,
    "hydra_num_layers": 2,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "transformers_version": "4.34.1",
}
PPD = {
    "peft_type": "PROMPT_TUNING",
    "task_type": "CAUSAL_LM",
    "num_special_tokens": 3,
    "virtual_tokens_per_special_token": 1,
    "num_virtual_tokens": 3,
    "token_dim": WIDTH,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_transformer_submodules": 1,
    "num_exits": 1,
    "vt_attention_type": "decoder",
    "aggregation_type": "mean",
    "use_prefix_tuning": False,
    "prefix_virtual_tokens": None,
    "use_custom_lm_head": False,
}


def random(shapes, dtype=np.float32, seed=0):
    """Tensors of these shapes by name."""
    rng = np.random.default_rng(seed)
    return {name: (("norm" in name) + 0.3 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}


def linear(name, out, width):
    """Shapes of a matrix and its bias."""
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def medusa(heads=5, blocks=2, dtype=np.float32):
    """Tensors of as many heads as are published, where the config says 2."""
    shapes = {}
    for h in range(heads):
        for b in range(blocks):
            shapes |= linear(f"{h}.{b}.linear", WIDTH, WIDTH)
        shapes[f"{h}.{blocks}.weight"] = (TOKENS, WIDTH)
    return random(shapes, dtype)


def hydra(config, heads=3, blocks=2, dtype=np.float32):
    """Tensors of `mlp`, or of `prefix-mlp`, whose dropout takes every other number."""
    prefix = config["hydra_head_arch"] == "prefix-mlp"
    shapes = {}
    for h in range(heads):
        for b in range(blocks):
            name = f"hydra_mlp.{h}.{2 * b + 1 if prefix else b}"
            width = (h + 2) * WIDTH if b == 0 else WIDTH
            shapes |= linear(f"{name}.linear", WIDTH, width)
            shapes |= linear(f"{name}.res_connection", WIDTH, width) if b == 0 else {}
        shapes |= linear(f"hydra_lm_head.{h}{'.1' if prefix else ''}", TOKENS, WIDTH)
    if prefix:
        layer = {f"self_attn.{name}_proj": (out, WIDTH) for name, out in zip("qkvo", (32, 16, 16, 32), strict=True)}
        layer |= {"mlp.gate_proj": (48, WIDTH), "mlp.up_proj": (48, WIDTH), "mlp.down_proj": (WIDTH, 48)}
        layer |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        named = {f"layers.0.{name}": shape for name, shape in layer.items()}
        named |= {"embed_tokens": (TOKENS, WIDTH), "norm": (WIDTH,)}
        shapes |= {f"prefix_embeding_layer.{name}.weight": shape for name, shape in named.items()}
    return random(shapes, dtype)


def one_layer():
    """The tiny base's shapes for transformers, with one layer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
    )


def ppd(config, dtype=np.float32):
    """Tensors of the three files."""
    special, virtual = config["num_special_tokens"], config["virtual_tokens_per_special_token"]
    shapes = {"adapter_model.safetensors": {"prompt_embeddings": (special * virtual, WIDTH)}}
    if config["aggregation_type"] == "weighted":
        shapes["weighting_layers.pt"] = {f"{i}.weight": (1, virtual) for i in range(special)}
    if config["use_custom_lm_head"]:
        shapes["custom_lm_head.pt"] = {"weight": (TOKENS, WIDTH)}
    return {file: random(each, dtype, seed) for seed, (file, each) in enumerate(shapes.items())}


def write(folder, config, files):
    """A folder of a config and of tensors by the name of their file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "adapter_config.json" if "peft_type" in config else "config.json"
    (folder / name).write_text(json.dumps(config))
    for file, tensors in files.items():
        if file.endswith(".safetensors"):
            (folder / file).write_bytes(safetensors.numpy.save(tensors))
        else:
            import torch

            torch.save({name: torch.from_numpy(x.copy()) for name, x in tensors.items()}, folder / file)
    return folder


class Reference:
    """The base in transformers, and drafters on it, in double precision.

    Args:
      model: the base.
      folder: to write it into.
      tokens: [T] of one text.
    """

    def __init__(self, model, folder, tokens):
        import torch
        from transformers import AutoModelForCausalLM

        save_model(model, folder)
        self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.tokens = torch.tensor(np.asarray(tokens))
        self.embedded = self.base.model.embed_tokens(self.tokens)

    def medusa(self, tensors, heads, blocks):
        """Logits [T, heads, V]."""
        import torch

        w = doubles(tensors)
        state, logits = self.base.model(self.tokens[None]).last_hidden_state[0], []
        for h in range(heads):
            x = state
            for b in range(blocks):
                x = x + silu(x @ w[f"{h}.{b}.linear.weight"].T + w[f"{h}.{b}.linear.bias"])
            logits.append(x @ w[f"{h}.{blocks}.weight"].T)
        return torch.stack(logits, 1).detach().numpy()

    def hydra(self, tensors, heads, blocks):
        """Logits [T, heads, V] where the tokens between are the text's."""
        import torch
        from transformers import LlamaModel

        w = doubles(tensors)
        state = self.base.model(self.tokens[None]).last_hidden_state
        prefix = [name for name in w if name.startswith("prefix")]
        if prefix:
            layer = LlamaModel(one_layer()).double()
            layer.load_state_dict({name.removeprefix("prefix_embeding_layer."): w[name] for name in prefix})
            state = layer(inputs_embeds=state).last_hidden_state
        read, logits = [state[0]], []
        for h in range(heads):
            read.append(self.embedded.roll(-1 - h, 0))
            x = torch.cat(read, -1)
            for b in range(blocks):
                name = f"hydra_mlp.{h}.{2 * b + 1 if prefix else b}"
                inner = silu(x @ w[f"{name}.linear.weight"].T + w[f"{name}.linear.bias"])
                x = inner + (
                    x @ w[f"{name}.res_connection.weight"].T + w[f"{name}.res_connection.bias"] if b == 0 else x
                )
            name = f"hydra_lm_head.{h}{'.1' if prefix else ''}"
            logits.append(x @ w[f"{name}.weight"].T + w[f"{name}.bias"])
        return torch.stack(logits, 1).detach().numpy()

    def ppd(self, config, files, point):
        """Logits [special, V] of the prompt tokens behind the token at `point`."""
        import torch

        w = doubles({name: x for tensors in files.values() for name, x in tensors.items()})
        special, virtual = config["num_special_tokens"], config["virtual_tokens_per_special_token"]
        length, count = point + 1, special * virtual
        at, copy = np.repeat(np.arange(special), virtual), np.tile(np.arange(virtual), special)
        sees = {
            "decoder": np.tril(np.ones((count, count), bool)),
            "encoder": at[:, None] == at,
            "ensemble": (at[:, None] >= at) & (copy[:, None] == copy),
        }[config["vt_attention_type"]]
        mask = np.tril(np.ones((length + count, length + count), bool))
        mask[length:, length:] = sees
        out = self.base.model(
            inputs_embeds=torch.cat([self.embedded[:length], w["prompt_embeddings"]])[None],
            attention_mask=torch.tensor(np.where(mask, 0.0, -np.inf))[None, None],
            position_ids=torch.tensor(np.concatenate([np.arange(length), length + at]))[None],
            output_hidden_states=True,
        )
        states = torch.stack(out.hidden_states[-config["num_exits"] :]).mean(0)[0, length:]
        logits = (states @ w.get("weight", self.base.lm_head.weight).T).reshape(special, virtual, -1)
        if config["aggregation_type"] == "mean":
            return logits.mean(1).detach().numpy()
        return torch.stack([w[f"{i}.weight"][0] @ logits[i] for i in range(special)]).detach().numpy()


def doubles(tensors):
    """Of PyTorch, in double precision."""
    import torch

    return {name: torch.tensor(np.asarray(x, np.float64)) for name, x in tensors.items()}


def silu(x):
    """As published."""
    import torch

    return torch.nn.functional.silu(x)
