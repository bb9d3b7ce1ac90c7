// What every script here needs: the stage's words from stdin, and a JSON line for each check.
import { readFileSync } from "node:fs";

export const stage = JSON.parse(readFileSync(0, "utf8"));

export const asks = (scene) => [{ role: "user", content: `scene:${scene}` }];

export function same(got, wanted) {
  const [a, b] = [JSON.stringify(got), JSON.stringify(wanted)];
  if (a !== b) throw new Error(`got ${a}, not ${b}`);
}

export async function rejects(promise, kind, words) {
  try {
    await promise;
  } catch (error) {
    if (!(error instanceof kind) || !String(error.message).match(words)) {
      throw new Error(`it failed as ${error.constructor.name}: ${error.message}`);
    }
    return error;
  }
  throw new Error("it did not fail");
}

export async function play(checks) {
  for (const [feature, check] of Object.entries(checks)) {
    let error = null;
    try {
      await check();
    } catch (caught) {
      error = String(caught?.stack ?? caught).slice(0, 1500);
    }
    console.log(JSON.stringify({ feature, error }));
  }
}
