"""Trains the quickstart's model: a small DeepSeek-V2 that solves word problems of two steps.

The architecture and head geometry of V2-Lite (2 heads, MLA with a latent of 512, the first layer
dense, then mixtures of 8 experts with 2 shared ones, YaRN), trained from nothing on problems that
this script makes up, in GSM8K's answer style ("#### 14"), and written by transformers'
save_pretrained in several shards. Problems are told apart by their numbers: those of one tuple are
either all for training or all held out.

  train_word_problems.py --model-dir DIR --prompts FILE.jsonl [--steps 3000] [--device cuda]

Minutes on a GPU. Prints the share of right answers among the held-out prompts.
"""
import argparse
import collections
import hashlib
import json
import math
import os
import random
import time

import torch
from tokenizers import Tokenizer
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

import small_model as small

HELD_OUT_SHARE = 0.1
BOS_ID, EOS_ID = small.MODEL_VOCAB, small.MODEL_VOCAB + 1


class Problem:
    """A question, the numbers in it, and its steps (left, operator, right), where None is the
    result of the step before; the last result is the answer."""

    def __init__(self, question, numbers, steps):
        self.question, self.numbers = question, numbers
        self.lines, self.answer = [], None
        for left, operator, right in steps:
            left = self.answer if left is None else left
            right = self.answer if right is None else right
            self.answer = {"+": left + right, "-": left - right, "*": left * right}[operator]
            self.lines.append(f"{left} {operator} {right} = {self.answer}")

    def prompt(self):
        return f"Question: {self.question}\nAnswer:"

    def completion(self):
        return " " + ". ".join(self.lines) + f".\n#### {self.answer}"

    def held_out(self):
        digest = hashlib.sha256(repr(self.numbers).encode()).digest()
        return digest[0] < 256 * HELD_OUT_SHARE


# What the kinds of problems are told with: names, things, place, day and three numbers.
Scene = collections.namedtuple("Scene", "a b thing other place day x y z")


def finds_and_gives(rng, s):
    w = rng.randint(1, s.x + s.y - 1)
    return Problem(
        f"{s.a} has {s.x} {s.thing}. On {s.day} {s.a} finds {s.y} more {s.thing} at {s.place} and "
        f"then gives {w} of them to {s.b}. How many {s.thing} does {s.a} have now?",
        (s.x, s.y, w), [(s.x, "+", s.y), (None, "-", w)])


def boxes_and_rest(rng, s):
    return Problem(
        f"A box at {s.place} holds {s.y} {s.thing}. {s.a} fills {s.z} boxes on {s.day} and has {s.x} "
        f"{s.thing} left over. How many {s.thing} are there in all?",
        (s.y, s.z, s.x), [(s.y, "*", s.z), (None, "+", s.x)])


def buys_more_than(rng, s):
    return Problem(
        f"{s.a} buys {s.x} {s.thing} at {s.place} and {s.b} buys {s.y} more than {s.a}. How many "
        f"{s.thing} do {s.a} and {s.b} have together on {s.day}?",
        (s.x, s.y), [(s.x, "+", s.y), (s.x, "+", None)])


def sells_and_pays(rng, s):
    cost = min(s.x, s.y * s.z - 1)
    return Problem(
        f"On {s.day} {s.a} sells {s.y} {s.thing} for {s.z} dollars each and pays {cost} dollars for "
        f"a place at {s.place}. How much money does {s.a} keep?",
        (s.y, s.z, cost), [(s.y, "*", s.z), (None, "-", cost)])


def takes_away(rng, s):
    return Problem(
        f"There are {s.x} {s.thing} and {s.y} {s.other} at {s.place}. {s.b} takes {s.z} of them away "
        f"on {s.day}. How many things are left?",
        (s.x, s.y, s.z), [(s.x, "+", s.y), (None, "-", s.z)])


def breaks_and_brings(rng, s):
    w = rng.randint(1, s.x - 1)
    return Problem(
        f"{s.a} carries {s.x} {s.thing} to {s.place}. {w} of them break on the way, and {s.b} brings "
        f"{s.y} new ones on {s.day}. How many {s.thing} are there now?",
        (s.x, w, s.y), [(s.x, "-", w), (None, "+", s.y)])


def walks_longer(rng, s):
    w = rng.randint(2, 5)
    return Problem(
        f"{s.a} walks to {s.place} in {s.y} minutes and {s.b} needs {s.z} minutes more. {s.b} walks "
        f"there {w} times before {s.day}. How many minutes does {s.b} walk?",
        (s.y, s.z, w), [(s.y, "+", s.z), (None, "*", w)])


def reads_the_rest(rng, s):
    pages = 3 * s.y + s.x
    return Problem(
        f"A book has {pages} pages. {s.a} reads {s.y} of them on {s.day} and twice as many on the "
        f"day after at {s.place}. How many pages are left?",
        (pages, s.y), [(s.y, "*", 3), (pages, "-", None)])


KINDS = [finds_and_gives, boxes_and_rest, buys_more_than, sells_and_pays, takes_away,
         breaks_and_brings, walks_longer, reads_the_rest]


def problems(seed, held_out):
    """Without end, of one of the two sets."""
    rng = random.Random(seed)
    while True:
        scene = Scene(*rng.sample(small.NAMES, 2), *rng.sample(small.THINGS, 2),
                      rng.choice(small.PLACES), rng.choice(small.DAYS), rng.randint(10, 60),
                      rng.randint(3, 30), rng.randint(2, 9))
        problem = rng.choice(KINDS)(rng, scene)
        if problem.held_out() == held_out:
            yield problem


