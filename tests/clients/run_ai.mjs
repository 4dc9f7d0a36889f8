// The AI SDK against the server at argv[2], and what it read as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";

const [base, size] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false; // of its own argument seed, which it leaves out
const generate = ai.generateImage ?? ai.experimental_generateImage;
const provider = createOpenAICompatible({ name: "mine", baseURL: `${base}/v1`, apiKey: "none" });
const model = provider.imageModel("mine");
const said = {};
const { images } = await generate({ model, prompt: "a red apple", n: 3, size, providerOptions: { mine: { seed: 5 } } });
said.images = images.map((image) => [image.mediaType, Buffer.from(image.uint8Array.subarray(0, 4)).toString("hex")]);
try {
  await generate({ model, prompt: "x", size: "7x7", maxRetries: 0, providerOptions: { mine: { steps: -1 } } });
} catch (error) {
  said.error = [error.statusCode, error.message.includes("steps")];
}
console.log(JSON.stringify(said));
