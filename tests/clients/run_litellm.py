"""litellm against the server at sys.argv[1], and what it read as JSON."""

import base64
import io
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

base, size = sys.argv[1], sys.argv[2]
to = {"api_base": f"{base}/v1", "api_key": "none"}
said: dict[str, object] = {}
for model in ("openai/mine", "hosted_vllm/mine"):
    answer = litellm.image_generation(model=model, prompt="a red apple", n=2, size=size, seed=7, **to)
    said[model] = [base64.b64decode(image.b64_json)[:4].hex() for image in answer.data]
    said["usage"] = answer.usage.total_tokens
apple = io.BytesIO(base64.b64decode(answer.data[0].b64_json))
apple.name = "a.png"
edited = litellm.image_edit(model="openai/mine", image=apple, prompt="a green apple", **to)
said["edit"] = base64.b64decode(edited.data[0].b64_json)[:4].hex()
try:
    litellm.image_generation(model="openai/mine", prompt="", size=size, **to)
except litellm.BadRequestError as error:
    said["error"] = type(error).__name__
print(json.dumps(said))
