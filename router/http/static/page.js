// The page of a pdserve router: draws what /page/events says, and chats through the API.

const byId = (id) => document.getElementById(id);
const MAX_POINTS = 180;
const CARD_PX = 84, GAP_PX = 8;
const SVG = "http://www.w3.org/2000/svg";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const milliseconds = (seconds) => `${(seconds * 1e3).toLocaleString("en", { maximumFractionDigits: seconds < 0.1 ? 1 : 0 })} ms`;
const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const rate = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });

// Data of server-sent events, each of one line, and comments, as [is a comment, text].
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield [false, line.slice(6)];
      else if (line.startsWith(": ")) yield [true, line.slice(2)];
    }
  }
}

// The cluster

let points = [];

async function watch() {
  for (;;) {
    try {
      const response = await fetch("/page/events");
      if (response.status === 401) return askForKey();
      if (!response.ok) throw new Error((await response.json()).error.message);
      byId("login").hidden = true;
      byId("cluster").hidden = false;
      points = [];
      for await (const [isComment, text] of eventsOf(response)) if (!isComment) draw(JSON.parse(text));
      showState("the router ended the connection; trying again", false);
    } catch (error) {
      showState(`no answer from the router (${error.message}); trying again`, false);
    }
    await new Promise((resume) => setTimeout(resume, 1000));
  }
}

function showState(text, isGood) {
  if (byId("state").textContent !== text) byId("state").textContent = text;
  byId("state").className = isGood ? "good" : "bad";
}

function draw({ now, points: added }) {
  points = [...points, ...added].slice(-MAX_POINTS);
  byId("model").textContent = now.model;
  const part = now.num_routers > 1 ? `; requests of one of ${now.num_routers} routers` : "";
  showState(now.state + part, now.state === "ready");
  drawFigures(now);
  drawWorkers(now);
  for (const name of ["ttft", "tpot"]) drawLatency(name, now.last, now.objective[`${name}_s`]);
  const failures = [...now.failures].reverse().map((each) =>
    element("li", {}, element("time", { textContent: new Date(each.time * 1e3).toLocaleTimeString() }),
      ` ${each.text}${each.times > 1 ? ` (${each.times} times)` : ""}`));
  byId("failures").replaceChildren(...(failures.length ? failures : [element("li", { textContent: "none" })]));
}

const over = (window) => `last ${Math.round(window.window_s)} s`;

function drawFigures({ last, long, objective, in_flight, queued }) {
  const isMissed = (value) => value !== null && value < objective.attainment;
  const most = last.misses.slice(0, 2).map(([name, cause]) => `${name.toUpperCase()} by ${cause.replace("_", " ")}`);
  const causes = most.length ? `; most misses: ${most.join(", ")}` : "";
  const minutes = Math.ceil(long.window_s / 60);
  const figures = [
    ["Good requests", `${rate(last.good_per_s)}/s`, `${over(last)}, of ${rate(last.ended_per_s)}/s that ended; good: within both objectives`],
    ["Arrivals", `${rate(last.requests_per_s)}/s`, over(last)],
    ["Within both", share(last.attainment), `${over(last)}, of what ended; objective ${share(objective.attainment)}${causes}`, isMissed(last.attainment)],
    ["Within both", share(long.attainment), `last ${minutes} min, a quarter of an hour at most`, isMissed(long.attainment)],
    ["Output", `${rate(last.tokens_per_s)}/s`, `tokens, ${over(last)}`],
    ["In flight", in_flight, `now; ${queued} wait in the router`],
  ];
  byId("figures").replaceChildren(...figures.map(([name, value, note, isBad]) =>
    element("div", {}, element("dt", { textContent: name }),
      element("dd", { className: isBad ? "bad" : "" }, String(value), element("small", { textContent: note })))));
}

// The router drops a lost worker until it is back; it is shown as gone for a minute.
const GONE_MS = 60_000;
const seen = new Map();

function withGone(workers) {
  const now = Date.now();
  for (const worker of workers) seen.set(worker.id, { worker, at: now });
  for (const [id, { at }] of seen) if (now - at > GONE_MS) seen.delete(id);
  const isPresent = new Set(workers.map((worker) => worker.id));
  const gone = [...seen.values()].filter(({ worker }) => !isPresent.has(worker.id));
  const all = [...workers, ...gone.map(({ worker }) => ({ ...worker, state: "gone", running: 0, waiting: 0, parked: 0, step_s: 0, blocks_used: 0 }))];
  return all.sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
}

