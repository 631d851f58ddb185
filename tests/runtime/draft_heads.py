"""Heads of tiny models with random weights, for tests: folders, and what they draft by plain
torch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quantized_checkpoints import edit_config
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

Weights = dict[str, torch.Tensor]
EPS = 1e-6


def make_eagle3(
    path: Path, model: Path, *, draft_vocab: int | None = None, seed: int = 3, **overrides: Any
) -> Path:
    """Write a head of EAGLE-3 for the model of a folder. With `draft_vocab`, it knows every second
    token, has its own numbers for them, and its own embedding.
    """
    config = json.loads((model / "config.json").read_text())
    size, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads, inner = 4, 2, 96
    known = draft_vocab or vocab
    torch.manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape) * 0.2

    head = size // heads
    weights = {
        "fc.weight": drawn(size, 3 * size),
        "norm.weight": 1 + drawn(size),
        "lm_head.weight": drawn(known, size),
        "midlayer.input_layernorm.weight": 1 + drawn(size),
        "midlayer.hidden_norm.weight": 1 + drawn(size),
        "midlayer.post_attention_layernorm.weight": 1 + drawn(size),
        "midlayer.self_attn.q_proj.weight": drawn(heads * head, 2 * size),
        "midlayer.self_attn.k_proj.weight": drawn(kv_heads * head, 2 * size),
        "midlayer.self_attn.v_proj.weight": drawn(kv_heads * head, 2 * size),
        "midlayer.self_attn.o_proj.weight": drawn(size, heads * head),
        "midlayer.mlp.gate_proj.weight": drawn(inner, size),
        "midlayer.mlp.up_proj.weight": drawn(inner, size),
        "midlayer.mlp.down_proj.weight": drawn(size, inner),
    }
    if draft_vocab is not None:
        weights["d2t"] = torch.arange(draft_vocab)  # Numbers 0, 2, 4, …, as differences.
        weights["t2d"] = torch.arange(vocab) % 2 == 0
        weights["embed_tokens.weight"] = drawn(vocab, size)
    write_eagle3(
        path,
        weights,
        {
            "hidden_size": size,
            "vocab_size": vocab,
            "draft_vocab_size": known,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            **overrides,
        },
    )
    return path


def write_eagle3(path: Path, weights: Weights, members: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **members,
    }
    (path / "config.json").write_text(json.dumps(content))


def eagle3_drafts(
    head: Path, embedding: torch.Tensor, states: list[torch.Tensor], tokens: list[int], count: int
) -> list[int]:
    """Return the likeliest drafts after `tokens` [N], as the paper computes them, without a cache.

    `states` are the model's hidden states [N, hidden] of the three layers.
    """
    weights, config = load_file(head / "model.safetensors"), LlamaConfig.from_pretrained(head)
    embedding = weights.get("embed_tokens.weight", embedding)
    ids = list(tokens[1:])
    fused = torch.cat(states, dim=-1)[: len(ids)] @ weights["fc.weight"].T
    drafts: list[int] = []
    while len(drafts) < count:
        summed = _mid_layer(weights, config, embedding[torch.tensor(ids)], fused)
        last = summed[-1]
        logits = _norm(last, weights["norm.weight"]) @ weights["lm_head.weight"].T
        token = int(logits.argmax())
        if "d2t" in weights:
            token += int(weights["d2t"][token])
        drafts.append(token)
        ids.append(token)
        # The head's own state takes the place of the model's.
        fused = torch.cat((fused, last[None]))
    return drafts


def _mid_layer(
    weights: Weights, config: LlamaConfig, embedded: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    own = {name.removeprefix("midlayer."): each for name, each in weights.items()}
    x = torch.cat(
        (
            _norm(embedded, own["input_layernorm.weight"]),
            _norm(states, own["hidden_norm.weight"]),
        ),
        dim=-1,
    )
    size = config.head_dim
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)
        for name in "qkv"
    )
    cos, sin = LlamaRotaryEmbedding(config)(x[None], torch.arange(len(x))[None])
    q, k = (each * cos[0] + _half_turned(each) * sin[0] for each in (q, k))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = states + attended.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
    y = _norm(x, own["post_attention_layernorm.weight"])
    gate, up = (y @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def make_with_next_layer(path: Path, architecture: str, *, layers: int = 2, **sizes: Any) -> Path:
    """Write a model whose checkpoint holds one layer more, which predicts one token more.

    `path / "whole"` is the same as a model of all layers, and `path / "layer"` holds the weights of
    the last one, for `NextLayerReference`.
    """
    whole = make_tiny_model(path / "whole", architecture, num_hidden_layers=layers + 1, **sizes)
    folder = path / "model"
    shutil.copytree(whole, folder)
    weights = load_file(folder / "model.safetensors")
    size, prefix = weights["model.norm.weight"].shape[0], f"model.layers.{layers}."
    torch.manual_seed(5)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(size)
    weights[f"{prefix}eh_proj.weight"] = 0.2 * torch.randn(size, 2 * size)
    # Copies of the model's own, as published.
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    own = {name for name in weights if name.startswith(prefix)}
    save_file(
        {name.removeprefix(prefix): weights[name] for name in own}, path / "layer.safetensors"
    )
    if architecture.startswith("qwen"):
        published = _as_mimo if architecture == "qwen2" else _as_mtp
        for name in own:
            weights |= published(name.removeprefix(prefix), weights.pop(name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    for name in ("mlp_layer_types", "layer_types"):
        if name in content:
            edit_config(folder, **{name: content[name][:layers]})
    edit_config(folder, num_hidden_layers=layers, num_nextn_predict_layers=1)
    if architecture == "qwen2":
        edit_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    return folder


def _as_mtp(name: str, weight: torch.Tensor) -> Weights:
    """Return a weight as checkpoints of Qwen hold it: norms less 1, and no copies of the model's
    own.
    """
    names = {
        "enorm.weight": "pre_fc_norm_embedding",
        "hnorm.weight": "pre_fc_norm_hidden",
        "shared_head.norm.weight": "norm",
    }
    if name in names:
        return {f"mtp.{names[name]}.weight": weight - 1}
    if name == "eh_proj.weight":
        return {"mtp.fc.weight": weight}
    if name.startswith(("embed_tokens", "shared_head")):
        return {}
    return {f"mtp.layers.0.{name}": weight}


def _as_mimo(name: str, weight: torch.Tensor) -> Weights:
    """Return a weight as checkpoints of MiMo hold it: its projection reads the hidden state first,
    and there are no copies of the model's own.
    """
    names = {
        "enorm.weight": "token_layernorm",
        "hnorm.weight": "hidden_layernorm",
        "shared_head.norm.weight": "final_layernorm",
    }
    if name in names:
        return {f"model.mtp_layers.0.{names[name]}.weight": weight}
    if name == "eh_proj.weight":
        return {"model.mtp_layers.0.input_proj.weight": weight.roll(len(weight), 1)}
    if name.startswith(("embed_tokens", "shared_head")):
        return {}
    return {f"model.mtp_layers.0.{name}": weight}


class NextLayerReference:
    """What the layer drafts, by the layer of transformers and without a cache."""

    def __init__(self, folder: Path) -> None:
        is_mimo = json.loads((folder / "config.json").read_text())["model_type"] == "mimo"
        # transformers does not have MiMo, whose layers are Qwen2's.
        kind = Qwen2ForCausalLM if is_mimo else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder).eval()
        # The layer of MiMo reads the sums before the final norm.
        self.sums = self.model.model.layers[-1] if is_mimo else self.model.model
        self.whole = AutoModelForCausalLM.from_pretrained(folder.parent / "whole").eval()
        self.weights = load_file(folder.parent / "layer.safetensors")
        layers = self.whole.model.layers
        self.whole.model.layers, self.whole.model.norm = layers[-1:], torch.nn.Identity()
        self.whole.config.num_hidden_layers = 1

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the likeliest drafts after `tokens`."""
        weights, embedding = self.weights, self.model.get_input_embeddings().weight
        states: list[torch.Tensor] = []
        hook = self.sums.register_forward_hook(lambda _, __, output: states.append(output[0]))
        self.model.model(torch.tensor([tokens]))
        hook.remove()
        # A layer returns [1, N, hidden], and a model that as the first of its outputs.
        hidden = states[0].view(len(tokens), -1)[:-1]
        ids, drafts = list(tokens[1:]), list[int]()
        while len(drafts) < count:
            embedded = _norm(embedding[torch.tensor(ids)], weights["enorm.weight"])
            both = torch.cat((embedded, _norm(hidden, weights["hnorm.weight"])), dim=-1)
            x = (both @ weights["eh_proj.weight"].T)[None]
            state = self.whole.model(inputs_embeds=x, use_cache=False).last_hidden_state[0, -1]
            state = _norm(state, weights["shared_head.norm.weight"])
            drafts.append(int(self.model.lm_head(state).argmax()))
            ids.append(drafts[-1])
            hidden = torch.cat((hidden, state[None]))
        return drafts


