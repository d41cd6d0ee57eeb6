"""Encoding, decoding and chat against the tokenizers library and transformers."""

import json
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from shardwise.tokenizer import Tokenizer
from shardwise.tokenizer import gguf as from_gguf
from shardwise.tokenizer.template import MAX_CHARS, Template
from shardwise.weights.gguf import read_gguf
from shardwise.weights.resolve import resolve

CORPUS = [
    "Hello world! The quick brown fox doesn't jump over 12345 lazy dogs.",
    "  leading and   inner\t\twhitespace \n\n\n and lines \r\n",
    "def f(x: int) -> str:\n    return f'{x!r}' # 0x1F, 3.14e-10\n",
    "Grüße aus Köln, ď, naïve café, Ελληνικά, русский текст",
    "日本語のテキストと中文字符 한국어 العربية עברית ไทย",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 done ½ ² Ⅷ ٣",
    "I'll we've CAN'T 'S it's",
    "",
    " ",
    "a",
    "\x00\x01\x7f",
]
SPECIAL = ["<|end|>", "<|start|>"]


def byte_level(expressions=None, post=None, size=400) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if expressions:
        backend.pre_tokenizer = pre_tokenizers.Sequence(expressions)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    if post:
        start = backend.token_to_id("<|start|>")
        backend.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<|start|>", start)])
    return backend


def gguf_metadata(backend: Backend, pre: str) -> dict:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def sentence_piece_metadata(**extra) -> dict:
    """A small SentencePiece BPE vocabulary, ids by score as the real ones have it."""
    words = ["▁t", "▁a", "in", "he", "re", "▁the", "▁in", "er", "llo", "▁he", "▁hello", "▁▁", "ing", "or", "▁wor", "ld"]
    words += ["ll", "▁h", "▁w", "▁wo", "▁world", "▁th"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzTHEd.,!é0123"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *dict.fromkeys(letters)]
    start = 3 + 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * start + [-float(rank) for rank in range(len(pieces) - start)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - start),
        **extra,
    }


