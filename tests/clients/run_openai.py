"""openai-python against the server at sys.argv[1], and what it read as JSON."""

import asyncio
import base64
import io
import json
import sys
import warnings

import openai

warnings.simplefilter("ignore")  # create_variation is deprecated
base, size = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
said: dict[str, object] = {"version": openai.__version__}


def beginning(text: str | None) -> str:
    return base64.b64decode(text or "")[:4].hex()


images = client.images.generate(
    prompt="a red apple", n=2, size=size, model="gpt-image-2",
    extra_body={"seed": 7, "num_inference_steps": 3, "negative_prompt": "blurry"},
)  # fmt: skip
assert images.data
said["images"] = [beginning(image.b64_json) for image in images.data]
said["seeds"] = [(image.model_extra or {})["seed"] for image in images.data]
said["created"] = isinstance(images.created, int)
said["again"] = client.images.generate(
    prompt="a red apple", n=1, size=size, extra_body={"seed": 8, "num_inference_steps": 3, "negative_prompt": "blurry"}
).data[0].b64_json == images.data[1].b64_json  # fmt: skip
said["url"] = client.images.generate(prompt="x", size=size, response_format="url").data[0].url[:22]
raw = client.images.with_raw_response.generate(prompt="x", size=size)
said["model"] = raw.headers["x-canvax-model"]

stream = client.images.generate(prompt="a red apple", n=2, size=size, stream=True, partial_images=3)
events = list(stream)
said["partial"] = any(event.type == "image_generation.partial_image" for event in events)
said["indices"] = all(event.partial_image_index in range(3) for event in events if "partial" in event.type)
said["completed"] = [beginning(event.b64_json) for event in events if event.type == "image_generation.completed"]
said["usage"] = events[-1].usage.total_tokens

apple = base64.b64decode(images.data[0].b64_json or "")
edited = client.images.edit(image=("a.png", apple), prompt="a green apple", extra_body={"strength": 0.6})
said["edit"] = beginning(edited.data[0].b64_json)
edited = client.images.edit(image=[io.BytesIO(apple)], prompt="a green apple", size=size)
said["edit of a list"] = beginning(edited.data[0].b64_json)
edited = client.images.edit(image=("a.png", apple), prompt="a cat", extra_body={"options": {"quality": "fast"}})
said["quality of an edit with options"] = edited.quality
kinds = [event.type for event in client.images.edit(image=("a.png", apple), prompt="a green apple", stream=True)]
said["edit in a stream"] = kinds[-1]

said["models"] = [model.id for model in client.models.list()]
said["one model"] = client.models.retrieve(said["models"][0]).object
errors: dict[str, list[object]] = {}
for name, call in {
    "prompt": lambda: client.images.generate(prompt="", size=size),
    "variation": lambda: client.images.create_variation(image=("a.png", apple)),
    "size": lambda: client.images.generate(prompt="x", size="large"),
}.items():
    try:
        call()
    except openai.APIStatusError as error:
        errors[name] = [type(error).__name__, error.param, error.code, bool(error.request_id)]
said["errors"] = errors


async def at_once() -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none") as several:
        calls = [several.images.generate(prompt="x", size=size, extra_body={"seed": i}) for i in range(4)]
        return [beginning(answer.data[0].b64_json) for answer in await asyncio.gather(*calls)]


said["at once"] = asyncio.run(at_once())
print(json.dumps(said))