def make_cycle(path: Path, tokens: int = 64) -> tuple[Path, Path]:
    """Write a model whose likeliest next token follows from the last one, and a head of EAGLE-3
    that knows it. Return both folders.

    Layers of the model add nothing. Token t < `tokens` is the unit vector t, and the row of the
    token after t in the model's head is the unit vector t.
    """
    folder = make_tiny_model(path / "model", hidden_size=tokens, num_hidden_layers=3)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(7)
    order, eye = torch.randperm(tokens), torch.eye(tokens)
    after = torch.empty(tokens, dtype=torch.int64)
    after[order] = order.roll(1)
    step = torch.zeros(tokens, tokens)
    step[after, torch.arange(tokens)] = 1.0
    for name, each in weights.items():
        if "o_proj" in name or "down_proj" in name:
            each.zero_()
        elif "norm" in name:
            each.fill_(1.0)
    for name, rows in (("model.embed_tokens.weight", eye), ("lm_head.weight", step)):
        weights[name] = torch.zeros_like(weights[name])
        weights[name][:tokens] = rows
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    head = make_eagle3(path / "head", folder)
    own = load_file(head / "model.safetensors")
    zero = [name for name in own if "norm" not in name]
    for name in own:
        own[name].zero_() if name in zero else own[name].fill_(1.0)
    # The layer turns the vector of a token into that of the next one. The gate's products are
    # 20 * 8 * 8 for a normalised unit vector of 64 numbers.
    own["fc.weight"][:, :tokens] = eye
    large = 20.0
    for name, matrix in (("gate", large * eye), ("up", eye)):
        own[f"midlayer.mlp.{name}_proj.weight"][:tokens] = matrix
    own["midlayer.mlp.down_proj.weight"][:, :tokens] = (step - eye) / (large * tokens)
    own["lm_head.weight"][:tokens] = step
    save_file(own, head / "model.safetensors")
    return folder, head
