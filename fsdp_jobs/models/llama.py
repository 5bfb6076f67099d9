"""A plain Llama, and its form in transformers.

Touvron et al. 2023, arXiv:2302.13971; Llama 3.1's RoPE scaling: arXiv:2407.21783.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_jobs.config.schema import LlamaConfig

_linear = partial(nn.Linear, bias=False)
_CONTEXT, _LOW, _HIGH = 8192, 1.0, 4.0  # tokens before RoPE scaling, and the turns within them that bound it


def rotary_angles(config: LlamaConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, each [length, head_dim / 2], fp32.

    With `rope_scaling_factor` s > 1, wavelengths beyond 8192 are stretched by s, those under 8192 / 4
    are kept, and those between are interpolated (Llama 3.1).
    """
    head_dim = config.dim // config.n_heads
    frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    if config.rope_scaling_factor > 1.0:
        turns = _CONTEXT * frequencies / (2 * math.pi)
        smooth = ((turns - _LOW) / (_HIGH - _LOW)).clamp(0.0, 1.0)
        frequencies = frequencies * (smooth + (1 - smooth) / config.rope_scaling_factor)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary angles to x [batch, heads, length, head_dim]; pairs are (i, i + head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _takes_grouped_heads(q: Tensor) -> bool:
    """Return whether a fused kernel supports grouped heads: on CUDA flash and cuDNN, 16 bits, from sm80 on.

    Otherwise torch multiplies whole matrices, and keeps heads x length x length elements for backward.
    """
    if q.device.type != "cuda":
        return True
    return q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0)


class Attention(nn.Module):
    """Causal grouped-query attention over x [batch, length, dim]."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.dim // config.n_heads
        self.wq = _linear(config.dim, self.heads * self.head_dim)
        self.wk = _linear(config.dim, self.kv_heads * self.head_dim)
        self.wv = _linear(config.dim, self.kv_heads * self.head_dim)
        self.wo = _linear(self.heads * self.head_dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor, n: int) -> Tensor:
            return projected.view(batch, length, n, self.head_dim).transpose(1, 2)

        q = rotate(heads(self.wq(x), self.heads), cos, sin)
        k = rotate(heads(self.wk(x), self.kv_heads), cos, sin)
        v = heads(self.wv(x), self.kv_heads)
        grouped = self.kv_heads != self.heads
        if grouped and not _takes_grouped_heads(q):
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = _linear(config.dim, config.ffn_dim)
        self.w2 = _linear(config.ffn_dim, config.dim)
        self.w3 = _linear(config.dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward; the unit FSDP gathers."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Tokens [batch, length] (int64) to logits [batch, length, vocab_size]."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = _linear(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_angles(self.config, tokens.shape[1], tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))  # type: ignore[no-any-return]

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill one unsharded parameter: N(0, 0.02), residual projections scaled by depth (GPT-2), norms 1."""
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            return
        into_residual = name.endswith(("wo.weight", "w2.weight"))
        std = 0.02 / math.sqrt(2 * self.config.n_layers) if into_residual else 0.02
        parameter.normal_(0.0, std, generator=generator)

    def head_modules(self) -> list[nn.Module]:
        """Return the modules that run last and are needed first in backward: gathered once, as one FSDP unit."""
        tied = self.output.weight is self.tok_embeddings.weight
        return [self.tok_embeddings, self.norm, self.output] if tied else [self.norm, self.output]


# Our Llama's names -> transformers' LlamaForCausalLM. (Both rotate the halves of a head: weights need no permutation.)
_HF_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "attention.wq.": "self_attn.q_proj.",
    "attention.wk.": "self_attn.k_proj.",
    "attention.wv.": "self_attn.v_proj.",
    "attention.wo.": "self_attn.o_proj.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "norm.": "model.norm.",
    "output.": "lm_head.",
}


def hf_name(name: str) -> str:
    """Return transformers' name of one of our parameters."""
    for ours, theirs in _HF_NAMES.items():
        if name.startswith(ours) or f".{ours}" in name:
            name = name.replace(ours, theirs, 1)
    return name


def hf_config(model: LlamaConfig, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return the content of transformers' config.json."""
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "intermediate_size": model.ffn_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": max(seq_len, _CONTEXT),
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    if model.rope_scaling_factor > 1.0:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": _CONTEXT,
        }
    return content
