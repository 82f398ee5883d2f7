// OpenAI's SDK for Node against a running mesh, by Node's own test runner: `BASE_URL=http://... node --test openai.test.mjs`.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0, timeout: 240_000 });
const models = (await client.models.list()).data.map((each) => each.id);
const model = models[0];
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Tells how warm it is in a city.",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 16 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

test("a chat answers", async () => {
  const answer = await client.chat.completions.create(asked);
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a streamed chat says the same as a whole one, and its usage comes last", async () => {
  const whole = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let last;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
});

test("a stream's helper puts the message together", async () => {
  const stream = client.chat.completions.stream(asked);
  const completion = await stream.finalChatCompletion();
  assert.match(completion.choices[0].message.content, /Paris/);
});

test("a stream that is left ends, and the next request is served", async () => {
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 400, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) break;
  }
  stream.controller.abort();
  assert.match((await client.chat.completions.create(asked)).choices[0].message.content, /Paris/);
});

test("log-probabilities come for every token", async () => {
  const answer = await client.chat.completions.create({ ...asked, max_tokens: 4, logprobs: true, top_logprobs: 2 });
  const told = answer.choices[0].logprobs.content;
  assert.equal(told.map((each) => each.token).join(""), answer.choices[0].message.content);
  assert.ok(told.every((each) => each.logprob <= 0 && each.top_logprobs.length === 2));
});

test("a required tool is called, streamed as well, and its result fed back", async () => {
  const forced = { ...asked, max_tokens: 60, tools: [weather], tool_choice: "required", parallel_tool_calls: false };
  const whole = await client.chat.completions.create(forced);
  const call = whole.choices[0].message.tool_calls[0];
  assert.equal(whole.choices[0].finish_reason, "tool_calls");
  assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  const streamed = await client.chat.completions.stream(forced).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.tool_calls[0].function.name, call.function.name);
  assert.equal(typeof JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments).city, "string");
  const answered = await client.chat.completions.create({
    ...asked,
    tools: [weather],
    messages: [...messages, whole.choices[0].message, { role: "tool", tool_call_id: call.id, content: "21 C" }],
  });
  assert.ok(answered.choices[0].message);
});

test("tools are run until an answer comes", async () => {
  const cities = [];
  const run = (given) => {
    cities.push(given.city);
    return "21 C";
  };
  const runner = client.chat.completions.runTools({
    ...asked,
    max_tokens: 60,
    tools: [{ type: "function", function: { ...weather.function, function: run, parse: JSON.parse } }],
    tool_choice: { type: "function", function: { name: "get_weather" } },
  });
  await runner.done();
  assert.equal(typeof cities[0], "string");
});

test("an answer obeys a schema", async () => {
  const schema = {
    type: "object",
    properties: { name: { type: "string", maxLength: 12 }, kind: { enum: ["city", "country"] } },
    required: ["name", "kind"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.parse({
    ...asked,
    max_tokens: 60,
    response_format: { type: "json_schema", json_schema: { name: "place", strict: true, schema } },
  });
  const parsed = answer.choices[0].message.parsed ?? JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(parsed), ["name", "kind"]);
});

test("a completion goes on, whole and streamed", async () => {
  const begun = { model, prompt: "One, two, three,", temperature: 0, max_tokens: 6 };
  const whole = await client.completions.create(begun);
  let text = "";
  for await (const chunk of await client.completions.create({ ...begun, stream: true })) text += chunk.choices[0]?.text ?? "";
  assert.match(whole.choices[0].text, /four/);
  assert.equal(text, whole.choices[0].text);
});

test("a response is made, streamed, kept and deleted", async () => {
  const made = await client.responses.create({ model, input: messages[0].content, temperature: 0, max_output_tokens: 24 });
  assert.match(made.output_text, /Paris/);
  assert.equal((await client.responses.retrieve(made.id)).output_text, made.output_text);
  const items = await client.responses.inputItems.list(made.id);
  assert.equal(items.data[0].role, "user");
  const types = [];
  const stream = client.responses.stream({ model, input: messages[0].content, temperature: 0, max_output_tokens: 24 });
  for await (const event of stream) types.push(event.type);
  assert.equal(types[0], "response.created");
  assert.equal(types.at(-1), "response.completed");
  assert.equal((await stream.finalResponse()).output_text, made.output_text);
  await client.responses.delete(made.id);
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
});

test("vectors have length one", async () => {
  const embedding = models.find((each) => /MiniLM/i.test(each));
  const made = await client.embeddings.create({ model: embedding, input: ["a cat", "a dog"] });
  assert.deepEqual(made.data.map((each) => each.index), [0, 1]);
  for (const { embedding: vector } of made.data) {
    assert.ok(Math.abs(Math.hypot(...vector) - 1) < 1e-3);
  }
});

test("errors are the SDK's own and name the field", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody" }), OpenAI.NotFoundError);
  const wrong = client.chat.completions.create({ ...asked, temperature: 7 });
  await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  const streamed = client.chat.completions.create({ ...asked, top_p: -1, stream: true });
  await assert.rejects(streamed, (error) => error instanceof OpenAI.BadRequestError && error.param === "top_p");
});

test("models are listed and shown one by one", async () => {
  assert.equal((await client.models.retrieve(model)).id, model);
});
