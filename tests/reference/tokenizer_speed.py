"""Times encode() of Hugging Face's tokenizers and of tokenizer_bench, one after the other.

    tokenizer_speed.py --tool build/tests/tokenizer_bench --model DIR FILE...

One thread each. A file is given whole and line by line; best of five runs. Ids must be equal.
"""

import argparse
import json
import os
import subprocess
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402  (reads the variables above)


def best(call, runs):
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True)
    parser.add_argument("--model", required=True, help="folder of tokenizer.json")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()

    reference = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
    for path in args.files:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        size = len(text.encode()) / 1e6
        lines = text.split("\n")
        whole, encoding = best(lambda: reference.encode(text, add_special_tokens=False), args.runs)
        by_line, _ = best(
            lambda: [reference.encode(x, add_special_tokens=False) for x in lines], args.runs)
        ours = json.loads(subprocess.run(
            [args.tool, "bench", args.model, path], check=True, capture_output=True).stdout)
        assert ours["tokens"] == len(encoding.ids), "token counts differ"
        print(f"{os.path.basename(path)}: {size:.1f} MB, {ours['tokens']} tokens")
        for name, theirs, mine in (("whole", size / whole, ours["mb_per_s"]),
                                   ("by line", size / by_line, ours["mb_per_s_by_line"])):
            print(f"  {name:8} tokenizers {theirs:6.2f} MB/s, here {mine:6.1f} MB/s, "
                  f"ratio {mine / theirs:.1f}")


if __name__ == "__main__":
    main()
