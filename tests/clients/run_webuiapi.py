"""webuiapi against the server at sys.argv[1], and what it read as JSON."""

import json
import sys
import threading
import time

import webuiapi
from PIL import Image

base, (width, height) = sys.argv[1], map(int, sys.argv[2].split("x"))
api = webuiapi.WebUIApi(baseurl=f"{base}/sdapi/v1", sampler="Euler a", steps=3)
size = {"width": width, "height": height}
said: dict[str, object] = {}
result = api.txt2img(prompt="a (red:1.2) apple", negative_prompt="blurry", seed=1003, batch_size=2, **size)
said["images"] = [image.size for image in result.images]
said["seeds"] = result.info["all_seeds"]
said["text"] = result.images[0].info.get("parameters", "")[:17]
said["ddim"] = api.txt2img(prompt="x", sampler_name="DDIM", scheduler="Karras", **size).info["sampler_name"]
again = api.img2img(images=[result.image], prompt="a green apple", denoising_strength=0.6, **size)
said["img2img"] = again.image.size
mask = Image.new("L", (width, height), 0)
mask.paste(255, (0, 0, width // 2, height))
whole = api.img2img(
    images=[result.image], mask_image=mask, prompt="a lemon", inpaint_full_res=False, inpainting_fill=1, **size
)
said["inpaint"] = whole.image.size
said["info"] = "Seed: 1003" in str(api.png_info(result.image).info)
said["model"] = api.util_get_current_model() == api.util_get_model_names()[0]
api.util_set_model(api.util_get_model_names()[0])
said["lists"] = [
    type(call()).__name__
    for call in (api.get_samplers, api.get_schedulers, api.get_sd_vae, api.get_loras, api.get_embeddings,
                 api.get_upscalers, api.get_cmd_flags, api.get_memory, api.get_scripts, api.get_options,
                 api.get_hypernetworks, api.get_face_restorers, api.get_realesrgan_models, api.get_prompt_styles)
]  # fmt: skip
api.refresh_checkpoints()
api.util_wait_for_ready(check_interval=0.1)

seen = []
long = threading.Thread(target=lambda: seen.append(api.txt2img(prompt="x", steps=120, batch_size=2, **size)))
long.start()
other = webuiapi.WebUIApi(baseurl=f"{base}/sdapi/v1")
end = time.monotonic() + 60
while not (progress := other.get_progress())["current_image"] and time.monotonic() < end:
    time.sleep(0.02)
said["progress"] = 0 < progress["progress"] <= 1 and progress["state"]["job_count"] == 2
other.interrupt()
long.join(60)
said["interrupted"] = len(seen[0].images) < 2
try:
    api.txt2img(prompt="x", sampler_name="Magic", **size)
except RuntimeError as error:
    said["error"] = error.args[0]
print(json.dumps(said))
