"""The CUDA backend at the full size of DeepSeek-V2-Lite against transformers, on one GPU.

  full_size.py write --config DeepSeek-V2-Lite/config.json --out DIR [--seed 1] [--device cuda]
      a random bfloat16 checkpoint of that config: matrices from N(0, 0.02²), norms 1
  full_size.py compare --checkpoint DIR [--prompts 16] [--length 512] [--decode 0]
      [--dump-command "dump_logits DIR …"]… [--scratch /dev/shm] [--references FILE]
      logits of random prompts: transformers in bfloat16 and ours, each against transformers with
      float32 weights and products. Exit 1 unless the mean ‖Δ‖/‖ref‖ over positions >= 1 of every
      command is at most --factor times that of transformers' bfloat16, its top-1 agreement with
      float32 at least as large, and every command gives the bits of the first.
  full_size.py speed (--checkpoint DIR | --config CONFIG.json) [--experts default,eager]
      transformers' own prefill and decode speed, one JSON object a line

The dump command is the server of gsm8k_logits.py. One model is on the GPU at a time: first those of
transformers, then each dump command. With --references FILE the figures of transformers are kept
there, and read where the file is there and of the same prompts.
"""
import argparse
import gc
import hashlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import time

import numpy as np
import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache

from gsm8k_logits import DumpServer

DEFAULT_WORKLOADS = "prefill:16x1024,prefill:1x4096,prefill:1x16384,decode:1x1024,decode:8x1024," \
                    "decode:64x1024"
# The argument has another name in newer versions.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(
    DeepseekV2ForCausalLM.forward).parameters else "past_key_values"


def say(text):
    print(text, flush=True)


def progress(text):
    print(text, file=sys.stderr, flush=True)


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def free_memory(device):
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        progress(f"freed: {torch.cuda.memory_allocated() / 2**30:.2f} GiB of tensors left on the "
                 "GPU")


def read_config(path):
    with open(path) as f:
        record = json.load(f)
    return record, DeepseekV2Config.from_dict({k: v for k, v in record.items() if k != "auto_map"})


def fill_random(model, seed):
    torch.manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        if p.dim() > 1:
            p.data.normal_(0, 0.02)
        else:
            p.data.fill_(1)


def count_parameters(model):
    return sum(p.numel() for p in model.parameters())


def write_checkpoint(args):
    start = time.time()
    record, config = read_config(args.config)
    # Without memory, then with memory that is not yet written: no initialisation to throw away.
    # The cast takes in the router, which transformers would make float32.
    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=args.device)
    fill_random(model, args.seed)
    synchronize(args.device)
    say(f"{count_parameters(model):,} parameters made in {time.time() - start:.1f} s")
    start = time.time()
    model.save_pretrained(args.out, max_shard_size=args.max_shard_size)
    # The config as it was given, not as transformers writes it.
    record.setdefault("torch_dtype", "bfloat16")
    with open(os.path.join(args.out, "config.json"), "w") as f:
        json.dump(record, f, indent=2)
        f.write("\n")
    seconds = time.time() - start
    size = sum(e.stat().st_size for e in os.scandir(args.out) if e.name.endswith(".safetensors"))
    say(f"{args.out}: {size:,} bytes in {seconds:.1f} s, {size / seconds:.3e} bytes/s, "
        f"{sorted(os.listdir(args.out))}")
    return 0


def load_model(checkpoint, dtype, device, **options):
    start = time.time()
    if importlib.util.find_spec("accelerate"):
        options["device_map"] = {"": device}
    model = DeepseekV2ForCausalLM.from_pretrained(checkpoint, dtype=dtype, **options)
    model = model.to(device).eval()
    synchronize(device)
    config = model.config
    progress(f"loaded {checkpoint} as {dtype} on {device} in {time.time() - start:.1f} s: "
             f"{count_parameters(model):,} parameters, attention {config._attn_implementation}, "
             f"experts {getattr(config, '_experts_implementation', 'default')}, softmax scale "
             f"{model.model.layers[0].self_attn.scaling:.8f}")
    return model


