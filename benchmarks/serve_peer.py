"""The plainest server over PyTorch diffusers, for ``serve_load.py``: FastAPI, one lock, one request after the other.

In the environment of ``make test``, with FastAPI in a folder of its own:

    pip install --target LIBRARIES fastapi
    PYTHONPATH=LIBRARIES python benchmarks/serve_peer.py --model src/canvax/assets/emoji --port 7900

PyTorch takes as many threads as there are processors, as canvax does.
"""

from __future__ import annotations

import argparse
import base64
import io
import threading

import torch
import uvicorn
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
)
from fastapi import FastAPI
from pydantic import BaseModel

SAMPLERS = {
    "DDIM": (DDIMScheduler, {}),
    "Euler a": (EulerAncestralDiscreteScheduler, {}),
    "DPM++ 2M": (DPMSolverMultistepScheduler, {}),
    "UniPC": (UniPCMultistepScheduler, {}),
}


class Generation(BaseModel):
    """A request in the form of OpenAI's API, with the fields that canvax adds."""

    prompt: str
    n: int = 1
    size: str = "256x256"
    seed: int = 0
    steps: int = 20
    guidance_scale: float = 7.5
    sampler: str = "DDIM"


def create(model: str) -> FastAPI:
    """The app."""
    pipe = StableDiffusionPipeline.from_pretrained(model, torch_dtype=torch.float32, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    config, lock, app = dict(pipe.scheduler.config), threading.Lock(), FastAPI()

    @app.get("/ready")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/images/generations")
    def generate(body: Generation) -> dict[str, object]:
        width, height = map(int, body.size.split("x"))
        kind, more = SAMPLERS[body.sampler]
        with lock:
            pipe.scheduler = kind.from_config(config, **more)
            images = pipe(
                body.prompt, num_images_per_prompt=body.n, width=width, height=height, num_inference_steps=body.steps,
                guidance_scale=body.guidance_scale, generator=torch.Generator().manual_seed(body.seed),
            ).images  # fmt: skip
        data = []
        for image in images:
            file = io.BytesIO()
            image.save(file, "PNG")
            data.append({"b64_json": base64.b64encode(file.getvalue()).decode()})
        return {"created": 0, "data": data}

    generate(Generation(prompt="warm up", steps=2))
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=7900)
    arguments = parser.parse_args()
    uvicorn.run(create(arguments.model), host="127.0.0.1", port=arguments.port, log_level="error")
