"""Expected logits of small random DeepSeek-V2 models, computed by transformers in float32.

  make_expected.py --out tests/data/expected               writes config.json, expected.{json,bin}
  make_expected.py --write-checkpoint NAME DIR [--shards N]  writes a checkpoint by save_pretrained

Weights are those of synthetic_weights.py. expected.bin holds float32 rows [rows, vocab], little
endian; expected.json says for every prompt its token ids, the positions that have a row, the first
row, and the router gap of every position (null: no router).
The script refuses to write where transformers' softmax scale, cos/sin multiplier or frequencies are
not those of DeepSeek's modelling code.
"""
import argparse
import json
import math
import os
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from router_gap import RouterGaps
from synthetic_weights import hashed, tensor_shapes, weight_bits, write_safetensors

LITE = dict(hidden_size=64, intermediate_size=112, moe_intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, num_experts_per_tok=3,
            n_shared_experts=2, first_k_dense_replace=1, vocab_size=128)
ODD = dict(LITE, hidden_size=60, intermediate_size=84, moe_intermediate_size=28,
           num_attention_heads=3, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16,
           v_head_dim=20, vocab_size=96)
GROUPS = dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, n_routed_experts=16,
              num_experts_per_tok=4, routed_scaling_factor=16.0)


def yarn(factor, original, **mscale):
    return dict(factor=factor, beta_fast=32, beta_slow=1,
                original_max_position_embeddings=original, **mscale)


# name → (form of config.json, sizes, yarn or None, rope_theta, generation_config or None)
CASES = {
    "lite_yarn": ("old", LITE, yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707), 10000,
                  dict(bos_token_id=0, eos_token_id=1, do_sample=True, temperature=0.3,
                       top_p=0.95)),
    "lite_yarn_one_shared": ("new", dict(LITE, n_shared_experts=1),
                             yarn(4, 1024, mscale=1.0, mscale_all_dim=1.0), 10000,
                             dict(bos_token_id=0, eos_token_id=[1, 5])),
    "lite_plain": ("old", dict(LITE, n_shared_experts=1, first_k_dense_replace=0,
                               num_hidden_layers=2), None, 10000, None),
    "lite_yarn_no_all_dim": ("old", dict(LITE, num_experts_per_tok=2), yarn(16, 256), 10000, None),
    "lite_dense": ("new", dict(LITE, first_k_dense_replace=3),
                   yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707), 10000, None),
    "lite_groups": ("old", dict(LITE, q_lora_rank=48, **GROUPS),
                    yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707), 10000, None),
    "odd_yarn": ("old", ODD, yarn(8, 64, mscale=0.5, mscale_all_dim=0.8), 10000, None),
    "odd_groups": ("new", dict(ODD, q_lora_rank=20, first_k_dense_replace=0, n_shared_experts=1,
                               **GROUPS), yarn(4, 32, mscale=0.707, mscale_all_dim=0.707), 10000,
                   None),
    "odd_plain": ("new", dict(ODD, num_experts_per_tok=1), None, 5000, None),
    # A correction range of no width: its upper end is raised by 0.001.
    "odd_tied": ("old", dict(ODD, tie_word_embeddings=True, num_hidden_layers=2),
                 yarn(4, 6, mscale=0.707, mscale_all_dim=0.707), 10000, None),
}
LEAST_ROUTER_GAP = 3e-5
PROMPT_LENGTHS = [1, 2, 17, 64, 65, 129, 200]


