// The Vercel AI SDK over its OpenAI-compatible provider.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { asks, play, rejects, same, stage } from "./checks.mjs";

const provider = createOpenAICompatible({
  name: "fireside",
  baseURL: `${stage.url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(stage.model);
const ask = (scene, fields = {}) => ({ model, messages: asks(scene), maxRetries: 0, ...fields });
const asked = [];
const weather = tool({
  description: "Weather of a city",
  inputSchema: jsonSchema(stage.weather_schema),
  execute: async ({ city }) => {
    asked.push(city);
    return stage.report;
  },
});

await play({
  async chat() {
    const { text, finishReason } = await generateText(ask("plain"));
    same([text, finishReason], ["Paris.", "stop"]);
  },
  async stream() {
    same(await streamText(ask("plain")).text, "Paris.");
  },
  async usage() {
    const { outputTokens, inputTokens } = await streamText(ask("plain")).usage;
    const whole = (await generateText(ask("plain"))).usage;
    same([outputTokens, inputTokens], [whole.outputTokens, whole.inputTokens]);
    same(outputTokens, 7);
  },
  async unicode() {
    same(await streamText(ask("unicode")).text, stage.unicode);
  },
  async stop() {
    same((await generateText(ask("stop", { stopSequences: ["</s>"] }))).text, "one");
  },
  async tools() {
    const { text, steps } = await generateText(ask("tool", { tools: { get_weather: weather }, stopWhen: stepCountIs(3) }));
    same([text, steps.length, asked], [`It is ${stage.report}.`, 2, ["Paris"]]);
  },
  async tool_stream() {
    const result = streamText(ask("tool", { tools: { get_weather: weather }, stopWhen: stepCountIs(3) }));
    same([await result.text, (await result.steps).length], [`It is ${stage.report}.`, 2]);
  },
  async parallel() {
    const { tools, cities } = { tools: { get_weather: weather }, cities: [] };
    const result = streamText(ask("tools", { tools }));
    for (const call of await result.toolCalls) cities.push(call.input.city);
    same(cities, ["Paris", "Rome"]);
  },
  async schema() {
    const { object } = await generateObject(ask("json", { schema: jsonSchema(stage.ada_schema) }));
    same(object, stage.ada);
  },
  async reasoning() {
    const result = streamText(ask("reasoning"));
    same([await result.text, await result.reasoningText], ["Four.", "Two and two."]);
  },
  async completions() {
    const { text } = await generateText({ ...ask("plain"), model: provider.completionModel(stage.model) });
    same(text, "Paris.");
  },
  async embeddings() {
    const made = await embedMany({ model: provider.embeddingModel(stage.model), values: ["a", "bc"], maxRetries: 0 });
    same(made.embeddings.map((vector) => vector.length > 0), [true, true]);
  },
  async errors() {
    await rejects(generateText({ ...ask("plain"), model: provider("no-such") }), APICallError, /no-such/);
    let told = null;
    const broken = streamText({ ...ask("breaks"), onError: ({ error }) => (told = error) });
    await broken.consumeStream();
    same(JSON.stringify(told?.message ?? told).includes("The engine ended"), true);
  },
  async abort() {
    const leaving = new AbortController();
    const result = streamText({ ...ask("endless"), abortSignal: leaving.signal });
    for await (const piece of result.textStream) if (piece) leaving.abort();
  },
});
