"""Ask a running `canvax serve` for an image and watch it: python examples/server_client.py [URL [PROMPT]]"""

import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7860"
prompt = sys.argv[2] if len(sys.argv) > 2 else "a red apple"

body = json.dumps({"prompt": prompt, "seed": 1, "steps": 20, "previews": True}).encode()
headers = {"Content-Type": "application/json", "Idempotency-Key": f"{prompt}-1"}  # asked twice, it is one job
with urlopen(Request(f"{url}/api/jobs", body, headers)) as answer:
    job = json.load(answer)["id"]

# Server-sent events: a name, a line of JSON, an empty line.
with urlopen(f"{url}/api/jobs/{job}/events") as events:
    for line in events:
        kind, _, value = line.decode().strip().partition(": ")
        if kind == "event":
            event = value
        elif kind == "data" and event == "step":
            step = json.loads(value)
            print(f"step {step['step']} of {step['steps']}")
        elif kind == "data" and event == "done":
            break

with urlopen(f"{url}/api/jobs/{job}/images/0") as image:
    Path("out").mkdir(exist_ok=True)
    Path("out", f"{job}.png").write_bytes(image.read())
print(f"out/{job}.png")
