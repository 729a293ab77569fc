"""What `tools.check_clients` does with langchain-openai: a tool by each of OpenAI's APIs, whole and as a stream.

python tools/langchain_requests.py URL PROMPT
"""

import sys
from functools import reduce
from operator import add

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return f"{path} is empty"


def main(url: str, prompt: str) -> None:
    for is_responses in (False, True):
        model = ChatOpenAI(
            model="brigade", base_url=f"{url}/v1", api_key="none", max_tokens=400, use_responses_api=is_responses
        ).bind_tools([read_file])
        for ask in (model.invoke, lambda messages, model=model: reduce(add, model.stream(messages))):
            messages: list[BaseMessage] = [HumanMessage(prompt)]
            messages.append(ask(messages))
            messages += [read_file.invoke(call) for call in messages[-1].tool_calls]
            assert len(messages) > 2 and not ask(messages).tool_calls


if __name__ == "__main__":
    main(*sys.argv[1:])
