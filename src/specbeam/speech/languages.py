"""Languages by their names, as openai-whisper has them. Whisper's tokens have the codes."""

from __future__ import annotations

import re

from specbeam.errors import wrong_value
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
"""By their names. Some languages have several."""
CODE = re.compile("[a-z]{2,3}")
TAG = re.compile("([a-z]{2,3})([-_][a-z0-9]{1,8})+")
"""A language tag (BCP 47) begins with the code, before a script or a region: zh-cn, en-US, pt_BR."""
DETECTED = ("", "auto")
"""Clients send them to ask for the likeliest language."""


def code_of(language: str) -> str | None:
    """The code of a language that is given by its name, its code or its tag, in any case; None for the likeliest.

    Raises:
        SpecbeamError: it is none of them. Whether a model knows a code is not asked here.
    """
    given = language.strip().lower()
    if given in DETECTED:
        return None
    if tag := TAG.fullmatch(given):
        given = tag[1]
    if CODE.fullmatch(code := CODES.get(given, given)):
        return code
    near = nearest_name(given, [*CODES])
    hint = f"did you mean {near!r}?" if near else "give a code or an English name, such as 'de' or 'german'"
    raise wrong_value("language", language, f"is not known: {hint}")
