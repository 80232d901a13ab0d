"""The whole model as a float64 loop, straight from the equations: every read goes back to the sub-layers' outputs.

It shares no code with the package: attention, RoPE, blocks and reads are written out, one site after the other.
"""

import torch
from torch.nn.functional import silu


def rms_norm(x, eps, weight=None):
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def rms_norm_of_heads(x, config):
    """x: [..., R]; every slice of R / H coordinates has a norm of its own."""
    slices = x.chunk(config.depth_heads, dim=-1)
    return torch.cat([rms_norm(part, config.rms_norm_eps) for part in slices], dim=-1)


def rope(x, theta):
    """x: [B, H, T, head_dim]; coordinate i is rotated with coordinate i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attention(x, p, layer, config):
    batch, length, _ = x.shape
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    prefix = f"model.layers.{layer}.self_attn"

    def project(name, count):
        return (x @ p[f"{prefix}.{name}.weight"].T).view(batch, length, count, size).transpose(1, 2)

    q, k, v = project("q_proj", heads), project("k_proj", kv_heads), project("v_proj", kv_heads)
    if config.qk_norm:
        q = rms_norm(q, config.rms_norm_eps, p.get(f"{prefix}.q_norm.weight"))
        k = rms_norm(k, config.rms_norm_eps, p.get(f"{prefix}.k_norm.weight"))
    q, k = rope(q, config.rope_parameters["rope_theta"]), rope(k, config.rope_parameters["rope_theta"])
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, shared].transpose(1, 2) / size**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, shared])
    return torch.cat(outputs, dim=-1) @ p[f"{prefix}.o_proj.weight"].T


def feed_forward(x, p, layer):
    prefix = f"model.layers.{layer}.mlp"
    inner = silu(x @ p[f"{prefix}.gate_proj.weight"].T) * (x @ p[f"{prefix}.up_proj.weight"].T)
    return inner @ p[f"{prefix}.down_proj.weight"].T


def block_of_sublayers(written, num_sublayers, num_blocks):
    """The written sub-layers 1..written, grouped: completed blocks first, then the partial one if not empty."""
    if num_blocks is None:
        num_blocks = num_sublayers
    ends = sorted({-((-num_sublayers * i) // num_blocks) for i in range(1, num_blocks + 1)})
    groups, start = [], 0
    for end in ends:
        group = list(range(start + 1, min(end, written) + 1))
        if group:
            groups.append(group)
        start = end
    return groups


def key_of(group, value, keys, config):
    """The routing key of the source that sums the sub-layers of `group`, before the norm at the read."""
    if config.residual_type == "attnres":
        return value
    if config.residual_type == "sliced":
        return value[..., value.shape[-1] - config.depth_key_rank :]
    in_blocks = config.num_depth_blocks is not None and config.num_depth_blocks < 2 * config.num_hidden_layers
    if config.depth_key_norm and (in_blocks or config.depth_heads > 1):
        return sum(rms_norm_of_heads(keys[i], config) for i in group)
    return sum(keys[i] for i in group) / len(group) ** config.depth_block_exponent


def read(site, values, keys, p, config):
    """values[0], keys[0]: the embedding; values[i], keys[i]: sub-layer i.
    -> hidden [B, T, D], weights [B, T, S], or [B, T, H, S] with H > 1 depth heads."""
    heads = config.depth_heads
    query = p["model.depth_queries.weight"][site - 1]
    if config.depth_query_norm:
        query = rms_norm_of_heads(query, config)
    source_values, source_logits = [], []
    for group in [[0], *block_of_sublayers(site, 2 * config.num_hidden_layers, config.num_depth_blocks)]:
        count = len(group)
        value = sum(values[i] for i in group) / count**config.depth_block_exponent
        key = key_of(group, value, keys, config)
        key = rms_norm_of_heads(key, config) if config.depth_key_norm else key
        prior = config.depth_count_prior * torch.tensor(float(count), dtype=value.dtype).log()
        source_values.append(value)
        dots = [part.sum(-1) for part in (key * query).chunk(heads, dim=-1)]
        source_logits.append([dot * config.depth_logit_scale + prior for dot in dots])
    hidden, all_weights = [], []
    for head in range(heads):
        weights = torch.stack([logits[head] for logits in source_logits], dim=-1).softmax(-1)
        slices = [value.chunk(heads, dim=-1)[head] for value in source_values]
        hidden.append(sum(weights[..., i, None] * part for i, part in enumerate(slices)))
        all_weights.append(weights)
    return torch.cat(hidden, dim=-1), all_weights[0] if heads == 1 else torch.stack(all_weights, dim=-2)


def oracle_forward(config, p, input_ids):
    """p: the model's parameters by name, float64. -> logits [B, T, V], depth weights of sites 1..2L."""
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    embedding = p["model.embed_tokens.weight"][input_ids]
    values, keys, all_weights = [embedding], [None], []
    if config.residual_type == "projected":
        keys = [embedding @ p["model.depth_embedding_key.weight"].T]
    hidden, read_eps = embedding, eps
    for site in range(1, 2 * config.num_hidden_layers + 1):
        layer, is_feed_forward = divmod(site - 1, 2)
        norm = "post_attention_layernorm" if is_feed_forward else "input_layernorm"
        x = rms_norm(hidden, read_eps, p.get(f"model.layers.{layer}.{norm}.weight"))
        output = feed_forward(x, p, layer) if is_feed_forward else attention(x, p, layer, config)
        values.append(output[..., :hidden_size])
        keys.append(output[..., hidden_size:])
        if config.residual_type == "standard":
            hidden = sum(values)
        else:
            hidden, weights = read(site, values, keys, p, config)
            all_weights.append(weights)
            read_eps = eps / weights.shape[-1] ** 2 if config.depth_scaled_eps else eps
    logits = rms_norm(hidden, read_eps, p.get("model.norm.weight")) @ p["lm_head.weight"].T
    return logits, all_weights
