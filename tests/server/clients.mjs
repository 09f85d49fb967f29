// OpenAI's client for JavaScript: prints its answers as one JSON object. Run by test_real_clients.py.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const chat = { model, messages, max_tokens: 12, temperature: 0 };
const response = { model, input: messages, max_output_tokens: 12, temperature: 0 };

async function streamed(stream, text) {
  let all = "";
  for await (const part of await stream) all += text(part);
  return all;
}

const made = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
const beams = await client.completions.create({ model, prompt: "The sky is", max_tokens: 6, n: 3, num_beams: 4 });
const tools = [{ type: "function", function: { name: "f" } }];
const refused = await client.chat.completions.create({ ...chat, tools }).catch((error) => error);
console.log(JSON.stringify({
  models: (await client.models.list()).data.map((one) => one.id),
  chat: made.choices[0].message.content,
  logProbs: made.choices[0].logprobs.content.map((entry) => entry.logprob),
  chatStream: await streamed(
    client.chat.completions.create({ ...chat, stream: true }), (chunk) => chunk.choices[0]?.delta.content ?? ""),
  beams: beams.choices.map((choice) => [choice.score, choice.text]),
  response: (await client.responses.create(response)).output_text,
  responseStream: await streamed(
    client.responses.create({ ...response, stream: true }),
    (event) => (event.type === "response.output_text.delta" ? event.delta : "")),
  refusal: [refused instanceof OpenAI.BadRequestError, refused.param],
}));
