"""Every member of the pipeline's zoo. Knows no stage."""

from __future__ import annotations

from benchmarks.zoo.language import LANGUAGE
from benchmarks.zoo.media import MEDIA
from benchmarks.zoo.member import Member
from benchmarks.zoo.written import WRITTEN

MEMBERS: dict[str, Member] = {member.name: member for member in (*LANGUAGE, *MEDIA, *WRITTEN)}
