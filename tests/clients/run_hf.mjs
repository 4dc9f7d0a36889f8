// The npm package @huggingface/inference against the server at argv[2], and what it read as JSON.
import { InferenceClient } from "@huggingface/inference";

const [base, size] = process.argv.slice(2);
const [width, height] = size.split("x").map(Number);
const client = new InferenceClient("hf_none");
const said = {};
const parameters = { width, height, num_inference_steps: 3, seed: 5 };
const blob = await client.textToImage({ endpointUrl: `${base}/hf`, inputs: "a red apple", parameters });
said.image = [blob.type, Buffer.from(await blob.arrayBuffer()).subarray(0, 4).toString("hex")];
const edited = await client.imageToImage({ endpointUrl: `${base}/hf`, inputs: blob, parameters: { prompt: "a lemon" } });
said.edit = Buffer.from(await edited.arrayBuffer()).subarray(0, 4).toString("hex");
try {
  await client.textToImage({ endpointUrl: `${base}/models/none`, inputs: "x" });
} catch (error) {
  said.error = [error.constructor.name, error.message.includes("none")];
}
console.log(JSON.stringify(said));