def plain_config(name):
    """The released form: rope_scaling with `type`, torch_dtype, scoring_func, moe_layer_freq."""
    form, sizes, rope, theta, _ = CASES[name]
    c = dict(architectures=["DeepseekV2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
             aux_loss_alpha=0.001, bos_token_id=0, eos_token_id=1, hidden_act="silu",
             initializer_range=0.02, max_position_embeddings=4096, model_type="deepseek_v2",
             moe_layer_freq=1, n_group=1, norm_topk_prob=False,
             num_key_value_heads=sizes["num_attention_heads"], pretraining_tp=1, rms_norm_eps=1e-6,
             rope_scaling=None, rope_theta=theta, routed_scaling_factor=1.0, scoring_func="softmax",
             seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="greedy",
             torch_dtype="bfloat16", transformers_version="4.33.1", use_cache=True)
    c.update(sizes)
    if rope:
        c["rope_scaling"] = dict(rope, type="yarn")
        original = rope["original_max_position_embeddings"]
        c["max_position_embeddings"] = int(rope["factor"] * original)
    if c["max_position_embeddings"] < 256:
        c["max_position_embeddings"] = 256
    return form, c


def write_raw(name, directory):
    """config.json (and generation_config.json) and model.safetensors. Returns the sizes."""
    form, c = plain_config(name)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "config.json")
    if form == "old":
        with open(path, "w") as f:
            json.dump(c, f, indent=2, sort_keys=True)
            f.write("\n")
    else:
        drop = ("rope_scaling", "rope_theta", "torch_dtype", "transformers_version",
                "moe_layer_freq", "scoring_func", "seq_aux", "aux_loss_alpha", "model_type")
        rope = dict(rope_type="default", rope_theta=float(c["rope_theta"]))
        if c["rope_scaling"]:
            rope.update(c["rope_scaling"], rope_type="yarn")
            rope.pop("type")
        kept = {k: v for k, v in c.items() if k not in drop}
        DeepseekV2Config(**kept, rope_parameters=rope, dtype="bfloat16").save_pretrained(directory)
    if CASES[name][4]:
        with open(os.path.join(directory, "generation_config.json"), "w") as f:
            json.dump(CASES[name][4], f, indent=2)
            f.write("\n")
    write_safetensors(os.path.join(directory, "model.safetensors"), c, seed_of(name))
    return c


def seed_of(name):
    return 1 + list(CASES).index(name)


def deepseek_rope(c):
    """Softmax scale, cos/sin multiplier, inv_freq by the formulas of DeepSeek's modelling code."""
    dim, base, rope = c["qk_rope_head_dim"], c["rope_theta"], c["rope_scaling"]
    scale = (c["qk_nope_head_dim"] + dim) ** -0.5
    extrapolated = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    if not rope:
        return scale, 1.0, extrapolated

    def get_mscale(m):
        return 1.0 if rope["factor"] <= 1 else 0.1 * m * math.log(rope["factor"]) + 1.0

    def correction_dim(rotations):
        original = rope["original_max_position_embeddings"]
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    all_dim = rope.get("mscale_all_dim", 0)
    if all_dim:
        scale *= get_mscale(all_dim) ** 2
    multiplier = get_mscale(rope.get("mscale", 1)) / get_mscale(all_dim)
    low = max(math.floor(correction_dim(rope["beta_fast"])), 0)
    high = min(math.ceil(correction_dim(rope["beta_slow"])), dim - 1)
    if low == high:
        high += 0.001
    inv_freq = []
    for i, freq in enumerate(extrapolated):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        inv_freq.append(freq / rope["factor"] * ramp + freq * (1 - ramp))
    return scale, multiplier, inv_freq


def check_scales(name, model, c):
    scale, multiplier, inv_freq = deepseek_rope(c)
    for layer in model.model.layers:
        if not math.isclose(layer.self_attn.scaling, scale, rel_tol=1e-9):
            sys.exit(f"{name}: softmax scale: expected {scale}, found {layer.self_attn.scaling}")
    rotary = model.model.rotary_emb
    if not math.isclose(rotary.attention_scaling, multiplier, rel_tol=1e-9):
        sys.exit(f"{name}: cos/sin multiplier: expected {multiplier}, "
                 f"found {rotary.attention_scaling}")
    if not np.allclose(rotary.inv_freq.double().numpy(), inv_freq, rtol=2e-6, atol=0):
        sys.exit(f"{name}: inv_freq: expected {inv_freq}, found {rotary.inv_freq.tolist()}")


def check_weights(name, model, c):
    """Every tensor was loaded, with the values of the file."""
    state = model.state_dict()
    fused = [k for k in state if ".experts." in k and "shared" not in k]
    for key, shape in tensor_shapes(c).items():
        if ".mlp.experts." in key:
            continue
        bits = weight_bits(key, shape, seed_of(name)).astype(np.uint32) << 16
        if not np.array_equal(state[key].numpy().ravel(), bits.view(np.float32)):
            sys.exit(f"{name}: {key} was not loaded as written")
    moe = c["num_hidden_layers"] - c["first_k_dense_replace"]
    if len(fused) != 2 * moe:
        sys.exit(f"{name}: expected {2 * moe} expert tensors, found {fused}")


