// Numbers for people, in the page's language.
import { language, t } from "./core.js";

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function number(value, digits = 0) {
  return value.toLocaleString(language(), { maximumFractionDigits: digits });
}

/** Bytes in units of 1000, as disks and the hub count them. */
export function bytes(count) {
  let power = 0;
  while (count >= 1000 && power < UNITS.length - 1) {
    count /= 1000;
    power += 1;
  }
  return `${number(count, count < 10 && power ? 2 : count < 100 && power ? 1 : 0)} ${UNITS[power]}`;
}

export function percent(share) {
  return `${number(100 * share)} %`;
}

export function duration(seconds) {
  if (seconds < 90) return t("format.seconds", { n: number(Math.max(1, seconds)) });
  if (seconds < 5400) return t("format.minutes", { n: number(seconds / 60) });
  return t("format.hours", { n: number(seconds / 3600, 1) });
}

export function milliseconds(seconds) {
  return seconds < 1 ? `${number(seconds * 1000, seconds < 0.01 ? 1 : 0)} ms` : `${number(seconds, 1)} s`;
}

/** A time of day, from Unix seconds. */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString(language(), { hour12: false });
}