def tokenizer_text():
    source = problems(11, False)
    for _ in range(6000):
        problem = next(source)
        yield problem.prompt() + problem.completion()
    rng = random.Random(12)
    for _ in range(3000):  # so that it can write other text too
        yield "The " + " ".join(rng.choices(small.COMMON, k=8)) + "."


def make_config():
    return DeepseekV2Config(
        vocab_size=small.VOCAB_SIZE, hidden_size=192, intermediate_size=512,
        moe_intermediate_size=96, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1,
        topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4, beta_fast=32,
                             beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
                             original_max_position_embeddings=1024))


class Batches(torch.utils.data.IterableDataset):
    """Without end: ids [B, T] and targets [B, T], -100 where nothing is learnt: the question and
    the padding. Each worker has problems of its own."""

    def __init__(self, tokenizer_file, size, seed):
        self.tokenizer_file, self.size, self.seed = tokenizer_file, size, seed

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        tokenizer = Tokenizer.from_file(self.tokenizer_file)
        source = problems(f"{self.seed} {worker.id if worker else 0}", False)
        while True:
            rows = [self.row(tokenizer, next(source)) for _ in range(self.size)]
            width = max(len(prompt) + len(rest) for prompt, rest in rows)
            ids = torch.full((self.size, width), EOS_ID)
            targets = torch.full((self.size, width), -100)
            for row, (prompt, rest) in enumerate(rows):
                ids[row, :len(prompt) + len(rest)] = torch.tensor(prompt + rest)
                targets[row, len(prompt):len(prompt) + len(rest)] = torch.tensor(rest)
            yield ids, targets

    @staticmethod
    def row(tokenizer, problem):
        prompt = [BOS_ID] + tokenizer.encode(problem.prompt()).ids
        return prompt, tokenizer.encode(problem.completion()).ids + [EOS_ID]


def train(model, tokenizer_file, args):
    loader = torch.utils.data.DataLoader(Batches(tokenizer_file, args.batch, args.seed),
                                         batch_size=None, num_workers=args.workers)
    batches = iter(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98),
                                  weight_decay=0.05)
    warm_up = max(1, args.steps // 20)

    def rate(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) /
                                                 max(1, args.steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start = time.time()
    model.train()
    for step in range(args.steps):
        ids, targets = (part.to(args.device) for part in next(batches))
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().reshape(-1, logits.shape[-1]), targets[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, args.steps // 20) == 0 or step + 1 == args.steps:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - start:.0f} s", flush=True)


def evaluate(model, tokenizer, prompts, device):
    """Share of right answers, greedy, prompts of one length at a time."""
    model.eval()
    by_length = collections.defaultdict(list)
    for prompt in prompts:
        ids = [BOS_ID] + tokenizer.encode(prompt["prompt"]).ids
        by_length[len(ids)].append((ids, prompt["answer"]))
    right = 0
    for length, group in by_length.items():
        ids = torch.tensor([ids for ids, _ in group], device=device)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48,
                                 do_sample=False, pad_token_id=EOS_ID)
        for row, (_, answer) in zip(out[:, length:].tolist(), group):
            text = tokenizer.decode(row)
            right += "####" in text and text.split("####")[-1].strip() == answer
    return right / len(prompts)


def held_out_prompts(count, seed):
    source, prompts, seen = problems(seed, True), [], set()
    while len(prompts) < count:
        problem = next(source)
        if problem.numbers in seen:
            continue
        seen.add(problem.numbers)
        prompts.append({"id": f"p{len(prompts):03}", "prompt": problem.prompt(), "max_tokens": 48,
                        "answer": str(problem.answer)})
    return prompts


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(0, min(14, os.cpu_count() - 2)),
                        help="processes that make problems")
    parser.add_argument("--count", type=int, default=200, help="held-out prompts")
    args = parser.parse_args()
    os.makedirs(args.model_dir, exist_ok=True)
    tokenizer_file = os.path.join(args.model_dir, "tokenizer.json")
    small.make_tokenizer(tokenizer_file, tokenizer_text())
    tokenizer = Tokenizer.from_file(tokenizer_file)
    small.write_side_files(args.model_dir)
    prompts = held_out_prompts(args.count, args.seed + 1)
    with open(args.prompts, "w") as f:
        f.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
    lengths = sorted(1 + len(tokenizer.encode(p["prompt"]).ids) for p in prompts)
    common = collections.Counter(p["answer"] for p in prompts).most_common(1)[0]
    print(f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, median "
          f"{lengths[len(lengths) // 2]}; the best constant answer {common[0]} is right {common[1]} "
          "times")

    torch.manual_seed(args.seed)
    model = DeepseekV2ForCausalLM(make_config()).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer_file, args)
    model.to(torch.bfloat16).save_pretrained(args.model_dir, max_shard_size="4MB")
    model = DeepseekV2ForCausalLM.from_pretrained(args.model_dir, dtype=torch.bfloat16)
    share = evaluate(model.to(args.device), tokenizer, prompts, args.device)
    print(f"right answers among the held-out prompts, bfloat16: {share:.1%}")


if __name__ == "__main__":
    main()
