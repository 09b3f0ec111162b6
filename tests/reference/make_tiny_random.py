"""Makes the random model and prompts of the tests: tests/data/tiny-random/ and tiny-prompts.jsonl.

A small random DeepSeek-V2 with V2-Lite's head geometry, written by transformers' save_pretrained in
several shards, and a byte-level BPE tokenizer of the released one's structure. The model knows
nothing; its text is varied noise, which is what a comparison of two runs needs.

  make_tiny_random.py --model-dir tests/data/tiny-random --prompts tests/data/tiny-prompts.jsonl
"""
import argparse
import json
import os
import random
import sys

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples"))
from small_model import (COMMON, DAYS, MODEL_VOCAB, NAMES, PLACES, THINGS, VOCAB_SIZE,
                         make_tokenizer, write_side_files)

TOPICS = ["how bread is baked", "why the sea is salty", "how a bicycle stays upright",
          "what a library is for", "how rain forms", "why leaves change colour in autumn",
          "how a lock and a key work", "what makes a bridge strong", "how bees find flowers",
          "why ice floats on water"]
def word_problem(rng):
    a, b = rng.sample(NAMES, 2)
    thing, other = rng.sample(THINGS, 2)
    x, y, z = rng.randint(12, 90), rng.randint(3, 11), rng.randint(2, 9)
    place, day = rng.choice(PLACES), rng.choice(DAYS)
    question, total = rng.choice([
        (f"{a} buys {x} {thing} at {place} on {day}. {b} buys {y} times as many {thing} as {a}. "
         f"How many {thing} do {a} and {b} have together?", x + x * y),
        (f"A box at {place} holds {x} {thing}. {a} carries {y} boxes to the van and {b} carries "
         f"{z} more boxes than {a}. How many {thing} are in the van?", x * (y + y + z)),
        (f"On {day} {a} sells {x} {thing} for {z} dollars each and {y} {other} for {z + 1} dollars "
         f"each. How much money does {a} earn?", x * z + y * (z + 1)),
        (f"{a} walks to {place} in {y} minutes and {b} needs {z} minutes longer. Each of them "
         f"walks there and back every day of the week. How many minutes do they walk together in a week?",
         14 * (2 * y + z)),
        (f"{a} has {x + y * z} {thing}. {a} gives {z} {thing} to each of {y} friends at {place}. "
         f"How many {thing} are left?", x),
    ])
    return question, total


def solved(rng, count):
    """Solved problems, then one that is not."""
    parts = []
    for _ in range(count):
        question, total = word_problem(rng)
        parts.append(f"Question: {question}\nAnswer: The answer is {total}.")
    parts.append(f"Question: {word_problem(rng)[0]}\nAnswer:")
    return "\n\n".join(parts)


def shopping_list(rng, count):
    lines = [f"{i + 1}. {rng.randint(2, 40)} {rng.choice(THINGS)} for {rng.choice(NAMES)}, to be "
             f"fetched from {rng.choice(PLACES)} on {rng.choice(DAYS)}" for i in range(count)]
    return ("Here is a list of errands:\n" + "\n".join(lines) +
            "\nWrite the list again, sorted by the day of the week.")


def short_request(rng):
    return rng.choice([
        f"Explain in one sentence {rng.choice(TOPICS)}.",
        f"Tell {rng.choice(NAMES)} {rng.choice(TOPICS)}, and give an example.",
        f"Write a short letter from {rng.choice(NAMES)} to {rng.choice(NAMES)} about "
        f"{rng.choice(TOPICS)}.",
        f"List three {rng.choice(THINGS)} that you could find at {rng.choice(PLACES)}.",
        word_problem(rng)[0],
    ])


def training_text(seed):
    rng = random.Random(seed)
    for _ in range(3000):
        yield rng.choice([lambda: solved(rng, 1), lambda: shopping_list(rng, 3),
                          lambda: short_request(rng)])()
        yield "The " + " ".join(rng.choices(COMMON, k=8)) + "."


def make_model(directory, tokenizer, seed):
    config = DeepseekV2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=160, moe_intermediate_size=48,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1,
        n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
        routed_scaling_factor=1.0, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=MODEL_VOCAB, eos_token_id=MODEL_VOCAB + 1,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4, beta_fast=32,
                             beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
                             original_max_position_embeddings=1024))
    torch.manual_seed(seed)
    model = DeepseekV2ForCausalLM(config)
    for name, p in sorted(model.named_parameters()):
        if p.dim() == 1:
            p.data.uniform_(0.75, 1.25)
        elif name.endswith("embed_tokens.weight"):
            p.data.normal_(0, 1)
        else:
            # Branches add about as much as the residual has; steep routing and attention make the
            # next token depend on the whole context, so that greedy text does not fall into a loop.
            gain = 2.0 if name.endswith(("gate.weight", "q_proj.weight")) else 1.5
            if name.endswith("lm_head.weight"):
                gain = 3.0
            p.data.normal_(0, gain * p.shape[-1] ** -0.5)
    # Tokens that are not text of their own (single bytes, ids without a token) come up seldom.
    for token in range(VOCAB_SIZE):
        text = tokenizer.decode([token])
        if not text.isascii() or not text.replace("\n", " ").isprintable() or not text:
            model.lm_head.weight.data[token] *= 0.1
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="1MB")


def write_prompts(path, tokenizer, seed):
    """64 prompts of 10 to 400 tokens in ragged order, two thirds of them over 64."""
    rng = random.Random(seed)
    bands = [(10, 64)] * 20 + [(65, 130)] * 16 + [(131, 260)] * 16 + [(261, 400)] * 12
    rng.shuffle(bands)
    lengths = []
    with open(path, "w") as f:
        for i, (low, high) in enumerate(bands):
            while True:
                prompt = rng.choice([lambda: short_request(rng),
                                     lambda: solved(rng, rng.randint(1, 7)),
                                     lambda: shopping_list(rng, rng.randint(2, 14))])()
                length = 1 + len(tokenizer.encode(prompt).ids)  # with BOS
                if low <= length <= high and length not in lengths:
                    break
            lengths.append(length)
            record = {"id": f"p{i:02}", "prompt": prompt,
                      "max_tokens": rng.choice([16, 24, 32, 48])}
            f.write(json.dumps(record, ensure_ascii=False) + "\n")
    over = sum(n > 64 for n in lengths)
    print(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {over} over 64")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.makedirs(args.model_dir, exist_ok=True)
    tokenizer = make_tokenizer(os.path.join(args.model_dir, "tokenizer.json"),
                               training_text(args.seed))
    make_model(args.model_dir, tokenizer, args.seed)
    write_side_files(args.model_dir)
    write_prompts(args.prompts, tokenizer, args.seed + 1)


if __name__ == "__main__":
    main()
