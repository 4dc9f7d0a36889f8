"""huggingface_hub's InferenceClient against the server at sys.argv[1], and what it read as JSON."""

import asyncio
import io
import json
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

base, (width, height) = sys.argv[1], map(int, sys.argv[2].split("x"))
size = {"width": width, "height": height}
said: dict[str, object] = {}
for name, client in {
    "url": InferenceClient(model=f"{base}/hf"),
    "root": InferenceClient(base_url=base),
    "token": InferenceClient(model=f"{base}/hf", token="none"),
}.items():
    image = client.text_to_image(
        "a red apple", negative_prompt="blurry", num_inference_steps=3, guidance_scale=2.5, seed=5, **size
    )
    said[name] = image.size
out = io.BytesIO()
image.save(out, "PNG")
said["image to image"] = client.image_to_image(out.getvalue(), prompt="a green apple", strength=0.6).size
try:
    InferenceClient(model=f"{base}/models/none").text_to_image("x")
except HfHubHTTPError as error:
    said["error"] = error.response.status_code
said["async"] = asyncio.run(AsyncInferenceClient(model=f"{base}/hf").text_to_image("x", seed=1, **size)).size
print(json.dumps(said))
