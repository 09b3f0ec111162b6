"""Makes the quickstart's model and prompts: examples/tiny-random/ and examples/prompts.jsonl.

A small random DeepSeek-V2 with V2-Lite's head geometry, written by transformers' save_pretrained in
several shards, and a byte-level BPE tokenizer of the released one's structure. The model knows
nothing; its text is varied noise, which is what a comparison of two runs needs.

  make_tiny_random.py --model-dir examples/tiny-random --prompts examples/prompts.jsonl
"""
import argparse
import json
import os
import random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
MODEL_VOCAB = 1000      # of the BPE; then BOS and EOS
VOCAB_SIZE = 1024       # rows of the LM head; as in the release, the last have no token
CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'Assistant:' }}{% endif %}")

NAMES = ["Ada", "Bruno", "Clara", "Daniel", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas",
         "Kira", "Liam", "Maya", "Nils", "Olga", "Priya", "Rosa", "Samuel", "Tara", "Victor"]
THINGS = ["apples", "pencils", "stamps", "books", "marbles", "tickets", "cookies", "postcards",
          "seeds", "buttons", "shells", "lamps", "oranges", "notebooks", "candles", "bricks"]
PLACES = ["the market", "the library", "the harbour", "school", "the workshop", "the garden",
          "the station", "the bakery", "the museum", "the farm"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
TOPICS = ["how bread is baked", "why the sea is salty", "how a bicycle stays upright",
          "what a library is for", "how rain forms", "why leaves change colour in autumn",
          "how a lock and a key work", "what makes a bridge strong", "how bees find flowers",
          "why ice floats on water"]
COMMON = """about above across after again against almost alone along already also although always
among another answer around because become before began behind being below between both bring build
called carry certain change children city clear close colour come complete could country course
cover cross dark decide deep different direction distance during early earth either enough even
evening every example face fact family father feel field figure final find fire first follow food
force found four friend front full game general give gold good great green ground group grow half
hand happen hard head hear heart heat heavy help here high history hold home horse hour house human
hundred idea important inside interest island keep kind king know land language large later laugh
learn leave letter level light like line listen little long look machine make many matter mean
measure might mind moment money moon more morning most mother mountain move music name nature near
never next night nothing notice number object ocean often only open order other paper part pass
past pattern people perhaps person picture piece place plain plan plant point power problem product
question quick quiet rain reach read ready really reason record remember rest right river road rock
room round rule said same science season second seem sentence serve several shape ship should show
side silver simple since sing sleep slow small snow some song soon sound south space speak special
spring stand star start state stay step still stone stop story strange street strong student study
such sudden summer sure surface system table teach tell thing think thought thousand through time
together toward town travel tree true turn under until usual valley very village voice wait walk
wall want warm watch water weather week weight well west what wheel where which while white whole
wind window winter wonder wood word work world would write year young""".split()


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


def make_tokenizer(path, texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    patterns = [r"[" + "\r\n" + "]", r"\s?[A-Za-zÀ-ÖØ-öø-ÿ]+", r"\s?[!-/:-~]+", r"\s+$", "[一-龥]+"]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns] +
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=MODEL_VOCAB, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    record = json.loads(tokenizer.to_str())
    found = len(record["model"]["vocab"])
    if found != MODEL_VOCAB:
        raise SystemExit(f"vocabulary: expected {MODEL_VOCAB}, found {found}")
    # Merges as strings "a b", as the released file has them.
    record["model"]["merges"] = [m if isinstance(m, str) else " ".join(m)
                                 for m in record["model"]["merges"]]
    record["added_tokens"] = [
        dict(id=MODEL_VOCAB + i, content=content, single_word=False, lstrip=False, rstrip=False,
             normalized=True, special=True) for i, content in enumerate((BOS, EOS))]
    with open(path, "w") as f:
        json.dump(record, f, ensure_ascii=False, indent=1)
        f.write("\n")
    return Tokenizer.from_file(path)


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


def write_json(path, record):
    with open(path, "w") as f:
        json.dump(record, f, ensure_ascii=False, indent=2)
        f.write("\n")


def write_side_files(directory):
    def added(content):
        return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": True,
                "rstrip": False, "single_word": False}

    write_json(os.path.join(directory, "tokenizer_config.json"), {
        "add_bos_token": True, "add_eos_token": False, "bos_token": added(BOS),
        "clean_up_tokenization_spaces": False, "eos_token": added(EOS), "legacy": True,
        "model_max_length": 4096, "pad_token": added(EOS), "sp_model_kwargs": {},
        "unk_token": None, "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": CHAT_TEMPLATE})
    write_json(os.path.join(directory, "generation_config.json"), {
        "_from_model_config": True, "bos_token_id": MODEL_VOCAB, "eos_token_id": MODEL_VOCAB + 1})


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
