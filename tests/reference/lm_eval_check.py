"""mla-run eval gsm8k against lm-evaluation-harness itself, on the texts of one finished run.

  lm_eval_check.py --run DIR --data GSM8K_DIR [--table FILE] [--model MODEL_DIR]

DIR is what `mla-run eval gsm8k -o DIR` left (of both: DIR/off or DIR/on), FILE its standard output,
MODEL_DIR the checkpoint, whose chat template a run with --apply-chat-template needs. The tool builds
the prompts of its own gsm8k task from the local files, gets the texts of outputs.jsonl in place of a
model's, filters and scores them, and writes results, samples and table. Compared are
  - the prompts, and every field and the order of the fields of samples.jsonl,
  - results.json, key by key; a float may differ by 2 units of its last place,
  - the table.
What the tool has and mla-run has not, or otherwise, is printed; keys of its own environment (seeds,
versions, paths, times) are listed apart. Exit 1 where scores, samples or table differ.

Environment: Python 3.11 with lm_eval 0.4.13 (pip install lm_eval; no torch needed) and jinja2.
"""
import argparse
import json
import math
import os
import re
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import jinja2
import lm_eval
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

# What says where and when the tool ran, not what came out.
ENVIRONMENT = re.compile(
    r"^(git_hash|date|pretty_env_info|transformers_version|lm_eval_version|upper_git_hash|"
    r"mla_run_version|model_(name|name_sanitized|source)|total_evaluation_time_seconds|"
    r"tokenizer_.*|eot_token_id|max_length|config/.*|configs/gsm8k/metadata/.*)$")


class Recorded(LM):
    """A model that has said it all before."""

    def __init__(self, texts, template, tokens):
        super().__init__()
        self.texts, self.template, self.tokens = texts, template, tokens

    @property
    def tokenizer_name(self):
        return "recorded"

    def generate_until(self, requests, disable_tqdm=False):
        return [self.texts[request.doc_id] for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def chat_template(self, chat_template=False):
        return self.template

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        return env.from_string(self.template).render(
            messages=chat_history, add_generation_prompt=add_generation_prompt, **self.tokens)


def read_lines(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def chat_files(model_dir):
    with open(os.path.join(model_dir, "tokenizer_config.json"), encoding="utf-8") as f:
        config = json.load(f)
    text = lambda token: token["content"] if isinstance(token, dict) else token
    return config["chat_template"], {k: text(config[k]) for k in ("bos_token", "eos_token")}


def local_task(data, folder):
    """The tool's own task file, but for where its data is."""
    path = os.path.join(os.path.dirname(lm_eval.__file__), "tasks/gsm8k/gsm8k.yaml")
    with open(path, encoding="utf-8") as f:
        lines = [line for line in f.read().split("\n")
                 if not line.startswith(("dataset_path:", "dataset_name:"))]
    files = {name: os.path.abspath(os.path.join(data, name + ".jsonl"))
             for name in ("train", "test")}
    lines += ["dataset_path: json", "dataset_kwargs: " + json.dumps({"data_files": files})]
    with open(os.path.join(folder, "gsm8k.yaml"), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")


def run_tool(args, ours, folder):
    """The tool's results as it would write them, its samples, and its table."""
    local_task(args.data, folder)
    chat = ours["chat_template"] is not None
    template, tokens = chat_files(args.model) if chat else (None, {})
    texts = [record.get("text", "") for record in read_lines(args.run + "/outputs.jsonl")]
    tracker = EvaluationTracker(output_path=os.path.join(folder, "out.json"))
    results = simple_evaluate(
        model=Recorded(texts, template, tokens), tasks=["gsm8k"],
        num_fewshot=ours["n-shot"]["gsm8k"], limit=ours["config"]["limit"],
        gen_kwargs=ours["config"]["gen_kwargs"], apply_chat_template=chat,
        fewshot_as_multiturn=chat, evaluation_tracker=tracker,
        task_manager=TaskManager(include_path=folder, include_defaults=False))
    table = make_table(results)
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(task_name="gsm8k", samples=samples["gsm8k"])
    written = {name.split("_")[0]: os.path.join(folder, name) for name in os.listdir(folder)}
    with open(written["out"], encoding="utf-8") as f:
        return json.load(f), read_lines(written["samples"]), table


def flat(value, path=""):
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items()
                for k, v in flat(item, f"{path}/{key}" if path else key).items()}
    return {path: value}


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 2 * max(math.ulp(a), math.ulp(b))
    return a == b


def compare_results(ours, theirs):
    """Prints what differs; True where the scores are the same."""
    a, b = flat(ours), flat(theirs)
    scores_same = True
    for key in sorted(a.keys() | b.keys()):
        if key in a and key in b and same(a[key], b[key]):
            continue
        environment = ENVIRONMENT.match(key)
        scores_same &= key.split("/")[0] not in ("results", "n-samples", "task_hashes", "versions",
                                                 "n-shot", "higher_is_better")
        of = lambda side: json.dumps(side[key], ensure_ascii=False) if key in side else "absent"
        print(f"{'environment' if environment else 'results'}: {key}: mla-run {of(a)}, "
              f"lm_eval {of(b)}")
    exact = sum(a[k] == b.get(k) for k in a)
    print(f"results.json: {exact} of {len(a)} values of mla-run's are the tool's, bit for bit")
    return scores_same


def compare_samples(ours, theirs):
    different = 0
    for i, (a, b) in enumerate(zip(ours, theirs)):
        if list(a.items()) == list(b.items()):
            continue
        different += 1
        if different <= 5:
            keys = [k for k in {**a, **b} if a.get(k) != b.get(k)] or ["the order of the fields"]
            print(f"samples: line {i + 1}: differ in {', '.join(keys)}")
    print(f"samples.jsonl: {len(ours)} and {len(theirs)} lines, {different} differ")
    return different == 0 and len(ours) == len(theirs)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--table")
    parser.add_argument("--model")
    args = parser.parse_args()
    with open(args.run + "/results.json", encoding="utf-8") as f:
        ours = json.load(f)
    with tempfile.TemporaryDirectory() as folder:
        theirs, their_samples, table = run_tool(args, ours, folder)
    good = compare_results(ours, theirs)
    good &= compare_samples(read_lines(args.run + "/samples.jsonl"), their_samples)
    if args.table:
        with open(args.table, encoding="utf-8") as f:
            found = table in f.read()
        print(f"table: {'the same' if found else 'different'}")
        good &= found
    print(table)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
