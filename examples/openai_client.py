"""Talk to a running server with the ``openai`` client: ``make serve``, then run this.

Asks the same long prompt twice; the second answer reads most of it from the prefix cache.
"""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
story = "The harbour was quiet, and the boats lay still on the water. " * 20

for attempt in (1, 2):
    answer = client.completions.create(model=model, prompt=story, max_tokens=16, temperature=0)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"attempt {attempt}: {usage.prompt_tokens} prompt tokens, {cached} from the cache")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me about the sea."}],
    max_tokens=24,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
