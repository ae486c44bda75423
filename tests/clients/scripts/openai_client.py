"""OpenAI's own client, as in its readme; OPENAI_BASE_URL says where."""

import asyncio

import openai

client = openai.OpenAI()
HELLO = [{"role": "user", "content": "hello there"}]
SETTINGS = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}

print([model.id for model in client.models.list()], client.models.retrieve("tiny").id)
answer = client.chat.completions.create(**SETTINGS, logprobs=True, top_logprobs=2)
print(answer.choices[0].message.content, answer.usage)

parts = [{"type": "text", "text": "hello"}]
history = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
history += [{"role": "assistant", "content": "yes"}, *HELLO]
print(client.chat.completions.create(**SETTINGS | {"messages": history}, user="me").choices[0].message.content)

stream = client.chat.completions.create(**SETTINGS, stream=True, stream_options={"include_usage": True})
print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
with client.chat.completions.stream(**SETTINGS | {"stop": ["zz"]}, seed=4) as events:
    print("".join(event.delta for event in events if event.type == "content.delta"))

expected = {"type": "content", "content": "hello there, and more"}
print(client.chat.completions.create(**SETTINGS, prediction=expected).usage.completion_tokens_details)
sampled = SETTINGS | {"temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 2, "stop": ["zz"]}
print([choice.message.content for choice in client.chat.completions.create(**sampled).choices])
print(client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=4, temperature=0, echo=True, logprobs=1))

try:
    client.chat.completions.create(**SETTINGS, response_format={"type": "json_object"})
except openai.BadRequestError as error:
    print("refused:", error.message)
else:
    raise SystemExit("structured output must be refused")


async def together() -> None:
    """Several requests at once."""
    async with openai.AsyncOpenAI() as many:
        answers = await asyncio.gather(*(many.chat.completions.create(**SETTINGS, seed=seed) for seed in range(4)))
        print({one.choices[0].message.content for one in answers})


asyncio.run(together())
