// The npm package openai against the server at argv[2], and what it read as JSON.
import OpenAI, { toFile } from "openai";

const [base, size] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const beginning = (text) => Buffer.from(text, "base64").subarray(0, 4).toString("hex");
const said = {};

const images = await client.images.generate({ prompt: "a red apple", n: 2, size, seed: 7, num_inference_steps: 3 });
said.images = images.data.map((image) => beginning(image.b64_json));
said.seeds = images.data.map((image) => image.seed);

const kinds = [];
for await (const event of await client.images.generate({ prompt: "a red apple", size, stream: true, partial_images: 3 }))
  kinds.push([event.type, beginning(event.b64_json)]);
said.partial = kinds.some(([type]) => type === "image_generation.partial_image");
said.completed = kinds.filter(([type]) => type === "image_generation.completed").map(([, first]) => first);

const apple = await toFile(Buffer.from(images.data[0].b64_json, "base64"), "a.png", { type: "image/png" });
said.edit = beginning((await client.images.edit({ image: apple, prompt: "a green apple" })).data[0].b64_json);
said.models = (await client.models.list()).data.map((model) => model.id);
try {
  await client.images.generate({ prompt: "", size });
} catch (error) {
  said.error = [error.constructor.name, error.status, error.param, Boolean(error.requestID)];
}
console.log(JSON.stringify(said));