def merge_by_score(metadata: dict, text: str) -> list[int]:
    """SentencePiece's rule in the plainest way: the oracle."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    normal = {t: i for i, t in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    symbols = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[normal[a + b]], at)
            for at, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in normal
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [normal[symbol]] if symbol in normal else [3 + byte for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(resolve("smollm2").path)[0])


class TestGguf:
    @pytest.mark.parametrize(
        ("pre", "steps"),
        [
            ("gpt-2", [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
            (
                "smollm",
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
            ),
            (
                "bloom",
                [
                    pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ],
            ),
        ],
    )
    def test_byte_level_equals_the_tokenizer_it_was_made_from(self, pre, steps):
        """A pre-tokenizer that cuts otherwise than the training did yields other ids, silently."""
        backend = byte_level(steps)
        tokenizer = Tokenizer.from_gguf(gguf_metadata(backend, pre))
        for text in [*CORPUS, "a<|end|>b", "<|start|>" + CORPUS[0]]:
            ids = backend.encode(text).ids
            assert tokenizer.encode(text, add_special_tokens=False) == ids
            assert tokenizer.decode(ids) == backend.decode(ids)
            assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)

    @pytest.mark.parametrize("pre", sorted(from_gguf.SPLITS))
    def test_every_split_loses_no_text(self, pre):
        """An expression that the engine can't compile, or that drops text."""
        tokenizer = Tokenizer.from_gguf(gguf_metadata(byte_level(), pre))
        for text in CORPUS:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    def test_beginning_of_text_follows_the_file_and_else_the_kind(self):
        """A missing flag read as False costs Llama models their first token, and with it their answers."""
        metadata = gguf_metadata(byte_level(), "llama-bpe")
        bos = metadata["tokenizer.ggml.bos_token_id"]
        assert Tokenizer.from_gguf(metadata).encode("a")[0] == bos
        assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("a")[0] != bos
        both = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_eos_token": True})
        assert both.encode("a")[-1] in both.eos
        assert both.encode("a")[0] != bos

    @pytest.mark.parametrize(
        "text", ["hello world", "the thing", " hello", "hello  the   world ", "Tränen 😀 ɸ", "", "in"]
    )
    def test_sentence_piece_joins_the_best_score_first(self, text):
        """Scores turned into merges in the wrong order, or control and byte tokens taking part in merges."""
        metadata = sentence_piece_metadata()
        tokenizer = Tokenizer.from_gguf(metadata)
        ids = merge_by_score(metadata, text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text

    def test_sentence_piece_without_a_space_prefix(self):
        """The space before the first word is the file's choice, in both directions."""
        tokenizer = Tokenizer.from_gguf(sentence_piece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
        assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
        assert tokenizer.encode("hello") != tokenizer.encode(" hello")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of.*smollm"),
            ({"tokenizer.ggml.model": "bert"}, "bert"),
            ({"tokenizer.ggml.tokens": 5}, "tokens is no list"),
            ({"tokenizer.ggml.tokens": []}, "0 tokenizer.ggml.tokens"),
            ({"tokenizer.ggml.token_type": [1]}, "token_type"),
            ({"tokenizer.ggml.merges": ["a b c"]}, "merges"),
            ({"tokenizer.ggml.merges": ["zzz yyy"]}, "no vocabulary"),
            ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token"),
            ({"tokenizer.chat_template": 3}, "chat_template"),
            ({"tokenizer.ggml.model": "llama"}, "scores"),
        ],
    )
    def test_bad_metadata_is_refused_by_key(self, change, message):
        """A hostile or unknown vocabulary guessed at, or a bare library exception."""
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt-2") | change)

    def test_absent_ids_are_none(self):
        """2**32-1 stands for no such token and must not index the vocabulary."""
        metadata = gguf_metadata(byte_level(), "gpt-2") | {"tokenizer.ggml.bos_token_id": 2**32 - 1}
        assert Tokenizer.from_gguf(metadata).bos is None

    def test_end_of_turn_tokens_join_eos(self):
        """C58: a model that ends turns with a token other than its eos would talk on."""
        metadata = gguf_metadata(byte_level(), "gpt-2")
        metadata["tokenizer.ggml.eot_token_id"] = 7
        tokens = metadata["tokenizer.ggml.tokens"]
        assert Tokenizer.from_gguf(metadata).eos == {tokens.index("<|end|>"), 7}

    @pytest.mark.parametrize(
        ("text", "ids"),
        [
            ("Hello, we can use", [19556, 28, 392, 416, 722]),
            ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
            ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
            ("  multiple   spaces", [216, 2701, 256, 5600]),
            ("<|im_start|>user\n", [1, 4093, 198]),
        ],
    )
    def test_smollm2_ids_are_the_published_ones(self, smollm2, text, ids):
        """The default model's tokenizer drifting from the one it was trained with."""
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        assert (smollm2.bos, smollm2.eos, smollm2.vocab_size) == (1, {2}, 49152)

    @pytest.mark.slow
    def test_smollm2_equals_transformers(self, smollm2):
        """Ids, text and chat against an independent reading of the same file (which does not set digits apart)."""
        transformers = pytest.importorskip("transformers")
        path = Path(resolve("smollm2").path)
        peer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        for text in [text for text in CORPUS if not any(char.isnumeric() for char in text)]:
            ids = peer.encode(text)
            assert smollm2.encode(text, add_special_tokens=False) == ids
            assert smollm2.decode(ids) == peer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        messages = [{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "x"}]
        text = peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert smollm2.chat(messages) == text
        assert smollm2.encode_chat(messages) == peer.encode(text)


def write(directory: Path, backend: Backend | None, **files) -> Path:
    if backend is not None:
        backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        suffix = ".jinja" if isinstance(content, str) else ".json"
        (directory / (name + suffix)).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