def make_prompts(count, length, vocab_size, seed):
    """Random ids, of length / 2 to 3 · length / 2."""
    random = np.random.default_rng(seed)
    lengths = random.integers(length // 2, length + length // 2 + 1, size=count)
    return [random.integers(0, vocab_size, size=int(n)).tolist() for n in lengths]


def row_errors(got, want):
    """‖Δ‖/‖ref‖ of each row [T], in float64; infinity where either side is not finite."""
    errors = []
    for at in range(0, len(want), 64):
        g, w = got[at:at + 64].double(), want[at:at + 64].double()
        errors.append((g - w).norm(dim=-1) / w.norm(dim=-1))
    errors = torch.cat(errors).cpu().numpy()
    return np.where(np.isfinite(errors), errors, np.inf)


def compute_references(args, prompts):
    """For every prompt the float32 logits, and errors and top-1 of transformers in bfloat16."""
    # The products of the reference are float32, not tf32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    options = {}
    if args.experts != "default":
        options["experts_implementation"] = args.experts
    result = {"logits": [], "errors": [], "top1": []}
    for dtype in (torch.float32, torch.bfloat16):
        # The float32 side is as plain as it can be, the other one what a user gets.
        exact = dtype == torch.float32
        model = load_model(args.checkpoint, dtype, args.device,
                           **(dict(attn_implementation="eager", experts_implementation="eager")
                              if exact else dict(attn_implementation=args.attention, **options)))
        start = time.time()
        with torch.inference_mode():
            for index, ids in enumerate(prompts):
                logits = model(torch.tensor([ids], device=args.device), use_cache=False).logits[0]
                if exact:
                    assert logits.dtype == torch.float32
                    result["logits"].append(logits.cpu())
                else:
                    want = result["logits"][index].to(args.device)
                    result["errors"].append(row_errors(logits, want))
                    result["top1"].append(logits.argmax(-1).cpu().numpy())
                    del want
                del logits
        progress(f"transformers {dtype}: {len(prompts)} prompts in {time.time() - start:.1f} s")
        del model
        free_memory(args.device)
    return result


def get_references(args, prompts):
    files = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns)
                   for e in os.scandir(args.checkpoint))
    key = hashlib.sha256(json.dumps(
        [prompts, args.attention, args.experts, transformers.__version__, torch.__version__,
         args.device, files]).encode()).hexdigest()
    if args.references and os.path.exists(args.references):
        kept = torch.load(args.references, weights_only=False)
        if kept["key"] == key:
            progress(f"{args.references}: the figures of transformers are read from here")
            return kept
        progress(f"{args.references}: of other prompts or another checkpoint, computed anew")
        del kept
    result = compute_references(args, prompts)
    result["key"] = key
    if args.references:
        torch.save(result, args.references)
    return result


def run_dump(command, prompts, references, folder, decode, keep):
    """Errors and top-1 of a dump command, and the number of logits that are not those of the files
    already in the folder; with `keep` its own logits stay there."""
    vocab_size = references["logits"][0].shape[1]
    result = {"errors": [], "top1": [], "other_bits": 0}
    start = time.time()
    server = DumpServer(command)
    for index, ids in enumerate(prompts):
        first = os.path.join(folder, f"{index}.first")
        path = first if keep else os.path.join(folder, "other")
        more = {"prompt": len(ids) - decode} if decode else {}
        got = server.logits(ids, vocab_size, path, **more)
        if index == 0:
            progress(f"first answer after {time.time() - start:.1f} s")
        if not keep:
            before = np.memmap(first, dtype="<u4", mode="r", shape=got.shape)
            result["other_bits"] += int((got.view("<u4") != before).sum())
            del before
        logits = torch.from_numpy(np.array(got))
        result["errors"].append(row_errors(logits, references["logits"][index]))
        result["top1"].append(logits.argmax(-1).numpy())
        del got, logits
        if not keep:
            os.remove(path)
    status = server.close()
    if status != 0:
        sys.exit(f"dump command: exit status {status}")
    progress(f"'{command}': {len(prompts)} prompts in {time.time() - start:.1f} s")
    return result


