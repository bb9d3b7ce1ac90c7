// Settings under a name: a few that come along, and those that were kept.
import { ask, t } from "./core.js";

const BUILT_IN = [
  { key: "settings_of.preset_model", sampling: {} },
  { key: "settings_of.preset_precise", sampling: { temperature: 0.2, top_p: 0.9 } },
  { key: "settings_of.preset_creative", sampling: { temperature: 1, min_p: 0.05 } },
];

/** [{name, system, sampling, isBuiltIn}] */
export async function readPresets() {
  const { presets } = await ask("ui/presets");
  const builtIn = BUILT_IN.map(({ key, sampling }) => ({ name: t(key), system: "", sampling, isBuiltIn: true }));
  return [...builtIn, ...presets.map((preset) => ({ ...preset, isBuiltIn: false }))];
}
