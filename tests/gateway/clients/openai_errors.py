"""What the openai SDK makes of refusals. Argument: base URL."""

import json
import sys

import openai


def outcome(call) -> list:
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, bool(error.request_id)]
    except openai.APIError as error:
        return [type(error).__name__, None, error.code, None]
    return ["none", 200, None, None]


def main(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="any", max_retries=2)
    hi = [{"role": "user", "content": "Hi"}]
    create = client.chat.completions.create

    def streamed():
        for _chunk in create(model="tiny", messages=[{"role": "user", "content": "break"}], stream=True):
            pass

    print(
        json.dumps(
            {
                "model": outcome(lambda: create(model="gpt-9", messages=hi)),
                "budget": outcome(lambda: create(model="tiny", messages=hi, extra_headers={"X-AgentKV-Budget": "96"})),
                "n": outcome(lambda: create(model="tiny", messages=hi, n=2, extra_headers={"X-Session-Id": "s"})),
                "long": outcome(lambda: create(model="tiny", messages=[{"role": "user", "content": "x" * 9000}])),
                "stream": outcome(streamed),
                "models": [model.id for model in client.models.list()],
            }
        )
    )


main(*sys.argv[1:])
