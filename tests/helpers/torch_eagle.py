"""EAGLE-3's layer in PyTorch, with the projections that its published checkpoints hold. Needs torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from jaxspec.config import ModelConfig


class EagleLayer(nn.Module):
    """One decoder layer on a state beside an embedding, in double precision.

    Args:
      config: the base.
      trainable: our pytree, whose one product for queries, keys and values is taken apart.
      params: the base's parameters.
      states: two hidden states of the base per token, the higher one first, [T, D] each.
    """

    def __init__(self, config: ModelConfig, trainable: dict, params: dict, states: list[np.ndarray]):
        super().__init__()
        self.config, layer = config, trainable["layer"]
        self.states = [torch.tensor(np.asarray(x, np.float64)) for x in states]
        self.embedding = nn.Embedding.from_pretrained(torch.tensor(np.asarray(params["embedding"], np.float64)))
        self.fc, self.lm_head = self.linear(trainable["fc"]["kernel"]), self.linear(params["lm_head"])
        norms = [trainable["embedding_norm"], layer["attention_norm"], layer["mlp_norm"], trainable["norm"]]
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = map(self.rms_norm, norms)
        kernel = np.asarray(layer["attention"]["qkv"]["kernel"])
        heads = kernel.reshape(len(kernel), config.num_kv_heads, -1, config.head_dim)
        parts = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        self.q, self.k, self.v = (self.linear(part.reshape(len(kernel), -1)) for part in parts)
        self.o = self.linear(layer["attention"]["o"]["kernel"])
        self.gate, self.up, self.down = (self.linear(layer["mlp"][name]["kernel"]) for name in ("gate", "up", "down"))

    def linear(self, kernel: np.ndarray) -> nn.Linear:
        """From [in, out]."""
        made = nn.Linear(*kernel.shape, bias=False, dtype=torch.float64)
        made.weight.data = torch.tensor(np.asarray(kernel, np.float64).T)
        return made

    def rms_norm(self, params: dict) -> nn.RMSNorm:
        """With the base's epsilon."""
        made = nn.RMSNorm(len(params["scale"]), self.config.rms_norm_eps, dtype=torch.float64)
        made.weight.data = torch.tensor(np.asarray(params["scale"], np.float64))
        return made

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[heads, T, Dh]: the first half of every head against the second."""
        size = self.config.head_dim
        angles = positions[:, None] / self.config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def forward(
        self, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, cache: list, mask: torch.Tensor
    ) -> torch.Tensor:
        """States [T, D] and the tokens after them [T] to new states; keys and values [K, T, Dh] join the cache."""
        x = torch.cat([self.input_norm(self.embedding(tokens)), self.hidden_norm(state)], dim=-1)
        q, k, v = (y.view(len(x), -1, self.config.head_dim).transpose(0, 1) for y in (self.q(x), self.k(x), self.v(x)))
        cache.append((self.rotate(k, positions), v))
        keys, values = (torch.cat(parts, dim=1)[None] for parts in zip(*cache, strict=True))
        queries = self.rotate(q, positions)[None]
        out = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        state = state + self.o(out[0].transpose(0, 1).flatten(1))
        x = self.post_norm(state)
        return state + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    @torch.no_grad()
    def unrolled(self, tokens: np.ndarray, count: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Logits [count][T, V] along a text [T], and the keys and values [K, T, Dh] of the first unroll."""
        size = self.states[0].square().mean(-1, keepdim=True).sqrt()
        even = [x * size / x.square().mean(-1, keepdim=True).sqrt() for x in self.states]
        state, text, T = self.fc(torch.cat(even, dim=-1)), torch.tensor(tokens, dtype=torch.long), len(tokens)
        logits, cache, masks = [], [], []
        for unroll in range(count):
            masks.append(torch.eye(T, dtype=torch.bool) if unroll else torch.ones(T, T, dtype=torch.bool).tril())
            positions = torch.arange(T) + unroll
            state = self(state, text.roll(-1 - unroll), positions, cache, torch.cat(masks, dim=1))
            logits.append(self.lm_head(self.norm(state)).numpy())
        return logits, cache[0][0].numpy(), cache[0][1].numpy()
