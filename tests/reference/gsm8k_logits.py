"""Logits of GSM8K prompts on a model of V2-Lite's layer sizes: transformers (float32) and ours.

  gsm8k_logits.py write --config CONFIG.json --out DIR [--layers 2] [--seed 1]
      a random checkpoint with the sizes of a released config.json but fewer layers, in shards
  gsm8k_logits.py compare --checkpoint DIR --tokenizer tokenizer.json --prompts PROMPTS.jsonl
      [--limit 40] [--tolerance 1e-4] [--dump-command "dump_logits DIR …"]…
      prints for every prompt the largest ‖Δ‖/‖ref‖ over positions >= 1, and the share left out;
      further dump commands (the other mode, say) must give the bits of the first

The dump command is a server: it reads lines {"ids": [...], "out": "path"} from its input, writes
float32 [T, V], little endian, to the path and answers "ok". Positions where two routing scores lie
nearer than --router-gap are left out: rounding may choose another expert there. Without a dump
command only the reference's own figures are printed.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from router_gap import RouterGaps


def write_checkpoint(args):
    with open(args.config) as f:
        record = json.load(f)
    record["num_hidden_layers"] = args.layers
    config = DeepseekV2Config.from_dict({k: v for k, v in record.items() if k != "auto_map"})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(args.seed)
    for name, p in sorted(model.named_parameters()):
        if p.dim() == 1:
            p.data.uniform_(0.75, 1.25)
        else:
            # A wider router: fewer positions whose choice of experts is near a tie.
            p.data.normal_(0, 0.04 if name.endswith("gate.weight") else 0.02)
    model.save_pretrained(args.out, max_shard_size=args.max_shard_size)
    with open(os.path.join(args.out, "config.json"), "w") as f:
        json.dump(record, f, indent=2)
        f.write("\n")
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.out}: {count:,} parameters, {sorted(os.listdir(args.out))}")


class DumpServer:
    """Our program, kept open over the prompts."""

    def __init__(self, command):
        self.process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def logits(self, ids, vocab_size, path, **more):
        """float32 [T, V], mapped from the file."""
        try:
            self.process.stdin.write(json.dumps({"ids": ids, "out": path, **more}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer != "ok":
            sys.exit(f"dump command: expected 'ok', found '{answer}' "
                     f"(exit status {self.process.poll()})")
        expected = len(ids) * vocab_size * 4
        if os.path.getsize(path) != expected:
            sys.exit(f"{path}: expected {expected} bytes, found {os.path.getsize(path)}")
        return np.memmap(path, dtype="<f4", mode="r", shape=(len(ids), vocab_size))

    def close(self):
        self.process.stdin.close()
        return self.process.wait()


def row_errors(got, want):
    """‖Δ‖/‖ref‖ of each row [T]; infinity where either side is not finite."""
    errors = np.empty(len(want))
    for t, (g, w) in enumerate(zip(got, want)):
        g, w = g.astype(np.float64), w.astype(np.float64)
        norm = np.linalg.norm(w)
        error = np.linalg.norm(g - w) / norm if norm > 0 else np.inf
        errors[t] = error if np.isfinite(error) else np.inf
    return errors


def compare(args):
    model = DeepseekV2ForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager").eval()
    vocab_size, bos = model.config.vocab_size, model.config.bos_token_id
    scaling = model.model.layers[0].self_attn.scaling
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, "
          f"softmax scale {scaling:.8f}")
    gaps = RouterGaps(model)
    tokenizer = Tokenizer.from_file(args.tokenizer)
    with open(args.prompts) as f:
        prompts = [json.loads(line)["prompt"] for line in f if line.strip()][:args.limit]
    servers = [DumpServer(command) for command in args.dump_command]
    worst, positions, left_out, agree, other_bits = 0.0, 0, 0, 0, 0
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        path = os.path.join(scratch, "logits.bin")
        for index, prompt in enumerate(prompts):
            ids = [bos] + tokenizer.encode(prompt, add_special_tokens=False).ids
            with torch.inference_mode():
                want = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
            gap = gaps.take(len(ids)).numpy()
            kept = gap > args.router_gap
            kept[0] = False  # position 0 attends to itself alone: a wrong scale does not show
            positions += len(ids) - 1
            left_out += len(ids) - 1 - int(kept.sum())
            line = f"prompt {index}: {len(ids)} tokens, {int(kept.sum())} positions kept, "
            line += f"smallest router gap {gap[1:].min():.2e}"
            if servers:
                got = servers[0].logits(ids, vocab_size, path)
                errors = np.where(kept, row_errors(got, want), 0.0)
                at = int(errors.argmax())
                worst = max(worst, float(errors[at]))
                agree += int((got.argmax(-1) == want.argmax(-1))[kept].sum())
                line += f", max error {errors[at]:.3e} at position {at}"
                for other in servers[1:]:
                    bits = other.logits(ids, vocab_size, path + ".other").view(np.uint32)
                    other_bits += int((bits != got.view(np.uint32)).sum())
                    del bits
                    os.remove(path + ".other")
                del got
                os.remove(path)
            print(line, flush=True)
    share = left_out / max(positions, 1)
    print(f"{len(prompts)} prompts, {positions} positions >= 1, left out {left_out} ({share:.3%})")
    if not servers:
        return 0
    for server in servers:
        status = server.close()
        if status != 0:
            sys.exit(f"dump command: exit status {status}")
    print(f"overall max ‖Δ‖/‖ref‖ {worst:.3e}, same argmax at {agree} of {positions - left_out}")
    if len(servers) > 1:
        print(f"logits whose bits differ from the first command's: {other_bits}")
    return 0 if worst <= args.tolerance and share <= 0.01 and other_bits == 0 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    commands = parser.add_subparsers(dest="mode", required=True)
    write = commands.add_parser("write")
    write.add_argument("--config", required=True)
    write.add_argument("--out", required=True)
    write.add_argument("--layers", type=int, default=2)
    write.add_argument("--seed", type=int, default=1)
    write.add_argument("--max-shard-size", default="500MB")
    against = commands.add_parser("compare")
    against.add_argument("--checkpoint", required=True)
    against.add_argument("--tokenizer", required=True)
    against.add_argument("--prompts", required=True)
    against.add_argument("--limit", type=int, default=40)
    against.add_argument("--dump-command", action="append", default=[])
    against.add_argument("--tolerance", type=float, default=1e-4)
    against.add_argument("--router-gap", type=float, default=1e-5)
    against.add_argument("--scratch", help="folder of the dumped logits (up to 0.5 GB)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.mode == "write":
        write_checkpoint(args)
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
