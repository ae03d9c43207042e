"""Every job of the memory benchmark on the CPU, by name. Knows no measurement."""

from __future__ import annotations

from memory.job import Job
from memory.zoo_language import LANGUAGE
from memory.zoo_media import MEDIA
from memory.zoo_mixed import MIXED
from memory.zoo_vision import VISION

JOBS: dict[str, Job] = {job.name: job for job in (*LANGUAGE, *MEDIA, *VISION, *MIXED)}