class TestDirectory:
    def test_equals_the_library(self, tmp_path):
        """Beginning-of-text added twice or never, the wrong eos, a template from the wrong file."""
        backend = byte_level(post="<|start|> $A")
        config = {
            "bos_token": {"content": "<|start|>"},
            "eos_token": "<|end|>",
            "chat_template": [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}],
        }
        tokenizer = Tokenizer.from_directory(write(tmp_path, backend, tokenizer_config=config))
        for text in CORPUS:
            assert tokenizer.encode(text) == backend.encode(text).ids
            assert tokenizer.encode(text, False) == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.bos == backend.token_to_id("<|start|>")
        assert tokenizer.eos == {backend.token_to_id("<|end|>")}
        assert tokenizer.vocab_size == backend.get_vocab_size()
        assert tokenizer.chat([]) == "D"
        write(tmp_path, None, chat_template="from its own file")
        assert Tokenizer.from_directory(tmp_path).chat([]) == "from its own file"

    def test_names_may_stand_in_special_tokens_map_alone(self, tmp_path):
        """Older checkpoints name their tokens there."""
        write(tmp_path, byte_level(), special_tokens_map={"eos_token": "<|end|>", "additional_special_tokens": ["x"]})
        assert Tokenizer.from_directory(tmp_path).eos

    def test_named_tokens_are_special_even_with_id_0(self, tmp_path):
        """An end token that tokenizer.json does not mark would show in the text."""
        backend = Backend(models.BPE(vocab={"Z": 0, "a": 1}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        tokenizer = Tokenizer.from_directory(write(tmp_path, backend, tokenizer_config={"eos_token": "Z"}))
        assert tokenizer.decode([1, 0]) == "a"

    def test_opt_begins_with_its_end_token(self, tmp_path):
        """OPT's files name no tokenizer.json: </s>, begin and end in one, must come first, and once only."""
        letters = {letter: number + 4 for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **letters, "he": 260}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
        (tmp_path / "config.json").write_text('{"model_type": "opt"}')
        names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
        settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, **names}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer.encode("hello") == [2, 260, letters["l"], letters["l"], letters["o"]]
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
        assert tokenizer.eos == {2}

    def test_added_tokens_of_the_config_get_their_ids(self, tmp_path):
        """Tokens only tokenizer_config.json knows, and two files of different models."""
        backend = byte_level()
        size = backend.get_vocab_size()
        listed = {str(size): {"content": "<tool>", "special": False, "normalized": False}}
        write(tmp_path, backend, tokenizer_config={"added_tokens_decoder": listed})
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer.encode("a<tool>b")[1] == size
        assert tokenizer.vocab_size == size + 1
        write(tmp_path, None, tokenizer_config={"added_tokens_decoder": {str(size + 9): listed[str(size)]}})
        with pytest.raises(ValueError, match="not of one model"):
            Tokenizer.from_directory(tmp_path)

    def test_truncation_and_padding_settings_are_dropped(self, tmp_path):
        """A tokenizer.json saved with truncation would cut every prompt to 512 tokens."""
        backend = byte_level()
        backend.enable_truncation(4)
        backend.enable_padding(length=9)
        tokenizer = Tokenizer.from_directory(write(tmp_path, backend))
        assert len(tokenizer.encode("abcdefghij klm")) > 4
        assert len(tokenizer.encode("a")) == 1

    @pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}', ""])
    def test_broken_files_are_named(self, tmp_path, content):
        """A bare library exception that does not say which file is broken."""
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            Tokenizer.from_directory(tmp_path)
        write(tmp_path, byte_level())
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
            Tokenizer.from_directory(tmp_path)

    def test_an_unknown_decoder_is_refused(self, tmp_path):
        """Text put together by the wrong rule."""
        backend = byte_level()
        backend.decoder = decoders.WordPiece()
        with pytest.raises(ValueError, match="WordPiece"):
            Tokenizer.from_directory(write(tmp_path, backend))

    @pytest.mark.slow
    def test_without_tokenizer_json_transformers_converts(self, tmp_path):
        """vocab.json and merges.txt alone."""
        pytest.importorskip("transformers")
        backend = byte_level()
        backend.model.save(str(tmp_path))
        config = {"model_type": "gpt2", "bos_token": "<|end|>", "eos_token": "<|end|>", "unk_token": "<|end|>"}
        write(
            tmp_path,
            None,
            config={"model_type": "gpt2"},
            tokenizer_config={"tokenizer_class": "GPT2Tokenizer", **config},
        )
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert not (tmp_path / "tokenizer.json").exists()
        assert tokenizer.encode(CORPUS[0]) == backend.encode(CORPUS[0]).ids

    def test_without_tokenizer_json_nor_transformers(self, tmp_path, monkeypatch):
        """The remedy is named."""
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        with pytest.raises(ValueError, match=r"tokenizer\.json.*pip install transformers"):
            Tokenizer.from_directory(tmp_path)


