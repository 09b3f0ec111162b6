"""What the small models of this project share: a byte-level BPE tokenizer of the released one's
structure, its side files, and the words that made-up text is made of."""
import json
import os

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers

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
