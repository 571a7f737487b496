"""What the tests of this kind try: vocabularies around the widths of the inner loops, and options alone and together."""

from __future__ import annotations

from mpk.tasks.sample.reference import SamplingOptions

VOCABULARIES = (1, 15, 64, 1000, 49152)

OPTIONS = (
    SamplingOptions(),
    SamplingOptions(repetition_penalty=1.3),
    SamplingOptions(presence_penalty=0.7, frequency_penalty=0.4),
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=0.7, top_k=5),
    SamplingOptions(temperature=1.5, top_p=0.8),
    SamplingOptions(temperature=1.0, min_p=0.05),
    SamplingOptions(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.2),
)
