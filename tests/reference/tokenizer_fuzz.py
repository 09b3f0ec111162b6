"""Compares tokenizer_bench with Hugging Face's tokenizers on random texts.

    tokenizer_fuzz.py --tool build/tests/tokenizer_bench --model DIR [--count N] [--seed S]
        [--added added_tokens.json]

Encodes each text with both; decodes the ids and random ids with both, special tokens skipped and
not. --added puts another list of added tokens into the file first. Exits with 1 at a difference.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer

SPACES = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u180e\u200b\ufeff\0"
WORDS = ("the and tokenizer HELLO Straße naïve ΑΒΓ привет भाषा 你好 世界 東京 カタカナ 한국어 عربى "
         "don't e.g. x+=1 -- ... 3.14 2024 ½ Ⅷ ५ ² ɐ ʰ ﬁ e\u0301 👍🏽 👩‍👩‍👧 𝒜𝓫 𐐀 𞤀 “quoted” ‘a’ 、。 （全角）"
         " http://a.b/c?d=e#f int main() {").split()
RANGES = [(0, 0x7f), (0x80, 0x24f), (0x250, 0x58f), (0x590, 0x10ff), (0x1100, 0x1fff),
          (0x2000, 0x2fff), (0x3000, 0x30ff), (0x4e00, 0x9fff), (0xa000, 0xd7ff), (0xe000, 0xffff),
          (0x10000, 0x1ffff), (0x20000, 0x10ffff)]


def random_text(rng, added):
    kind = rng.random()
    size = min(int(rng.expovariate(1 / 12)) + 1, 400)
    if kind < 0.1:
        return "".join(rng.choice(SPACES) for _ in range(size))
    if kind < 0.2:
        low, high = rng.choice(RANGES)
        chars = (rng.randint(low, high) for _ in range(size))
        return "".join(chr(c) for c in chars if not 0xd800 <= c < 0xe000)
    if kind < 0.25:
        return rng.choice(WORDS + list(SPACES)) * rng.randint(1, 200)
    parts = []
    for _ in range(size):
        pick = rng.random()
        if pick < 0.35:
            parts.append(rng.choice(WORDS))
        elif pick < 0.65:
            parts.append(rng.choice(SPACES) * rng.choice((1, 1, 1, 2, 3, 8)))
        elif pick < 0.75:
            parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
        elif pick < 0.8:
            token = rng.choice(added)
            cut = rng.randint(0, len(token))
            parts.append(rng.choice((token, token, token[:cut], token[cut:])))
        elif pick < 0.9:
            low, high = rng.choice(RANGES)
            c = rng.randint(low, high)
            parts.append("" if 0xd800 <= c < 0xe000 else chr(c))
        else:
            parts.append(rng.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"))
    return "".join(parts)


def call(tool, mode, model, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    out = subprocess.run([tool, mode, model], input=text.encode(), check=True,
                         stdout=subprocess.PIPE).stdout
    return [json.loads(line) for line in out.decode().split("\n")[:-1]]


def report(name, total, bad):
    print(f"{name}: {total} compared, {len(bad)} differ")
    for row in bad[:5]:
        print("  ", *(repr(x)[:300] for x in row), sep="\n    ")
    return len(bad)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True)
    parser.add_argument("--model", required=True, help="folder of tokenizer.json")
    parser.add_argument("--added")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(args.model, "tokenizer.json"), encoding="utf-8") as file:
            definition = json.load(file)
        if args.added:
            with open(args.added, encoding="utf-8") as file:
                definition["added_tokens"] = json.load(file)
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(definition, file)
        reference = Tokenizer.from_file(path)
        added = [token["content"] for token in definition["added_tokens"]]

        texts = [random_text(rng, added) for _ in range(args.count)]
        theirs = [reference.encode(text, add_special_tokens=False).ids for text in texts]
        ours = [row["ids"] for row in
                call(args.tool, "encode", folder, [{"text": text} for text in texts])]
        failed = len(ours) != len(texts)
        failed |= report("encode", len(texts), [
            (t, a, b) for t, a, b in zip(texts, theirs, ours) if a != b]) > 0

        # Random ids make bytes that are no UTF-8, which must turn into the same U+FFFD.
        size = reference.get_vocab_size()
        lists = theirs + [
            [rng.choice((rng.randrange(size), rng.randrange(243),
                         rng.randrange(size - 50, size + 99)))
             for _ in range(rng.randint(1, 30))] for _ in range(args.count)]
        rows = [{"ids": ids, "skip": skip} for ids in lists for skip in (False, True)]
        back = call(args.tool, "decode", folder, rows)
        failed |= len(back) != len(rows)
        bad = []
        for row, mine in zip(rows, back):
            text = reference.decode(row["ids"], skip_special_tokens=row["skip"])
            if text != mine["text"]:
                bad.append((row, text, mine["text"]))
        failed |= report("decode", len(rows), bad) > 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
