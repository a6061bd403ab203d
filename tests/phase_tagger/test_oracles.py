"""Others' word on the same tokens: hand-written renderers, the harmony parser, the engine's parsers, recorded ids."""

from __future__ import annotations

import importlib
import json
import re
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentkv_serve.phase_tagger import (
    ChatFormat,
    Label,
    Options,
    TemplateError,
    Vocabulary,
    build_automaton,
    label_text,
    render_appended,
    render_prompt,
)
from agentkv_serve.phase_tagger.labels import labels_of

from .packages import oracles, templates, training_template, vocabulary
from .transcripts import Transcript, load, names

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

TRANSCRIPTS = [t for name in names() for t in load(name) if t.dialect is None]
TRANSCRIPTS = [t for t in TRANSCRIPTS if not t.name.startswith("20_") or t.name.endswith("0")]
GLM_CONTROL = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
ROLE_LABELS = {
    "system": {Label.INPUT},
    "user": {Label.INPUT},
    "tool": {Label.TOOL},
    "assistant": {Label.THINK, Label.ACT, Label.SAY},
}


@pytest.fixture(scope="module")
def package() -> Any:
    """Imports a module of the oracle packages."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(oracles()))
    patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(oracles()))
    yield importlib.import_module
    patch.undo()


def plain_messages(transcript: Transcript) -> list[dict[str, Any]]:
    """The transcript as every oracle takes it: texts as strings, arguments as objects."""
    found = []
    for message in transcript.messages:
        content = message.get("content") or ""
        copy: dict[str, Any] = {"role": message["role"]}
        copy["content"] = content if isinstance(content, str) else " ".join(p.get("text", "") for p in content)
        if message.get("tool_calls"):
            copy["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
        if message["role"] == "tool":
            copy["tool_call_id"] = message.get("tool_call_id")
        found.append(copy)
    return found


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": call.get("id"), "type": "function", "function": {**call["function"], "arguments": arguments}}


def glm_vocabulary() -> Vocabulary:
    """GLM's control tokens on another model's pieces: its own vocabulary is in no package."""
    tokenizer = Tokenizer.from_str(vocabulary("qwen3").tokenizer.to_str())
    tokenizer.add_special_tokens(list(GLM_CONTROL))
    return Vocabulary(tokenizer)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("qwen3_training", "qwen3"),
        ("qwen2_5_training", "qwen2.5"),
        ("qwen3_instruct_2507_training", "qwen3"),
        ("qwen3_6_training", "qwen3.6"),
        ("nemotron_3_super_training", "qwen3"),
        ("llama3_training", "llama3_1"),
        ("gptoss_training", "gptoss"),
    ],
)
def test_assistant_masks_of_training_templates(template: str, words: str) -> None:
    """Hugging Face's mask of the assistant's own tokens, from templates that mark what the model generates."""
    from transformers import PreTrainedTokenizerFast

    source = training_template(template)
    chat = ChatFormat(vocabulary(words), source, tokens={"bos_token": ""}, tools_template="model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chat.vocabulary.tokenizer, chat_template=source)
    tokenizer.bos_token = None
    checked = 0
    for transcript in TRANSCRIPTS:
        messages = plain_messages(transcript)
        if any(len(message.get("tool_calls", [])) > 1 for message in messages):
            continue
        options = Options(add_generation_prompt=False)
        try:
            ours = render_prompt(chat, messages, transcript.tools, options=options)
            theirs = tokenizer.apply_chat_template(
                messages, tools=transcript.tools, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception:  # the template refuses the transcript, in either place
            continue
        if ours.ids != theirs["input_ids"]:
            continue
        for label, generated in zip(labels_of(ours.runs), theirs["assistant_masks"], strict=True):
            checked += 1
            if generated:
                assert label not in (Label.INPUT, Label.TOOL), transcript.name
            else:
                assert label in (Label.INPUT, Label.TOOL, Label.GLUE), transcript.name
    assert checked > 20_000


@pytest.mark.parametrize(
    ("module", "name", "template"),
    [("renderers.qwen3", "Qwen3Renderer", "trl/qwen3"), ("renderers.glm45", "GLM45Renderer", "trl/glm4moe")],
)
def test_hand_written_renderers(package: Any, module: str, name: str, template: str) -> None:
    """The same ids, and every token's label fits the message that the renderer says it is of."""
    from transformers import PreTrainedTokenizerFast

    words = vocabulary("qwen3") if "qwen3" in template else glm_vocabulary()
    renderer = getattr(package(module), name)(PreTrainedTokenizerFast(tokenizer_object=words.tokenizer))
    chat = ChatFormat(words, templates()[template])
    same, tokens = 0, 0
    for transcript in TRANSCRIPTS:
        messages = plain_messages(transcript)
        theirs = renderer.render(messages, tools=transcript.tools, add_generation_prompt=True)
        ours = render_prompt(chat, messages, transcript.tools)
        if ours.ids != theirs.token_ids:
            continue  # the renderer prints something of this transcript differently
        same += 1
        for label, index, content in zip(labels_of(ours.runs), theirs.message_indices, theirs.is_content, strict=True):
            tokens += 1
            if content:
                wanted = ROLE_LABELS[messages[index]["role"]] | {Label.GLUE}
                assert label in wanted, (transcript.name, index, label)
            elif label in (Label.THINK, Label.ACT, Label.SAY):
                assert index >= 0 and messages[index]["role"] == "assistant", (transcript.name, index, label)
            elif label is Label.TOOL:
                assert index >= 0 and messages[index]["role"] == "tool", (transcript.name, index, label)
    assert same >= 0.8 * len(TRANSCRIPTS) and tokens > 50_000


