"""One table for all checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is None for a figure that has no limit on this machine."""

    check: str
    shape: str
    result: str
    limit: str = ""
    ok: bool | None = None


@dataclass
class Report:
    """Everything that one run found out."""

    device: str
    mode: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(row.ok is not False for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ok": self.ok}

    def as_table(self) -> str:
        """Plain text, one line per check, columns as wide as their content."""
        mark = {True: "ok", False: "FAILED", None: ""}
        lines = [("check", "shape", "result", "limit", "")]
        lines += [(row.check, row.shape, row.result, row.limit, mark[row.ok]) for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        text.insert(1, "-" * max(map(len, text)))
        head = f"{self.device}, " + ", ".join(f"{name} {version}" for name, version in self.versions.items())
        failed = sum(row.ok is False for row in self.rows)
        foot = f"{failed} of {len(self.rows)} checks FAILED" if failed else f"all {len(self.rows)} checks passed"
        return "\n".join([head, self.mode, "", *text, "", foot])