function drawWorkers({ workers: present, links }) {
  const workers = withGone(present);
  const row = {};
  for (const role of ["prefill", "decode", "mixed"]) {
    const pool = workers.filter((worker) => worker.role === role);
    pool.forEach((worker, index) => { row[worker.id] = index; });
    byId(role).replaceChildren(...pool.map(card));
  }
  byId("mixed-pool").hidden = byId("mixed").children.length === 0;
  const height = Math.max(byId("prefill").children.length, byId("decode").children.length, 1) * (CARD_PX + GAP_PX);
  const svg = byId("links");
  svg.setAttribute("viewBox", `0 0 100 ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.style.height = `${height}px`;
  const middle = (id) => row[id] * (CARD_PX + GAP_PX) + CARD_PX / 2;
  svg.replaceChildren(...links.filter(([source, target]) => source in row && target in row).map(([source, target, count, transport]) =>
    shape("line", { class: transport, x1: 0, x2: 100, y1: middle(source), y2: middle(target), "stroke-width": Math.min(1 + count, 12) })));
  const texts = links.map(([source, target, count, transport]) => `${source} to ${target}: ${count} ${transport && `by ${transport}`}`);
  svg.setAttribute("aria-label", texts.length ? `answers handed over, ${texts.join(", ")}` : "no answer is being handed over");
}

function card(worker) {
  const meter = element("meter", { min: 0, max: worker.blocks || 1, value: worker.blocks_used });
  meter.setAttribute("aria-label", "KV blocks in use");
  const queues = [`${worker.running} running`];
  if (worker.waiting) queues.push(`${worker.waiting} waiting`);
  if (worker.parked) queues.push(`${worker.parked} parked`);
  const name = element("b", {}, worker.id, element("span", { textContent: worker.state, className: worker.state === "up" ? "good" : "bad" }));
  const step = worker.step_s ? `, step ${milliseconds(worker.step_s)}` : "";
  const tier = worker.tier_failure ? `, KV tier off: ${worker.tier_failure}` : "";
  const facts = element("span", { className: "facts", textContent: `KV ${share(worker.blocks ? worker.blocks_used / worker.blocks : null)}${step}${tier}` });
  facts.title = facts.textContent;  // a long one is cut
  return element("li", { className: worker.state === "up" ? "" : "down", title: worker.host }, name, queues.join(", "), meter, facts);
}

function drawLatency(name, last, objective) {
  const quantiles = last[`${name}_s`];
  const [p50, p90, p99] = quantiles ?? [];
  const text = quantiles ? `p50 ${milliseconds(p50)}, p90 ${milliseconds(p90)}, p99 ${milliseconds(p99)}` : "no requests";
  byId(`${name}-text`).textContent = `${over(last)}: ${text}; objective ${milliseconds(objective)}`;
  const measured = points.filter((point) => point[`${name}_s`]);
  const end = points.length ? points[points.length - 1].at_s : 0;
  const top = 1.15 * Math.max(objective, ...measured.map((point) => point[`${name}_s`][1]));
  const x = (point) => (900 - (end - point.at_s)).toFixed(1);
  const y = (seconds) => (100 - 100 * Math.min(seconds / top, 1)).toFixed(2);
  const path = (along, rank) => along.map((point) => `${x(point)} ${y(point[`${name}_s`][rank])}`).join("L");
  const svg = byId(name);
  svg.setAttribute("viewBox", "0 0 900 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name.toUpperCase()}: ${byId(`${name}-text`).textContent}`);
  const shapes = [shape("path", { class: "objective", d: `M0 ${y(objective)}H900` })];
  for (const run of runsOf(measured)) {
    shapes.unshift(shape("path", { class: "band", d: `M${path(run, 2)}L${path([...run].reverse(), 0)}Z` }));
    shapes.push(shape("path", { class: "line", d: `M${path(run, 1)}` }));
  }
  svg.replaceChildren(...shapes);
}

// Points without a gap between them.
function runsOf(measured) {
  const runs = [];
  for (const point of measured) {
    const run = runs[runs.length - 1];
    if (run && point.at_s - run[run.length - 1].at_s < 8) run.push(point);
    else runs.push([point]);
  }
  return runs;
}

// API key

function askForKey() {
  byId("login").hidden = false;
  byId("cluster").hidden = true;
  showState("this server needs an API key", false);
  byId("key").focus();
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const headers = { Authorization: `Bearer ${byId("key").value.trim()}` };
  const response = await fetch("/page/session", { method: "POST", headers });
  byId("key").value = "";
  byId("refusal").textContent = response.ok ? "" : "this key is not valid";
  if (response.ok) watch();
});

// Chat

let messages = [];
let running = null;

function say(role, text) {
  const paragraph = element("p", { className: role }, element("span", { textContent: text }));
  byId("talk").append(paragraph);
  return paragraph;
}

byId("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = byId("message").value.trim();
  if (!text) return;
  messages.push({ role: "user", content: text });
  say("user", text);
  byId("message").value = "";
  running = new AbortController();
  byId("send").textContent = "Stop";
  const paragraph = say("assistant", "");
  const asked = messages;
  try {
    const answer = await ask(asked, paragraph, running.signal);
    asked.push({ role: "assistant", content: answer });
  } catch (error) {
    asked.pop();
    const reason = error.name === "AbortError" ? "stopped" : error.message;
    paragraph.append(element("span", { className: "facts bad", textContent: reason }));
  }
  running = null;
  byId("send").textContent = "Send";
});

async function ask(asked, paragraph, signal) {
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", "X-Show-Workers": "1" },
    body: JSON.stringify({ messages: asked, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const text = paragraph.firstChild;
  let first = null, numTokens = 0, workers = "";
  for await (const [isComment, line] of eventsOf(response)) {
    if (isComment && line.startsWith("workers ")) workers = line.slice(8);
    if (isComment || line === "[DONE]") continue;
    const chunk = JSON.parse(line);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices[0]?.delta;
    if (delta) {
      first ??= performance.now();
      text.textContent += delta.reasoning_content ?? delta.content ?? "";
    }
    if (chunk.usage) numTokens = chunk.usage.completion_tokens;
  }
  const seconds = (performance.now() - began) / 1e3;
  const facts = [`TTFT ${milliseconds((first - began) / 1e3)}`, `${numTokens} tokens in ${milliseconds(seconds)}`, `${rate(numTokens / seconds)} tokens/s`];
  if (workers) facts.push(workers.split(" ").join(" → "));
  paragraph.append(element("span", { className: "facts", textContent: facts.join(", ") }));
  return text.textContent;
}

byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !running) {
    event.preventDefault();
    byId("chat").requestSubmit();
  }
});

byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  byId("talk").replaceChildren();
  byId("message").focus();
});

if ("needsKey" in document.body.dataset) askForKey();
else watch();