def print_table(names, sides, want_top1, lengths):
    widths = [max(len(name), 9) for name in names]
    head = "  ".join(f"{name:>{w}} {'top-1':>11}" for name, w in zip(names, widths))
    say(f"\n{'prompt':>6} {'tokens':>6}  {head}")
    for index, length in enumerate(lengths):
        cells = []
        for side, width in zip(sides, widths):
            same = int((side["top1"][index] == want_top1[index])[1:].sum())
            cells.append(f"{side['errors'][index][1:].mean():>{width}.3e} "
                         f"{f'{same}/{length - 1}':>11}")
        say(f"{index:>6} {length:>6}  {'  '.join(cells)}")


def flat(parts, begin=1):
    return np.concatenate([p[begin:] for p in parts])


def judge(args, names, sides, want_top1, begin, what, judged=True):
    """Prints the overall figures of the positions from `begin` on; True when all is as it should.
    Sides: transformers' bfloat16, then ours."""
    want = flat(want_top1, begin)
    theirs = flat(sides[0]["errors"], begin)
    their_right = flat(sides[0]["top1"], begin) == want
    say(f"\n{what}: {len(want)}")
    good = True
    for name, side in zip(names, sides):
        errors, right = flat(side["errors"], begin), flat(side["top1"], begin) == want
        line = (f"  {name}: mean error {errors.mean():.4e}, median {np.median(errors):.4e}, "
                f"largest {errors.max():.4e}; top-1 as float32 at {right.sum()} "
                f"({right.mean():.4%})")
        if side is not sides[0]:
            line += (f"; error ratio {errors.mean() / theirs.mean():.4f}, top-1 right only here "
                     f"{int((right & ~their_right).sum())}, only in transformers' bfloat16 "
                     f"{int((their_right & ~right).sum())}")
            near = errors.mean() <= args.factor * theirs.mean()
            agrees = right.sum() + args.top1_slack >= their_right.sum()
            good &= bool(near and agrees)
            if judged:
                line += "; " + ", ".join(f"{'PASS' if ok else 'FAIL'} {what_ok}" for ok, what_ok
                                         in ((near, "error"), (agrees, "top-1")))
        say(line)
    return good


def compare(args):
    progress(f"torch {torch.__version__}, transformers {transformers.__version__}")
    _, config = read_config(os.path.join(args.checkpoint, "config.json"))
    prompts = make_prompts(args.prompts, args.length, config.vocab_size, args.seed)
    if args.decode >= min(len(p) for p in prompts):
        sys.exit(f"--decode: expected fewer than the {min(len(p) for p in prompts)} tokens of the "
                 f"shortest prompt, found {args.decode}")
    references = get_references(args, prompts)
    want_top1 = [logits.argmax(-1).numpy() for logits in references["logits"]]
    names, sides = ["hf bf16"], [references]
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for number, command in enumerate(args.dump_command):
            names.append(f"ours {number + 1}")
            say(f"{names[-1]}: {command}")
            sides.append(run_dump(command, prompts, references, folder, args.decode, number == 0))
    print_table(names, sides, want_top1, [len(p) for p in prompts])
    good = judge(args, names, sides, want_top1, 1, "positions >= 1")
    if args.decode:
        last = [{k: [a[-args.decode:] for a in side[k]] for k in ("errors", "top1")}
                for side in sides]
        judge(args, names, last, [a[-args.decode:] for a in want_top1], 0,
              "of these by our decode path, shown and not judged", judged=False)
    other = sum(side["other_bits"] for side in sides[1:])
    if len(sides) > 2:
        say(f"logits whose bits differ from the first command's: {other}")
    good &= other == 0
    if len(sides) > 1:
        say("PASS" if good else "FAIL")
    return 0 if good else 1