def positions_of(length):
    if length <= 17:
        return list(range(length))
    step = 2 if length < 100 else 4
    near = {p for edge in (64, 128) for p in range(edge - 2, edge + 2)}
    return [p for p in range(length) if p % step == 1 or p in near or p == length - 1]


def load_reference(directory, dtype=torch.float32):
    model = DeepseekV2ForCausalLM.from_pretrained(directory, dtype=dtype,
                                                  attn_implementation="eager",
                                                  experts_implementation="eager")
    return model.eval()


def draw_prompts(name, model, c):
    """Prompts, their rows of logits and the smallest router gap.

    A prompt is drawn again until no routing decision in it is near a tie: another choice of expert
    would also change every later position, through the attention.
    """
    gaps = RouterGaps(model)
    prompts, rows, smallest = [], [], float("inf")
    for length in PROMPT_LENGTHS:
        for attempt in range(100):
            draws = hashed(f"prompt {length} {attempt}", length, seed_of(name)) >> np.uint64(33)
            ids = [0] + [int(2 + d % np.uint64(c["vocab_size"] - 2)) for d in draws[1:]]
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            gap = gaps.take(length)
            if gap.min().item() > LEAST_ROUTER_GAP:
                break
        else:
            sys.exit(f"{name}: no prompt of {length} tokens without near ties in the routing")
        smallest = min(smallest, gap.min().item())
        positions = positions_of(length)
        prompts.append(dict(ids=ids, positions=positions, first_row=sum(len(r) for r in rows),
                            router_gap=[None if math.isinf(g) else float(f"{g:.3g}")
                                        for g in gap.tolist()]))
        rows.append(logits[positions].numpy())
    return prompts, rows, smallest


def write_expected(name, out):
    with tempfile.TemporaryDirectory() as raw:
        c = write_raw(name, raw)
        model = load_reference(raw)
        check_scales(name, model, c)
        check_weights(name, model, c)
        os.makedirs(out, exist_ok=True)
        for file in ("config.json", "generation_config.json"):
            if os.path.exists(os.path.join(raw, file)):
                shutil.copy(os.path.join(raw, file), os.path.join(out, file))
    prompts, rows, smallest = draw_prompts(name, model, c)
    total = sum(len(r) for r in rows)
    data = np.concatenate(rows).astype("<f4")
    data.tofile(os.path.join(out, "expected.bin"))
    record = dict(format=1, name=name, seed=seed_of(name), vocab_size=c["vocab_size"], rows=total,
                  torch=torch.__version__, transformers=transformers.__version__, prompts=prompts)
    with open(os.path.join(out, "expected.json"), "w") as f:
        json.dump(record, f, separators=(",", ":"))
        f.write("\n")
    print(f"{name}: {total} rows, logits std {data.std():.3f}, smallest router gap {smallest:.2e}")


def write_checkpoint(name, directory, shards):
    with tempfile.TemporaryDirectory() as raw:
        write_raw(name, raw)
        size = os.path.getsize(os.path.join(raw, "model.safetensors"))
        model = load_reference(raw, torch.bfloat16)
        limit = -(-size // shards)
        while True:
            saved = os.path.join(raw, f"saved_{limit}")
            model.save_pretrained(saved, max_shard_size=limit)
            if sum(f.endswith(".safetensors") for f in os.listdir(saved)) <= shards:
                break
            limit += size // 50 + 1
        shutil.copytree(saved, directory, dirs_exist_ok=True)
        for file in ("config.json", "generation_config.json"):
            if os.path.exists(os.path.join(raw, file)):
                shutil.copy(os.path.join(raw, file), os.path.join(directory, file))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the expected values: all, or those of --only")
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--write-checkpoint", nargs=2, metavar=("NAME", "DIR"))
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    if args.write_checkpoint:
        write_checkpoint(*args.write_checkpoint, args.shards)
    if args.out:
        for name in args.only or CASES:
            write_expected(name, os.path.join(args.out, name))
    if not args.out and not args.write_checkpoint:
        parser.error("nothing to do: give --out or --write-checkpoint")


if __name__ == "__main__":
    main()