class TestPrompts:
    def test_an_empty_prompt_is_the_beginning_of_text(self):
        """C34: a prompt of no tokens has no row to sample from."""
        backend = byte_level()
        start = backend.token_to_id("<|start|>")
        assert Tokenizer(backend, named={"bos_token": "<|start|>"}).encode("") == [start]
        assert Tokenizer(backend, named={"bos_token": "<|start|>"}, prefix=[start]).encode("") == [start]
        with pytest.raises(ValueError, match="empty"):
            Tokenizer(backend).encode("")
        assert Tokenizer(backend).encode("", add_special_tokens=False) == []

    def test_half_a_surrogate_pair_is_refused(self):
        """JSON can carry one, and the library answers with a TypeError."""
        with pytest.raises(ValueError, match="character 1"):
            Tokenizer(byte_level()).encode("a\ud800")

    def test_a_chat_has_one_beginning_of_text(self):
        """C38: the template writes it and the tokenizer would add it again."""
        metadata = gguf_metadata(byte_level(), "gpt-2") | {"tokenizer.ggml.add_bos_token": True}
        tokenizer = Tokenizer.from_gguf(metadata)
        ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert ids.count(tokenizer.bos) == 1
        assert ids == tokenizer.encode("hi")

    def test_many_threads_may_encode_at_once(self):
        """C41: "Already borrowed" when one thread changes what another uses."""
        tokenizer = Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt-2"))
        wanted = [tokenizer.encode(text or "a") for text in CORPUS]
        failures: list[object] = []

        def work() -> None:
            try:
                for _ in range(10):
                    found = [tokenizer.encode(text or "a") for text in CORPUS]
                    texts = [tokenizer.decode(ids) for ids in found]
                    if found != wanted or texts != [text or "a" for text in CORPUS]:
                        failures.append(found)
                    tokenizer.chat([{"content": "x"}])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures


class TestTemplate:
    def test_refusals_carry_the_templates_words(self):
        """C39: a template that rejects a role is the client's error, with its reason."""
        template = Template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok")
        assert template.render([{"role": "user"}]) == "ok"
        with pytest.raises(ValueError, match="no system role"):
            template.render([{"role": "system"}])

    @pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ nothing.at.all }}"])
    def test_failures_are_value_errors(self, source):
        """A template's TypeError is no bug of the server's."""
        with pytest.raises(ValueError, match="chat template"):
            Template(source).render([{"role": "user", "content": "x"}])

    def test_malformed(self):
        with pytest.raises(ValueError, match="compiled"):
            Template("{% for %}")

    def test_has_what_templates_expect(self):
        """Whitespace rules, tojson without HTML escapes, loop controls, the training mark and the date."""
        source = (
            "{% for m in messages %}\n  {% if m.skip %}\n    {% continue %}\n  {% endif %}\n"
            "{{ m | tojson }};{% endfor %}"
            "{% generation %}G{% endgeneration %}{{ strftime_now('%Y') | length }}{{ undefined_name }}"
        )
        text = Template(source).render([{"a": "<é'>"}, {"skip": 1}])
        assert text == '{"a": "<é\'>"};G4'

    @pytest.mark.slow
    def test_equals_transformers(self):
        """The environment's settings are transformers' own, else whitespace differs."""
        utils = pytest.importorskip("transformers.utils.chat_template_utils")
        source = "{%- set x = messages | length %}\n {% for m in messages %}\n- {{ m }}\n{% endfor %}\n{{ x }}\n\n"
        messages = [{"role": "user", "content": "a b"}]
        (wanted,), _ = utils.render_jinja_template([messages], chat_template=source)
        assert Template(source).render(messages) == wanted

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.__init__.__globals__ }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ lipsum.__globals__['os'] }}",
            "{{ joiner.__init__ }}{{ joiner() }}",
            "{{ ''|attr('__class__')|attr('__base__') }}",
            "{{ '{0.__class__.__mro__}'.format('') + raise_exception.__globals__ }}",
            "{{ messages.append(1) }}",
            "{% set _ = messages[0].update({'role': 'x'}) %}",
        ],
    )
    def test_the_sandbox_holds(self, source):
        """A stranger's template must reach nothing but text."""
        messages = [{"role": "user", "content": "x"}]
        try:
            text = Template(source).render(messages)
        except ValueError:
            text = ""
        assert text == ""
        assert messages == [{"role": "user", "content": "x"}]

    def test_output_is_bounded(self):
        """A template of one line can write without end."""
        source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '%0999d' % a }}{% endfor %}{% endfor %}"
        with pytest.raises(ValueError, match=str(MAX_CHARS)):
            Template(source).render([])

    def test_a_model_without_one_says_so(self):
        with pytest.raises(ValueError, match="no chat template"):
            Tokenizer(byte_level()).chat([])


def test_added_tokens_that_are_not_special_stay_in_the_text():
    """Tool and thinking marks are text to the client."""
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("<think>x<|end|>")) == "<think>x"