def test_harmony_renderer_agrees_on_every_result(package: Any) -> None:
    """gpt-oss: the renderer spells headers in another order, so texts and their order are compared."""
    from transformers import PreTrainedTokenizerFast

    words = vocabulary("gptoss")
    renderer = package("renderers.gpt_oss").GptOssRenderer(PreTrainedTokenizerFast(tokenizer_object=words.tokenizer))
    chat = ChatFormat(words, templates()["trl/gptoss"])
    checked = 0
    for transcript in TRANSCRIPTS:
        messages = plain_messages(transcript)
        if any(len(message.get("tool_calls", [])) > 1 for message in messages):
            continue  # the template prints the first call only
        try:
            ours = render_prompt(chat, messages, transcript.tools)
        except TemplateError:
            continue
        theirs = renderer.render(messages, tools=transcript.tools)
        for part in ours.parts:
            if part.part != "result":
                continue
            ids = [t for t, i in zip(theirs.token_ids, theirs.message_indices, strict=True) if i == part.message]
            text = messages[part.message]["content"].strip()
            run = next(run for run in ours.runs if run[0] <= part.start < run[1])
            mine = words.decode(ours.ids[run[0] : run[1]])
            assert text in words.decode(ids) and json.dumps(text, ensure_ascii=False)[1:-1] in mine
            checked += 1
    assert checked > 200