def median_ms(work, device, repeats, warm_up):
    times = []
    for repeat in range(warm_up + repeats):
        if device.startswith("cuda"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            work()
            elapsed = (time.perf_counter() - start) * 1e3
        if repeat >= warm_up:
            times.append(elapsed)
    return sorted(times)[len(times) // 2]


def measure(model, kind, batch, length, device):
    vocab_size = model.config.vocab_size
    ids = torch.randint(0, vocab_size, (batch, length), device=device)
    if kind == "prefill":
        ms = median_ms(lambda: model(ids, use_cache=True, logits_to_keep=1), device, 3, 1)
        return ms, batch * length
    cache = DynamicCache(config=model.config)
    model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    token = torch.randint(0, vocab_size, (batch, 1), device=device)
    ms = median_ms(lambda: model(token, use_cache=True, logits_to_keep=1,
                                 **{CACHE_ARGUMENT: cache}), device, 10, 3)
    return ms, batch


def random_model(path, device, seed):
    _, config = read_config(path)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = DeepseekV2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    fill_random(model, seed)
    return model.eval()


def speed(args):
    if args.checkpoint:
        model = load_model(args.checkpoint, torch.bfloat16, args.device)
    else:
        model = random_model(args.config, args.device, args.seed)
    cuda = args.device.startswith("cuda")
    about = {"device": torch.cuda.get_device_name() if cuda else args.device,
             "torch": torch.__version__, "transformers": transformers.__version__,
             "attention": model.config._attn_implementation}
    torch.manual_seed(args.seed)
    for experts in args.experts.split(","):
        if experts != "default":
            model.set_experts_implementation(experts)
        for workload in args.workloads.split(","):
            kind, shape = workload.split(":")
            batch, length = map(int, shape.split("x"))
            record = {"work": kind, "batch": batch, "length": length, "experts": experts}
            try:
                with torch.inference_mode():
                    ms, tokens = measure(model, kind, batch, length, args.device)
                record.update(ms=round(ms, 3), tokens_per_second=round(tokens / ms * 1e3, 1))
            except (RuntimeError, ValueError) as error:  # of memory, or one that is not there
                record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            if cuda:
                record["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            say(json.dumps({**record, **about}))
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="mode", required=True)
    write = commands.add_parser("write")
    write.add_argument("--config", required=True)
    write.add_argument("--out", required=True)
    write.add_argument("--max-shard-size", default="8GB", help="default: as many as are released")
    against = commands.add_parser("compare")
    against.add_argument("--checkpoint", required=True)
    against.add_argument("--prompts", type=int, default=16)
    against.add_argument("--length", type=int, default=512, help="mean length of a prompt")
    against.add_argument("--decode", type=int, default=0,
                         help="our program computes the last N tokens of each prompt as if it had "
                              "generated them")
    against.add_argument("--dump-command", action="append", default=[])
    against.add_argument("--scratch", default="/dev/shm",
                         help="folder of the first command's logits (3.5 GB)")
    against.add_argument("--references", help="file of transformers' figures (3.5 GB)")
    against.add_argument("--factor", type=float, default=1.2)
    against.add_argument("--top1-slack", type=int, default=0,
                         help="positions by which our top-1 agreement may be smaller")
    against.add_argument("--attention", default="sdpa", help="of transformers' bfloat16")
    against.add_argument("--experts", default="default", help="of transformers' bfloat16")
    fast = commands.add_parser("speed")
    source = fast.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint")
    source.add_argument("--config", help="random weights of this config")
    fast.add_argument("--experts", default="default", help="implementations, with commas")
    fast.add_argument("--workloads", default=DEFAULT_WORKLOADS, help="KIND:BATCHxLENGTH, …")
    for command in (write, against, fast):
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--device", default="cuda")
    args = parser.parse_args()
    return {"write": write_checkpoint, "compare": compare, "speed": speed}[args.mode](args)


if __name__ == "__main__":
    sys.exit(main())
