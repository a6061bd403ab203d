"""Engine doubles as processes of their own, which can be killed. Arguments: port, model folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

from tests.gateway.engine import Answer, Body, FakeEngine

_USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_TURN = re.compile(r"agent-(\w+) turn-(\d+)")
_ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.DOTALL)


def judge(text: str) -> str:
    """The answer to a prompt of an agent of the chaos test, or what is wrong with the prompt."""
    users = [_TURN.fullmatch(said.strip()) for said in _USER.findall(text)]
    if not users or not all(users):
        return f"VIOLATION: foreign text in {text!r}"
    said = [(match.group(1), int(match.group(2))) for match in users if match]
    agent = said[0][0]
    if said != [(agent, i) for i in range(len(said))]:
        return f"VIOLATION: wrong turns {said}"
    if _ANSWER.findall(text) != [answer(agent, i) for i in range(len(said) - 1)]:
        return f"VIOLATION: wrong answers {_ANSWER.findall(text)}"
    return answer(*said[-1])


def answer(agent: str, turn: int) -> str:
    """What the model says to one turn of an agent."""
    return f"noted {agent} {turn} " + "word " * 8


def main(port: int, folder: Path) -> None:
    """Serve until killed."""
    engine = FakeEngine(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def script(body: Body) -> Answer:
        if engine.control(body) is None:
            return Answer("VIOLATION: a turn without a session")
        return Answer(judge(engine.text(body)), pause=0.02, gap=0.01, pieces=6)

    engine.script = script
    uvicorn.run(engine.app, port=port, log_level="critical", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