def test_harmony_parser_agrees_on_every_token(package: Any) -> None:
    """openai-harmony's streaming parser: the channel and recipient of every sampled token."""
    harmony = package("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    words = vocabulary("gptoss")
    automaton = build_automaton("gpt-oss", words)
    turns = []
    for name in names():
        if "harmony" in name and "simple" not in name:
            text = next(iter(_files(name)))
            turns += text.split("<|start|>assistant")[1:] or [text]  # each up to the next role
    turns += [_harmony_turn(transcript) for transcript in TRANSCRIPTS]
    turns = [
        re.split("(?<=<[|]call[|]>)|<[|]start[|]>(?!assistant)", turn)[0] for turn in turns if "<|message|>" in turn
    ]
    assert len(turns) > 40
    for turn in turns:
        ids = encoding.encode(turn, allowed_special="all")
        parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
        expected = []
        for number in ids:
            was_body = parser.state == harmony.StreamState.CONTENT
            parser.process(number)
            body = was_body and parser.state == harmony.StreamState.CONTENT
            label = Label.GLUE
            if body and parser.current_role == harmony.Role.ASSISTANT:
                label = Label.THINK if parser.current_channel == "analysis" else Label.SAY
                label = Label.ACT if parser.current_recipient else label
            expected.append(label)
        done = next((i for i, n in enumerate(ids) if words.added.get(n) in ("<|call|>", "<|return|>")), len(ids))
        found, _ = automaton.run(automaton.initial["start"], ids)
        assert found[:done] == expected[:done], turn[:200]


def _files(name: str) -> list[str]:
    from .transcripts import HERE, SHARED

    return [(folder / name).read_text("utf-8") for folder in (HERE, SHARED) if (folder / name).is_file()]


def _harmony_turn(transcript: Transcript) -> str:
    """The assistant's messages of a transcript as one sampled turn of channel messages."""
    parts = []
    for message in transcript.messages:
        if message["role"] == "assistant":
            content = message.get("content")
            text = content if isinstance(content, str) else ""
            parts.append(f"<|channel|>analysis<|message|>About: {text[:200]}")
            for call in message.get("tool_calls") or []:
                body = call["function"]["arguments"]
                name = call["function"]["name"]
                body = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
                parts.append(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}")
            parts.append(f"<|channel|>final<|message|>{text}")
    return "<|end|><|start|>assistant".join(parts) + "<|return|>"


CALL = '{"name": "get_weather", "arguments": {"city": "Paris 漢字 {", "days": 3}}'
XML = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
INVOKE = '<invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'
PARSED = [
    # family, tool parser, text before the calls, calls, text after them
    ("qwen2.5", "qwen25", "Let me see.\n", f"<tool_call>\n{CALL}\n</tool_call>", ""),
    ("qwen2.5", "qwen25", "", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", ""),
    ("smollm2", "qwen25", "Sure. ", f"<tool_call>\n{CALL}\n</tool_call>", ""),
    ("hermes", "hermes", "Now.\n", f"<tool_call>\n{CALL}\n</tool_call>", ""),
    ("qwen3-coder", "qwen3_coder", "Look.\n", f"<tool_call>\n{XML}\n</tool_call>", ""),
    ("qwen3.5", "qwen3_coder", "Look.\n", f"<tool_call>\n{XML}\n</tool_call>", ""),
    ("llama3", "llama3", "", '{"name": "get_weather", "parameters": {"city": "Paris"}}', ""),
    ("llama3", "llama3", "", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', ""),
    ("mistral", "mistral", "", f"[TOOL_CALLS] [{CALL}]", ""),
    ("kimi-k2", "kimi_k2", "Look. ", SECTION, ""),
    (
        "glm4",
        "glm45",
        "Look.\n",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "",
    ),
    ("minimax-m2", "minimax-m2", "Look.\n", f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>", ""),
    ("lfm2", "lfm2", "Look.", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>', ""),
    (
        "deepseek-r1",
        "deepseekv3",
        "Look.",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    (
        "deepseek-v3.1",
        "deepseekv31",
        "Look.",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    (
        "deepseek-v3.2",
        "deepseekv32",
        "Look.",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
    ),
]


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    return importlib.import_module("sglang.srt.function_call.function_call_parser")


@pytest.mark.parametrize(("family", "parser", "before", "calls", "after"), PARSED)
def test_engine_tool_parsers(engine: ModuleType, family: str, parser: str, before: str, calls: str, after: str) -> None:
    """What we call act is what SGLang's parser takes as calls; what we call say is what it leaves as text."""
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    function = protocol.Function(name="get_weather", parameters=parameters)
    tool = protocol.Tool(type="function", function=function)
    pieces = label_text(family, before + calls + after)
    act = "".join(text for text, label in pieces if label is Label.ACT)
    say = "".join(text for text, label in pieces if label is Label.SAY)
    text, found = engine.FunctionCallParser([tool], parser).parse_non_stream(before + calls + after)
    _, from_act = engine.FunctionCallParser([tool], parser).parse_non_stream(act)
    assert found and [(c.name, c.parameters) for c in from_act] == [(c.name, c.parameters) for c in found]
    assert say.strip() == text.strip()


REASONED = [
    ("qwen3", "qwen3", "<think>\nLet me 漢字 think </tool_call>.\n</think>\n\nHello there.", "start"),
    ("qwen3", "qwen3", "<think>\nShort\n<tool_call>\n{}\n</tool_call>", "start"),
    ("deepseek-r1", "deepseek-r1", "Let me think.\n</think>\n\nHello </think> there.", "think"),
    ("glm4", "glm45", "<think>Hm.</think>\nHello.", "start"),
    ("deepseek-r1", "deepseek-r1", "Never closed, so all of it is thinking", "think"),
    ("qwen3", "qwen3", "No thinking at all.", "say"),
]


@pytest.mark.parametrize(("family", "parser", "text", "initial"), REASONED)
def test_engine_reasoning_parsers(engine: ModuleType, family: str, parser: str, text: str, initial: str) -> None:
    """What we call think, without its markers, is what SGLang's parser returns as reasoning."""
    reasoning = importlib.import_module("sglang.srt.parser.reasoning_parser")
    pieces = label_text(family, text, initial)
    think = "".join(piece for piece, label in pieces if label is Label.THINK)
    rest = "".join(piece for piece, label in pieces if label is not Label.THINK)
    detector = reasoning.ReasoningParser(parser, force_reasoning=True if initial == "think" else None)
    thought, normal = detector.parse_non_stream(text)
    assert think.strip().removeprefix("<think>").removesuffix("</think>").strip() == (thought or "").strip()
    assert rest.strip() == (normal or "").strip()


class TestRecordedTurns:
    """Three turns of Qwen2.5-Coder in unmodified SGLang, with the ids of prompts and replies."""

    def test_first_prompt_and_replies(self) -> None:
        [turns] = load("18_sglang_live_turns_with_token_ids.json")
        chat = ChatFormat(vocabulary("qwen2.5"), templates()["trl/qwen2_5"])
        recorded = turns.extra["turns"]
        tools = [tool | {"defer_loading": None} for tool in turns.tools or []]  # a field that the engine adds
        ours = render_prompt(chat, turns.messages[:2], tools)
        assert ours.ids == recorded[0]["prompt_token_ids"]
        automaton = chat.automaton()
        for turn in recorded[:2]:
            ids = turn["response_token_ids"]
            labels, _ = automaton.run(automaton.initial["act"], ids)  # calls were forced
            assert set(labels[:-1]) == {Label.ACT} and labels[-1] is Label.GLUE
            # The forced `<tool_call>` is spelled in plain pieces: known as a call once it is complete.
            labels, _ = automaton.run(automaton.initial["start"], ids)
            opener = len(chat.vocabulary.encode("<tool_call")[0]) if ids[0] != 151657 else 0
            assert set(labels[:opener]) <= {Label.SAY} and set(labels[opener:-1]) == {Label.ACT}
        ids = recorded[2]["response_token_ids"]  # a bare JSON text that the engine's parser did not take as a call
        assert set(automaton.run(automaton.initial["start"], ids)[0]) == {Label.SAY, Label.GLUE}

    def test_a_ledger_says_what_the_engine_rendered_again(self) -> None:
        """Kept ids plus the appended segment are the engine's second prompt, but for spaces in the JSON."""
        [turns] = load("18_sglang_live_turns_with_token_ids.json")
        chat = ChatFormat(vocabulary("qwen2.5"), templates()["trl/qwen2_5"])
        first, second, _ = turns.extra["turns"]
        ledger = first["prompt_token_ids"] + first["response_token_ids"]
        added = render_appended(
            chat, turns.messages[:5], 3, turns.tools, options=Options(), last_id=ledger[-1], offset=len(ledger)
        )
        ours = chat.vocabulary.decode(ledger + added.ids)
        theirs = chat.vocabulary.decode(second["prompt_token_ids"])
        assert ours != theirs and ours.replace(" ", "") == theirs.replace(" ", "")
        assert len(ledger) > second["prefix_kept"]
