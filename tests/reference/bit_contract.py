"""The bits of a whole run do not depend on how it is run: mla-run on one checkpoint, many ways.

  bit_contract.py --binary build/mla-run --model DIR [--load-format auto] --out OUT
      [--max-model-len 8192] [--longest 6000] [--prompts 64] [--only "NAME;…"] [--resume]

Writes ragged prompts of random token ids, runs them whole with the defaults, then once for each
variation (mode, budgets, batch of one, several passes, no graphs, a KV pool that holds little more
than the longest prompt, another order of the file, once more), and compares each run with the first
through `mla-run compare`. Prints a markdown table. Exit 1 where tokens or logprob bits differ, a
request failed, or a variation did not do what it is there for: split prompts, passes, preemptions.
"""
import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import time

PAGE_TOKENS = 64
# Around pages, key tiles, decode splits and budgets, on both sides.
EDGES = [1, 2, 3, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 511, 513, 1000, 1001, 2047,
         2048, 2049, 4095, 4097]


class Variation:
    """Options beside the common ones, and what the counts of the run must show."""

    def __init__(self, name, *options, expect=None, needs_gpu=False, prompts="prompts"):
        self.name, self.options, self.prompts = name, list(options), prompts
        self.expect = expect  # (text, function of the counts of this run and of the first)
        self.needs_gpu = needs_gpu

    def option(self, name):
        return self.options[self.options.index(name) + 1] if name in self.options else None


def say(text):
    print(text, file=sys.stderr, flush=True)


