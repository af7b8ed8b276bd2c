// The view #service: live figures from /metrics, of all workers together.

import { $, bars, count, duration, heat, lines, make, say } from "./show.js";
import { ask, attempt, noteSuccess } from "./talk.js";

const SLOTS = 120; // Seconds that are shown.
const samples = []; // {time, metrics}, the newest last.
let timer;

/** Begin or end the asking. */
export function watch(visible) {
  clearTimeout(timer);
  if (visible) look();
}

async function look() {
  await attempt(async () => {
    const [text, info] = await Promise.all([ask("metrics").then((one) => one.text()), ask("info").then((one) => one.json())]);
    samples.push({ time: performance.now() / 1000, metrics: read(text) });
    if (samples.length > SLOTS + 1) samples.shift();
    show(info);
    noteSuccess();
  });
  if (!$("service").hidden) timer = setTimeout(look, 1000);
}

/** Prometheus' text: by name, a list of [labels, value]. */
export function read(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{(.*)\})? (\S+)/i.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push([labels, Number(match[3])]);
  }
  return found;
}

function sum(metrics, name, labels = {}) {
  const wanted = Object.entries(labels);
  return (metrics.get(name) ?? []).reduce((total, [found, value]) => total + (wanted.every(([key, one]) => found[key] === one) ? value : 0), 0);
}

/** How much a counter rose from one sample to another; a restart begins at 0. */
const risen = (from, to, name, labels) => Math.max(0, sum(to.metrics, name, labels) - sum(from.metrics, name, labels));

/** A histogram's counts by bucket between two samples: [[upper bound, count], ...]. */
function buckets(from, to, name, labels = {}) {
  const bounds = new Map();
  for (const [sample, sign] of [[from, -1], [to, 1]]) {
    for (const [found, value] of sample.metrics.get(`${name}_bucket`) ?? []) {
      if (Object.entries(labels).some(([key, one]) => found[key] !== one)) continue;
      const bound = found.le === "+Inf" ? Infinity : Number(found.le);
      bounds.set(bound, (bounds.get(bound) ?? 0) + sign * value);
    }
  }
  let below = 0;
  return [...bounds].sort((a, b) => a[0] - b[0]).map(([bound, total]) => {
    const own = Math.max(0, total - below);
    below = Math.max(below, total);
    return [bound, own];
  });
}

function quantile(counts, part) {
  const total = counts.reduce((all, [, own]) => all + own, 0);
  if (!total) return undefined;
  let left = part * total, from = 0;
  for (const [bound, own] of counts) {
    if (own >= left) return bound === Infinity ? from : from + (bound - from) * left / own;
    left -= own;
    from = bound;
  }
  return from;
}

function show(info) {
  const newest = samples.at(-1), before = samples.at(-2) ?? newest, oldest = samples[Math.max(0, samples.length - 61)];
  const { metrics } = newest, seconds = Math.max(0.1, newest.time - before.time);
  const http = sum(metrics, "lenet_requests_total", { protocol: "http" }), grpc = sum(metrics, "lenet_requests_total", { protocol: "grpc" });
  const rate = risen(before, newest, "lenet_requests_total") / seconds;
  const tiles = [
    [count(rate), "requests a second"],
    [count(risen(before, newest, "lenet_images_total") / seconds), "images a second"],
    [count(sum(metrics, "lenet_queue_rows")), `images waiting, of ${count(info.limits.max_queue_rows)}`],
    [`${sum(metrics, "lenet_contexts_busy")} of ${sum(metrics, "lenet_contexts")}`, "batches at this moment"],
    [`${count(sum(metrics, "process_resident_memory_bytes") / 2 ** 20)} MiB`, "memory of the process that answered"],
    [count(http), "requests over HTTP"], [count(grpc), "calls over gRPC"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, text]) => make("div", { className: "tile" }, make("b", { textContent: value }), make("span", { textContent: text }))));

  const steps = samples.slice(1).map((one, i) => [samples[i], one]);
  const each = (from, to, labels) => risen(from, to, "lenet_requests_total", labels) / Math.max(0.1, to.time - from.time);
  const good = steps.map(([from, to]) => each(from, to, { outcome: "ok" }));
  const bad = steps.map(([from, to], i) => Math.max(0, each(from, to, {}) - good[i]));
  lines($("rate"), [{ colour: "s4", values: good }, { colour: "bad", values: bad }], SLOTS);
  say("rate-note", `${count(good.at(-1) ?? 0)} answered, ${count(bad.at(-1) ?? 0)} refused or failed a second, now. The last two minutes.`);

  const columns = steps.map(([from, to]) => buckets(from, to, "lenet_request_duration_seconds").map(([, own]) => own));
  const bounds = buckets(newest, newest, "lenet_request_duration_seconds").map(([bound]) => bound);
  const named = [0.001, 0.01, 0.1, 1].map((wanted) => [bounds.findIndex((bound) => bound >= wanted), duration(1000 * wanted)]).filter(([row]) => row >= 0);
  heat($("heat"), columns, SLOTS, named);
  const minute = buckets(oldest, newest, "lenet_request_duration_seconds");
  say("heat-note", spoken("Half were faster than", quantile(minute, 0.5), quantile(minute, 0.99)));

  $("percentiles").replaceChildren(...["decode", "queue", "compute", "encode"].map((stage) => {
    const counts = buckets(oldest, newest, "lenet_stage_duration_seconds", { stage });
    const cells = [0.5, 0.95, 0.99].map((part) => quantile(counts, part));
    return make("tr", {}, make("td", { textContent: stage }), ...cells.map((value) => make("td", { textContent: value === undefined ? "–" : duration(1000 * value) })));
  }));

  const sizes = buckets(oldest, newest, "lenet_batch_rows");
  bars($("sizes"), sizes.map(([, own]) => own), sizes.map(([bound], i) => [i, bound === Infinity ? "more" : String(bound)]).filter((_, i) => i % 2 === 0));
  const batches = risen(oldest, newest, "lenet_batches_total"), rows = risen(oldest, newest, "lenet_images_total");
  say("sizes-note", batches ? `${count(batches)} batches in the last minute, ${count(rows / batches)} images each.` : "No batch in the last minute. The charts begin when this view is opened.");

  $("loaded").replaceChildren(...info.models.map((one) => {
    const labels = { model: one.name, version: one.version };
    const cells = [one.name, one.accuracy === null ? "–" : `${(100 * one.accuracy).toFixed(2)} %`, one.version, one.device, count(one.parameters),
      count(sum(metrics, "lenet_images_total", labels)), count(sum(metrics, "lenet_queue_rows", labels)),
      `${sum(metrics, "lenet_contexts_busy", labels)} of ${sum(metrics, "lenet_contexts", labels)}`, new Date(one.loaded_at).toLocaleString()];
    return make("tr", {}, ...cells.map((text) => make("td", { textContent: text })));
  }));
  for (const id of ["rate", "heat", "sizes"]) $(id).ariaLabel = $(`${id}-note`).textContent;
}

function spoken(text, half, most) {
  if (half === undefined) return "No prediction in the last minute. The charts begin when this view is opened.";
  return `${text} ${duration(1000 * half)}, 99 of 100 faster than ${duration(1000 * most)}, in the last minute. Predictions only.`;
}
