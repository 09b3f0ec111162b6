"""Weights that are a pure integer function of (tensor name, element index, seed).

tests/support/synthetic.cpp computes the same bits, so checkpoints need not be stored. An element is
  u = top 24 bits of splitmix64(fnv1a64(name) + seed * GOLDEN + index), mapped to [-1, 1)
  norm weights: 1 + u / 4; all others: u * scale, scale a power of two by fan-in and role,
rounded to bfloat16 (nearest, ties to even).
"""
import json
import os
import struct

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def fnv1a64(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def hashed(name, count, seed, begin=0):
    """splitmix64 of `count` consecutive indices: uint64 [count]."""
    start = np.uint64((fnv1a64(name) + seed * GOLDEN + begin) & MASK)
    with np.errstate(over="ignore"):
        z = start + np.arange(count, dtype=np.uint64) + np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def scale_of(name, fan_in):
    """A power of two: the gain fan_in * scale^2 / 3 of a linear layer is in (1/2, 2]."""
    if name.endswith("embed_tokens.weight"):
        return 1.0
    scale = 1.0
    while fan_in > 6.0 / (scale * scale):
        scale /= 2
    if name.endswith("mlp.gate.weight") or name.endswith("lm_head.weight"):
        scale *= 2  # wider gaps between the routing scores, and between the logits
    return scale


def bf16_bits(values):
    """float32 → bfloat16 bits, nearest, ties to even: uint16."""
    u = values.view(np.uint32)
    odd = (u >> np.uint32(16)) & np.uint32(1)
    return ((u + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def weight_bits(name, shape, seed, begin=0, count=None):
    """bfloat16 bits of elements [begin, begin + count) of a tensor: uint16 [count]."""
    count = int(np.prod(shape)) - begin if count is None else count
    top = (hashed(name, count, seed, begin) >> np.uint64(40)).astype(np.int64)
    u = ((top - (1 << 23)).astype(np.float32)) / np.float32(1 << 23)
    if len(shape) == 1:
        return bf16_bits(np.float32(1.0) + u / np.float32(4.0))
    return bf16_bits(u * np.float32(scale_of(name, shape[1])))


def tensor_shapes(c):
    """{released name: shape} of a DeepSeek-V2 configuration given as a dict."""
    h, n, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], h]}

    def mlp(prefix, width):
        shapes[prefix + "gate_proj.weight"] = [width, h]
        shapes[prefix + "up_proj.weight"] = [width, h]
        shapes[prefix + "down_proj.weight"] = [h, width]

    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        shapes[p + "input_layernorm.weight"] = [h]
        if c["q_lora_rank"] is None:
            shapes[a + "q_proj.weight"] = [n * (nope + rope), h]
        else:
            shapes[a + "q_a_proj.weight"] = [c["q_lora_rank"], h]
            shapes[a + "q_a_layernorm.weight"] = [c["q_lora_rank"]]
            shapes[a + "q_b_proj.weight"] = [n * (nope + rope), c["q_lora_rank"]]
        shapes[a + "kv_a_proj_with_mqa.weight"] = [latent + rope, h]
        shapes[a + "kv_a_layernorm.weight"] = [latent]
        shapes[a + "kv_b_proj.weight"] = [n * (nope + v), latent]
        shapes[a + "o_proj.weight"] = [h, n * v]
        shapes[p + "post_attention_layernorm.weight"] = [h]
        if layer < c["first_k_dense_replace"]:
            mlp(p + "mlp.", c["intermediate_size"])
            continue
        shapes[p + "mlp.gate.weight"] = [c["n_routed_experts"], h]
        for e in range(c["n_routed_experts"]):
            mlp(p + f"mlp.experts.{e}.", c["moe_intermediate_size"])
        mlp(p + "mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
    shapes["model.norm.weight"] = [h]
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [c["vocab_size"], h]
    return shapes


def write_safetensors(path, config, seed):
    """All tensors of a configuration into one file, without other software."""
    header, blobs, offset = {}, [], 0
    for name, shape in tensor_shapes(config).items():
        blob = weight_bits(name, shape, seed).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": shape,
                        "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return os.path.getsize(path)
