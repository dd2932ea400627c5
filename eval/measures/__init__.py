"""The studies by name. Their code is fingerprinted as a whole: results know what they were measured with."""

from __future__ import annotations

from .base import Study
from .compare import Compare
from .gsm8k import GSM8KStudy
from .needle import Needle
from .text_quality import LongContext, Perplexity

STUDIES: dict[str, type[Study]] = {study.kind: study for study in (Perplexity, GSM8KStudy, Needle, LongContext, Compare)}
