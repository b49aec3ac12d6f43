// What programs in JavaScript do: node openai_node.mjs FOLDER URL, where FOLDER/node_modules has the package openai.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, url] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const model = "pagelet";
const messages = [{ role: "user", content: "What is a block table?" }];

const chat = await client.chat.completions.create({ model, messages, temperature: 0 });
const text = chat.choices[0].message.content;
assert.ok(text.length > 0);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);

const several = await client.chat.completions.create({
  model, messages, n: 3, seed: 1, logprobs: true, top_logprobs: 2, max_completion_tokens: 8, stop: ["\n\n"],
});
assert.equal(several.choices.length, 3);
assert.equal(several.choices[0].logprobs.content[0].top_logprobs.length, 2);

const completion = await client.completions.create({ model, prompt: "def f(", echo: true, logprobs: 1, max_tokens: 0 });
assert.equal(completion.choices[0].text, "def f(");
assert.equal(completion.choices[0].logprobs.token_logprobs[0], null);

const response = await client.responses.create({ model, input: messages[0].content, temperature: 0 });
assert.equal(response.output_text, text);
let deltas = "";
const events = await client.responses.create({ model, input: messages, temperature: 0, stream: true });
for await (const event of events) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
  if (event.type === "response.completed") assert.equal(event.response.output[0].content[0].text, text);
}
assert.equal(deltas, text);

assert.equal((await client.models.retrieve(model)).id, model);
await assert.rejects(client.models.retrieve("org/other"), { status: 404, code: "model_not_found" });
await assert.rejects(
  client.completions.create({ model, prompt: "a ".repeat(600) }),
  { status: 400, code: "context_length_exceeded" },
);
await assert.rejects(client.chat.completions.create({ model, messages, n: 0 }), { status: 400, param: "n" });
await assert.rejects(
  client.completions.create({ model, prompt: "a", max_tokens: 500, ignore_eos: true }, { timeout: 50 }),
  OpenAI.APIConnectionTimeoutError,
);
console.log(text);
