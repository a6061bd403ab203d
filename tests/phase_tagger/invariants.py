"""What must hold for the labels of any rendered prompt."""

from __future__ import annotations

from itertools import groupby

from agentkv_serve.phase_tagger import Label
from agentkv_serve.phase_tagger.printer import Printed
from agentkv_serve.phase_tagger.regions import Regions


def faults(printed: Printed, regions: Regions) -> list[str]:
    """Places where the labels of the characters break the rules; empty when all is well."""
    found: list[str] = []
    labels, text = regions.labels.tolist(), printed.text
    spans = {(span.start, span.end): span for span in regions.spans}
    for span in spans.values():
        inside = set(labels[span.start : span.end])
        if inside - {int(span.label)}:
            found.append(f"{span.label.name} field of message {span.message} holds {inside}")
    begin = 0
    for label, group in groupby(labels):
        end = begin + len(list(group))
        inside_run = [s for s in spans.values() if begin <= s.start and s.end <= end and s.end > s.start]
        if label in (Label.THINK, Label.TOOL, Label.ACT):
            owners = {span.message for span in inside_run if span.label == label}
            touching = label == Label.TOOL and len(inside_run) == len(owners) > 1  # `</result><result>`
            if len(owners) != 1 and not touching:
                found.append(f"{Label(label).name} run {text[begin:end][:60]!r} belongs to messages {sorted(owners)}")
        begin = end
    return found