def prompt_lengths(args):
    """The edges, the longest, others up to it, and in their midst a row of prompts that each take
    about a twentieth of the small KV pool and fill a page while they generate: it preempts these."""
    source = random.Random(args.seed)
    lengths = [n for n in EDGES if n < args.longest][:args.prompts - 1] + [args.longest]
    others = args.prompts - len(lengths)
    lengths += [source.randint(1, args.longest) for _ in range(others // 3)]
    source.shuffle(lengths)
    pages = args.longest // PAGE_TOKENS
    room = min(args.max_tokens, PAGE_TOKENS) - 1
    row = [source.randint(max(1, pages // 24), max(1, pages // 16)) * PAGE_TOKENS -
           source.randint(1, max(1, room)) for _ in range(others - others // 3)]
    middle = len(lengths) // 2
    return lengths[:middle] + row + lengths[middle:]


def make_requests(args, vocab_size):
    source = random.Random(args.seed + 1)
    requests = []
    for i, length in enumerate(prompt_lengths(args)):
        request = {"id": f"r{i}", "prompt": [source.randrange(vocab_size) for _ in range(length)],
                   "max_tokens": args.max_tokens, "ignore_eos": True}
        if i % 4 == 3:
            request.update(temperature=0.8, top_p=0.9, seed=i)
        if i % 5 == 4:
            request["logprobs"] = 2
        requests.append(request)
    return requests


def write_requests(path, requests):
    with open(path, "w") as f:
        for request in requests:
            f.write(json.dumps(request) + "\n")


def bytes_per_page(config, dtype):
    per_token = config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return per_token * (4 if dtype == "float32" else 2) * PAGE_TOKENS


def make_variations(args, config):
    def split(c, first):
        return c["prompts_split"] > 0

    def more_passes(c, first):
        return c["passes"] > c["prefill_steps_at_most"] and c["passes"] > first["passes"]

    def preempted(c, first):
        return c["preemptions"] > 0

    off, on = ("--chunked-prefill", "off"), ("--chunked-prefill", "on")
    batch = ("--max-num-seqs", str(args.prompts))
    # The longest request and a little more, in pages.
    pages = -(-(args.longest + args.max_tokens) // PAGE_TOKENS) + args.spare_pages
    pool = ("--kv-cache-memory-bytes", str(pages * bytes_per_page(config, args.dtype)),
            "--max-model-len", str(min(pages * PAGE_TOKENS, args.max_model_len)))
    workspace = ("--mla-workspace-tokens", str(args.workspace))
    all_variations = [Variation("off", *off, *batch)]
    for number, budget in enumerate(args.budgets):
        # The largest budgets may hold every prompt of a step.
        expect = ("prompts split", split) if number < 2 else None
        all_variations.append(Variation(
            f"on, budget {budget}", *on, *batch, "--max-num-batched-tokens", str(budget),
            expect=expect))
    middle = str(args.budgets[min(1, len(args.budgets) - 1)])
    passes = ("more passes", more_passes)
    all_variations += [
        Variation("off, batch of 1", *off, "--max-num-seqs", "1"),
        Variation(f"on, budget {middle}, batch of 1", *on, "--max-num-seqs", "1",
                  "--max-num-batched-tokens", middle),
        Variation("off, batch of 7", *off, "--max-num-seqs", "7"),
        Variation(f"off, workspace {args.workspace}", *off, *batch, *workspace, expect=passes),
        Variation(f"on, budget {middle}, workspace {args.workspace}", *on, *batch, *workspace,
                  "--max-num-batched-tokens", middle, expect=passes),
        Variation("off, eager", *off, *batch, "--enforce-eager", needs_gpu=True),
        Variation(f"on, budget {middle}, eager", *on, *batch, "--max-num-batched-tokens", middle,
                  "--enforce-eager", needs_gpu=True),
        Variation(f"off, KV pool of {pages} pages", *off, *batch, *pool,
                  expect=("preemptions", preempted)),
        Variation(f"on, budget {middle}, KV pool of {pages} pages", *on, *batch, *pool,
                  "--max-num-batched-tokens", middle, expect=("preemptions", preempted)),
        Variation("off, file in another order", *off, *batch, prompts="shuffled"),
        Variation("off, once more", *off, *batch),
        Variation(f"on, budget {middle}, once more", *on, *batch, "--max-num-batched-tokens",
                  middle),
    ]
    return all_variations


def folder_name(name):
    return "".join(c if c.isalnum() else "-" for c in name).replace("--", "-")


def read_json(path):
    with open(path) as f:
        return json.load(f)


def counts_of(run):
    counts = dict(run["counts"])
    # No more steps than this had prompts, and so passes: more passes, and some step had two.
    counts["prefill_steps_at_most"] = min(counts["steps"], counts["chunks"])
    return counts


def finished(folder):
    path = os.path.join(folder, "run.json")
    return os.path.exists(path) and read_json(path)["state"] == "finished"


def run_variation(args, variation, folder):
    """True when every line was answered."""
    if args.resume and finished(folder):
        say(f"{variation.name}: kept")
        return read_json(os.path.join(folder, "run.json"))["counts"]["failed"] == 0
    command = [args.binary, "run", os.path.join(args.out, variation.prompts + ".jsonl"),
               "-m", args.model, "-o", folder, "--overwrite", "--load-format", args.load_format,
               "--device", args.device, "--dtype", args.dtype]
    if variation.option("--max-model-len") is None:
        command += ["--max-model-len", str(args.max_model_len)]
    command += variation.options + shlex.split(args.extra)
    start = time.time()
    with open(folder + ".log", "w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    say(f"{variation.name}: exit {status} after {time.time() - start:.1f} s")
    if status != 0:
        with open(folder + ".log") as log:
            say("  " + shlex.join(command) + "\n" + log.read()[-1500:])
    return status == 0


def compare(args, first, folder):
    """The report of `mla-run compare`, and its exit code."""
    report = folder + ".compare.json"
    with open(folder + ".compare.txt", "w") as text:
        status = subprocess.run([args.binary, "compare", first, folder, "--json", report],
                                stdout=text, stderr=subprocess.STDOUT).returncode
    return (read_json(report) if status in (0, 4) else None), status


def check(args, variation, first_folder, folder):
    """The row of the table, and what is wrong: "" where nothing is."""
    answered = run_variation(args, variation, folder)
    if not finished(folder):
        return [variation.name] + ["-"] * 9 + ["did not finish"], "it did not finish"
    run = read_json(os.path.join(folder, "run.json"))
    counts, summary = counts_of(run), run["summary"]
    wrong = [] if answered else ["a request failed"]
    tokens = bits = "reference"
    if folder != first_folder:
        report, status = compare(args, first_folder, folder)
        if report is None:
            wrong.append(f"compare: exit {status}")
            tokens = bits = "-"
        else:
            tokens = f"{report['token_identical_count']} of {report['compared']}"
            bits = f"{report['logprob_identical_count']} of {report['compared']}"
            # All of them: compare passes over a request that failed in both.
            if status != 0 or not report["compared"] == args.prompts == report["a"]["requests"]:
                wrong.append(f"not the same bits (exit {status})")
    first = counts_of(read_json(os.path.join(first_folder, "run.json")))
    if variation.expect and not variation.expect[1](counts, first):
        wrong.append(f"expected {variation.expect[0]}")
    row = [variation.name, counts["requests"], tokens, bits, counts["prompts_split"],
           counts["steps"], counts["passes"], counts["preemptions"],
           f"{summary['elapsed_time']:.2f}", f"{run['load_time'] or 0:.1f}",
           ", ".join(wrong) or "ok"]
    return row, ", ".join(wrong)


def markdown(rows):
    head = ["variation", "requests", "identical tokens", "identical logprob bits", "prompts split",
            "steps", "passes", "preemptions", "elapsed s", "load s", ""]
    lines = [head, ["---"] * len(head)] + rows
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--out", required=True)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=6000)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--budgets", type=lambda text: [int(n) for n in text.split(",")],
                        default=[256, 1000, 8192, 16384])
    parser.add_argument("--workspace", type=int, default=2048)
    parser.add_argument("--spare-pages", type=int, default=4, help="of the small KV pool")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="parts of names, with ; between them; the first always runs")
    parser.add_argument("--resume", action="store_true", help="keep runs that have finished")
    parser.add_argument("--extra", default="", help="more options of every run")
    args = parser.parse_args()

    os.makedirs(args.out, exist_ok=True)
    config = read_json(os.path.join(args.model, "config.json"))
    requests = make_requests(args, config["vocab_size"])
    write_requests(os.path.join(args.out, "prompts.jsonl"), requests)
    random.Random(args.seed + 2).shuffle(requests)
    write_requests(os.path.join(args.out, "shuffled.jsonl"), requests)
    say(f"{len(requests)} prompts, {sum(len(r['prompt']) for r in requests)} tokens")

    variations = make_variations(args, config)
    if args.only:
        parts = [part.strip() for part in args.only.split(";")]
        variations = [v for i, v in enumerate(variations)
                      if i == 0 or any(part in v.name for part in parts)]
    rows, bad, first_folder = [], [], None
    for variation in variations:
        folder = os.path.join(args.out, folder_name(variation.name))
        first_folder = first_folder or folder
        row, wrong = check(args, variation, first_folder, folder)
        if variation.needs_gpu and finished(folder):
            # A flag that changes nothing on the CPU is no check there.
            device = read_json(os.path.join(folder, "run.json"))["options"]["device"]
            row[-1] += "" if "cuda" in device.lower() else " (no GPU)"
        rows.append(row)
        if wrong:
            bad.append(f"{variation.name}: {wrong}")
        if folder == first_folder and wrong:
            break
    table = markdown(rows)
    print(table, flush=True)
    with open(os.path.join(args.out, "table.md"), "w") as f:
        f.write(table + "\n")
    for line in bad:
        print(f"FAIL {line}")
    print("FAIL" if bad else f"PASS: {len(rows) - 1} variations have the bits of the first")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
