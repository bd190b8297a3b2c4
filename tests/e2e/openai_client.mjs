// What the npm client `openai` gets from a mesh: run by test_api_clients.py, with MESHNET_API and MESHNET_MODEL set.
// Prints the name of each check that passed; the first that fails ends it.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.MESHNET_API, apiKey: "none", maxRetries: 0, timeout: 300_000 });
const model = process.env.MESHNET_MODEL;
const messages = [{ role: "user", content: "Why is the sky blue?" }];
const chat = (more) => client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 12, ...more });
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
    },
  },
};
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["name", "age"],
};

async function streamed(more) {
  const found = { text: "", finish: null, usage: null, calls: [], chunks: 0 };
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true }, ...more })) {
    found.chunks += 1;
    found.usage = chunk.usage ?? found.usage;
    for (const choice of chunk.choices) {
      found.text += choice.delta.content ?? "";
      found.finish = choice.finish_reason ?? found.finish;
      for (const call of choice.delta.tool_calls ?? []) {
        found.calls[call.index] ??= { name: "", arguments: "" };
        found.calls[call.index].name += call.function.name ?? "";
        found.calls[call.index].arguments += call.function.arguments ?? "";
      }
    }
  }
  return found;
}

const checks = {
  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    assert.deepEqual(ids, [model]);
  },
  async "chat, usage"() {
    const answer = await chat();
    assert.ok(answer.choices[0].message.content.length > 0);
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.equal(answer.usage.completion_tokens, 12);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 12);
  },
  async "stream equals whole"() {
    const whole = await chat();
    const found = await streamed();
    assert.equal(found.text, whole.choices[0].message.content);
    assert.equal(found.finish, "length");
    assert.equal(found.usage.completion_tokens, 12);
    assert.ok(found.chunks > 3);
  },
  async tools() {
    const forced = { tools: [weather], tool_choice: "required", parallel_tool_calls: false, max_tokens: 120 };
    const { message, finish_reason } = (await chat(forced)).choices[0];
    assert.equal(finish_reason, "tool_calls");
    const { arguments: said } = message.tool_calls[0].function;
    assert.deepEqual(Object.keys(JSON.parse(said)).sort(), ["city", "unit"]);
    const found = await streamed(forced);
    assert.deepEqual(found.calls, [{ name: "weather", arguments: said }]);
    assert.equal(found.finish, "tool_calls");
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const after = await chat({ messages: [...messages, message, result], tools: [weather] });
    assert.ok(after.choices[0].message);
  },
  async "JSON schema"() {
    const format = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
    const { message } = (await chat({ response_format: format, max_tokens: 120 })).choices[0];
    const person = JSON.parse(message.content);
    assert.deepEqual(Object.keys(person), ["name", "age"]);
    assert.ok(Number.isInteger(person.age));
  },
  async logprobs() {
    const { content } = (await chat({ logprobs: true, top_logprobs: 3, max_tokens: 4 })).choices[0].logprobs;
    assert.equal(content.length, 4);
    for (const token of content) {
      assert.equal(token.top_logprobs.length, 3);
      assert.equal(token.logprob, token.top_logprobs[0].logprob);
    }
  },
  async stop() {
    const text = (await chat({ max_tokens: 24 })).choices[0].message.content;
    const word = text.split(" ")[3];
    const cut = (await chat({ max_tokens: 24, stop: [word, "\n\n\n"] })).choices[0];
    assert.equal(cut.message.content, text.slice(0, text.indexOf(word)));
    assert.equal(cut.finish_reason, "stop");
  },
  async "seed, n"() {
    const drawn = () => chat({ temperature: 1, seed: 7, n: 3 });
    const [one, two] = [await drawn(), await drawn()];
    const texts = one.choices.map((choice) => choice.message.content);
    assert.deepEqual(two.choices.map((choice) => choice.message.content), texts);
    assert.equal(new Set(texts).size, 3);
  },
  async errors() {
    await assert.rejects(chat({ model: "other" }), OpenAI.NotFoundError);
    await assert.rejects(chat({ store: true }), (error) => error.status === 400 && error.param === "store");
    const long = [{ role: "user", content: "word ".repeat(10_000) }];
    await assert.rejects(chat({ messages: long }), (error) => error.code === "context_length_exceeded");
  },
  async cancel() {
    const stream = await chat({ stream: true, max_tokens: 1500 });
    for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break; // which aborts the request
    const status = async () => (await fetch(`${process.env.MESHNET_API}/meshnet/status`)).json();
    for (let tries = 0; (await status()).gateway.active_generations > 0; tries += 1) {
      assert.ok(tries < 600, "the generation goes on");
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
console.log("all");
