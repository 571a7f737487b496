"""What the tests of this kind try: vocabularies around the widths of the inner loops, and options alone and together."""

from __future__ import annotations

from mpk.tasks.sample.options import TokenOptions

VOCABULARIES = (1, 15, 64, 1000, 49152)

OPTIONS = (
    TokenOptions(),
    TokenOptions(repetition_penalty=1.3),
    TokenOptions(presence_penalty=0.7, frequency_penalty=0.4),
    TokenOptions(temperature=1.0),
    TokenOptions(temperature=0.7, top_k=5),
    TokenOptions(temperature=1.5, top_p=0.8),
    TokenOptions(temperature=1.0, min_p=0.05),
    TokenOptions(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.2),
)
