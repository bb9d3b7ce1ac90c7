// The openai package for Node.
import OpenAI from "openai";
import { asks, play, rejects, same, stage } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${stage.url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = (scene, fields = {}) =>
  client.chat.completions.create({ model: stage.model, messages: asks(scene), ...fields });
const weather = {
  type: "function",
  function: { name: "get_weather", description: "Weather of a city", parameters: stage.weather_schema },
};

async function joined(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

await play({
  async chat() {
    const answer = await chat("plain");
    same([answer.choices[0].message.content, answer.choices[0].finish_reason], ["Paris.", "stop"]);
  },
  async stream() {
    same(await joined(await chat("plain", { stream: true })), "Paris.");
    const final = await client.chat.completions.stream({ model: stage.model, messages: asks("plain") }).finalContent();
    same(final, "Paris.");
  },
  async usage() {
    const chunks = [];
    for await (const chunk of await chat("plain", { stream: true, stream_options: { include_usage: true } })) {
      chunks.push(chunk);
    }
    same(chunks.at(-1).usage, (await chat("plain")).usage);
    same([chunks.at(-1).choices, chunks.at(-1).usage.completion_tokens], [[], 7]);
  },
  async unicode() {
    same(await joined(await chat("unicode", { stream: true })), stage.unicode);
  },
  async stop() {
    same(await joined(await chat("stop", { stream: true, stop: ["</s>", "zzz"] })), "one");
  },
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    same(ids.includes(stage.model), true);
  },
  async tools() {
    const answer = await chat("tool", { tools: [weather] });
    const call = answer.choices[0].message.tool_calls[0];
    same([answer.choices[0].finish_reason, call.function.name], ["tool_calls", "get_weather"]);
    same(JSON.parse(call.function.arguments), { city: "Paris" });
    const next = await client.chat.completions.create({
      model: stage.model,
      tools: [weather],
      messages: [
        ...asks("tool"),
        answer.choices[0].message,
        { role: "tool", tool_call_id: call.id, content: stage.report },
      ],
    });
    same(next.choices[0].message.content, `It is ${stage.report}.`);
  },
  async tool_stream() {
    const runner = client.chat.completions.runTools({
      model: stage.model,
      stream: true,
      messages: asks("tool"),
      tools: [
        {
          type: "function",
          function: { ...weather.function, parse: JSON.parse, function: ({ city }) => `${city}: ${stage.report}` },
        },
      ],
    });
    same(await runner.finalContent(), `It is ${stage.report}.`);
  },
  async parallel() {
    const stream = client.chat.completions.stream({ model: stage.model, messages: asks("tools"), tools: [weather] });
    const calls = (await stream.finalMessage()).tool_calls;
    same(calls.map((call) => JSON.parse(call.function.arguments).city), ["Paris", "Rome"]);
    same(new Set(calls.map((call) => call.id)).size, 2);
  },
  async schema() {
    const form = { type: "json_schema", json_schema: { name: "person", schema: stage.ada_schema, strict: true } };
    const answer = await client.chat.completions.parse({
      model: stage.model,
      messages: asks("json"),
      response_format: form,
    });
    same(JSON.parse(answer.choices[0].message.content), stage.ada);
  },
  async reasoning() {
    const message = (await chat("reasoning")).choices[0].message;
    same([message.content, message.reasoning_content], ["Four.", "Two and two."]);
  },
  async logprobs() {
    const answer = await chat("plain", { logprobs: true, top_logprobs: 2 });
    same(answer.choices[0].logprobs.content[0].token, "P");
  },
  async completions() {
    const answer = await client.completions.create({ model: stage.model, prompt: ["a", "b"], echo: true });
    same(answer.choices.map((choice) => choice.text), ["aParis.", "bParis."]);
  },
  async embeddings() {
    const made = await client.embeddings.create({ model: stage.model, input: ["a", "bc"] });
    same(made.data.map((item) => [item.index, item.embedding.length > 0]), [[0, true], [1, true]]);
  },
  async errors() {
    const lost = client.chat.completions.create({ model: "no-such", messages: asks("plain") });
    await rejects(lost, OpenAI.NotFoundError, /no-such/);
    await rejects(chat("plain", { temperature: -1 }), OpenAI.BadRequestError, /temperature/);
    await rejects(joined(await chat("breaks", { stream: true })), OpenAI.APIError, /The engine ended/);
  },
  async abort() {
    const stream = await chat("endless", { stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  },
});
