"""langchain-community's wrapper of DALL-E against the server at sys.argv[1], and what it read as JSON."""

import json
import sys
import warnings

from langchain_community.utilities.dalle_image_generator import DallEAPIWrapper

warnings.simplefilter("ignore")
base, size = sys.argv[1], sys.argv[2]
# It joins URLs, and asks for none: the name dall-e-2, which it sends, means them.
wrapper = DallEAPIWrapper(base_url=f"{base}/v1", api_key="none", n=2, size=size)
print(json.dumps({"urls": [url[:22] for url in wrapper.run("a red apple").split(wrapper.separator)]}))
