"""Whisper's tokens that are no text: what begins a transcript, tasks, timestamps, and languages by all their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from specbeam.errors import SpecbeamError, wrong_value
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import token_ids
from specbeam.options.names import nearest_name

_TABLE = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian, bg bulgarian, bn bengali,
bo tibetan, br breton, bs bosnian, ca catalan, ca valencian, cs czech, cy welsh, da danish, de german, el greek,
en english, es castilian, es spanish, et estonian, eu basque, fa persian, fi finnish, fo faroese, fr french,
gl galician, gu gujarati, ha hausa, haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian, ht haitian creole,
hu hungarian, hy armenian, id indonesian, is icelandic, it italian, ja japanese, jw javanese, ka georgian, kk kazakh,
km khmer, kn kannada, ko korean, la latin, lb letzeburgesch, lb luxembourgish, ln lingala, lo lao, lt lithuanian,
lv latvian, mg malagasy, mi maori, mk macedonian, ml malayalam, mn mongolian, mr marathi, ms malay, mt maltese,
my burmese, my myanmar, ne nepali, nl dutch, nl flemish, nn nynorsk, no norwegian, oc occitan, pa panjabi, pa punjabi,
pl polish, ps pashto, ps pushto, pt portuguese, ro moldavian, ro moldovan, ro romanian, ru russian, sa sanskrit,
sd sindhi, si sinhala, si sinhalese, sk slovak, sl slovenian, sn shona, so somali, sq albanian, sr serbian,
su sundanese, sv swedish, sw swahili, ta tamil, te telugu, tg tajik, th thai, tk turkmen, tl tagalog, tr turkish,
tt tatar, uk ukrainian, ur urdu, uz uzbek, vi vietnamese, yi yiddish, yo yoruba, yue cantonese, zh chinese,
zh mandarin
"""
_ROWS = (row.strip().partition(" ") for row in _TABLE.split(","))
CODES = {name: code for code, _, name in _ROWS}
"""Codes of languages by their names, as openai-whisper has them. Some languages have several."""
CODE = re.compile("[a-z]{2,3}")
TAG = re.compile("([a-z]{2,3})([-_][a-z0-9]{1,8})+")
"""A language tag (BCP 47) begins with the code, before a script or a region: zh-cn, en-US, pt_BR."""
DETECTED = ("", "auto")
"""Clients send them to ask for the likeliest language."""
TASKS = ("transcribe", "translate")
MULTILINGUAL = 51_865
"""Tokens of the smallest multilingual vocabulary. English-only models have one less, and large-v3 one more."""
LANGUAGE = re.compile(rf"<\|({CODE.pattern})\|>")
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""The names of one token, which was renamed."""
SYMBOLS = tuple('"#()*+/:;<=>@[\\]^_`{|}~「」『』')
SEQUENCES = (
    "<<",
    ">>",
    "<<<",
    ">>>",
    "--",
    "---",
    "-(",
    "-[",
    "('",
    '("',
    "((",
    "))",
    "(((",
    ")))",
    "[[",
    "]]",
    "{{",
    "}}",
)
NOTES = "♩♪♫♬♭♮♯"
"""They may be several tokens each. The first is then one that all of these symbols begin with."""


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens of a Whisper model, by their ids. Their order differs between its vocabularies.

    Attributes:
        start: begins a transcript.
        previous: begins the text before it.
        end: ends a text. Tokens below it are text.
        no_speech: its probability after ``start`` says that nobody speaks.
        no_timestamps: asks for a text without timestamps.
        timestamps: they stand for 0, 0.02, ... seconds.
        tasks, languages: by their names; empty for an English-only model.
    """

    lm: LanguageModel
    start: int
    previous: int
    end: int
    no_speech: int
    no_timestamps: int
    timestamps: range
    tasks: dict[str, int]
    languages: dict[str, int]

    @classmethod
    def of(cls, lm: LanguageModel) -> Vocabulary:
        """The special tokens of a model."""
        shape = lm.backend.features_shape
        if shape is None:
            raise SpecbeamError(f"{lm.source} reads no sound: give a Whisper model")
        if lm.tokenizer is None:
            raise SpecbeamError(
                f"{lm.source} has no tokenizer, which transcripts need: put its tokenizer.json beside it"
            )
        special_tokens = _special_tokens(lm)

        def special(*names: str) -> int:
            for name in names:
                if name in special_tokens:
                    return int(special_tokens[name])
            raise SpecbeamError(f"the tokenizer of {lm.source} has no {names[0]}: give a Whisper model")

        no_timestamps = special("<|notimestamps|>")
        is_multilingual = lm.backend.vocab_size >= MULTILINGUAL
        languages = {m[1]: token for name, token in special_tokens.items() if (m := LANGUAGE.fullmatch(name))}
        return cls(
            lm=lm,
            start=special("<|startoftranscript|>"),
            previous=special("<|startofprev|>"),
            end=special("<|endoftext|>"),
            no_speech=special(*NO_SPEECH),
            no_timestamps=no_timestamps,
            timestamps=range(no_timestamps + 1, min(no_timestamps + 2 + shape[1] // 2, lm.backend.vocab_size)),
            tasks={task: special(f"<|{task}|>") for task in TASKS} if is_multilingual else {},
            languages=dict(sorted(languages.items(), key=lambda pair: pair[1])) if is_multilingual else {},
        )

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    def encode(self, text: str, what: str) -> list[int]:
        """The tokens of a text as it follows other text."""
        ids = token_ids(self.lm.tokenizer, " " + text.strip())
        for token in ids:
            if token >= self.end:
                raise SpecbeamError(f"{what} has the special token {self.lm.decode_token([token])!r}: give plain text")
        return ids

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without timestamps."""
        return self.lm.decode([token for token in tokens if token < self.end])

    def suppressed(self, asked: tuple[int, ...]) -> list[int]:
        """The tokens that may never follow. -1 stands for symbols that nobody speaks, and special tokens are added."""
        tokens = [token for token in asked if token >= 0] + ([*self.non_speech] if -1 in asked else [])
        return sorted({*tokens, self.start, self.previous, self.no_speech, *self._control_tokens})

    @cached_property
    def _control_tokens(self) -> set[int]:
        """The tokens of tasks, and the one that Whisper does not use: in English-only vocabularies, too."""
        ids = _special_tokens(self.lm)
        return {ids[name] for name in ("<|translate|>", "<|transcribe|>", "<|startoflm|>") if name in ids}

    @cached_property
    def non_speech(self) -> frozenset[int]:
        """Symbols that mark speakers or sounds, as openai-whisper has them. Marks within words stay possible."""
        symbols = {self._ids(" -")[0], self._ids(" '")[0]}
        for symbol in (*SYMBOLS, *SEQUENCES, *NOTES, "♪♪", "♪♪♪"):
            for ids in (self._ids(symbol), self._ids(" " + symbol)):
                if len(ids) == 1 or symbol in NOTES:
                    symbols.add(ids[0])
        return frozenset(symbols)

    @cached_property
    def blank(self) -> list[int]:
        """A space and the end, which may not begin a text."""
        return [*self._ids(" "), self.end]

    def _ids(self, text: str) -> list[int]:
        return token_ids(self.lm.tokenizer, text)


def _special_tokens(lm: LanguageModel) -> dict[str, int]:
    """The ids of the tokens that a tokenizer reads as a whole, by their texts."""
    return {token.content: int(number) for number, token in lm.tokenizer.added_tokens_decoder.items()}


def code_of(language: str) -> str | None:
    """The code of a language by its name, its code or its tag, in any case; None for the likeliest.

    Raises:
        SpecbeamError: it is none of them. Whether a model knows a code is not asked here.
    """
    name = language.strip().lower()
    if name in DETECTED:
        return None
    if tag := TAG.fullmatch(name):
        name = tag[1]
    if CODE.fullmatch(code := CODES.get(name, name)):
        return code
    near = nearest_name(name, [*CODES])
    hint = f"did you mean {near!r}?" if near else "give a code or an English name, such as 'de' or 'german'"
    raise wrong_value("language", language, f"is not known: {hint}")
