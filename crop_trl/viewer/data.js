"use strict";
// What a model wrote reaches the page as text nodes, and formulas of prompts as MathML that holds nothing else.
const $ = id => document.getElementById(id);
function make(tag, text = "", settings = {}) {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  for (const [name, value] of Object.entries(settings)) {
    if (name.startsWith("on") || name === "className" || name === "value") element[name] = value;
    else element.setAttribute(name, value);
  }
  return element;
}
const put = (parent, ...children) => {
  parent.replaceChildren(...children);
  return parent;
};
const formula = mathml =>
  document.importNode(new DOMParser().parseFromString(mathml, "application/xml").documentElement, true);
const share = value =>
  !Number.isFinite(value)
    ? "–"
    : value > 0 && value < 0.0005
      ? "<\u202f0.1\u00a0%"
      : (100 * value).toFixed(value < 0.0995 && value ? 1 : 0) + "\u00a0%";
const signed = (value, digits = 2) =>
  Number.isFinite(value) ? (Number(value.toFixed(digits)) + 0).toFixed(digits).replace("-", "−") : "–";
const many = (n, one, more = one + "s") => n.toLocaleString("en") + " " + (n === 1 ? one : more);

// ---------------------------------------------------------------- data

let facts;
let arrays = {};
let answers;
let N;
let L;
const NONE = 0xffffffff;
const NOT_READ = 65535;
const UNLIKELY = Math.log(1e-2);
const KINDS = {
  u1: Uint8Array,
  u2: Uint16Array,
  u4: Uint32Array,
  i1: Int8Array,
  i2: Int16Array,
  f4: Float32Array,
  f8: Float64Array,
};

async function unpack() {
  const text = atob($("packed").textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const head = new DataView(raw.buffer).getUint32(0, true);
  facts = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + head)));
  let at = 4 + head;
  for (const [name, kind, count] of facts.arrays) {
    const size = Number(kind[1]);
    const bytes = new Uint8Array(count * size);
    for (let b = 0; b < size; b++) for (let i = 0; i < count; i++) bytes[i * size + b] = raw[at++];
    arrays[name] = new KINDS[kind](bytes.buffer);
  }
  $("packed").remove();
  N = arrays.piece.length;
  L = facts.readings.length;
  answers = facts.answers;
  let start = 0;
  for (const answer of answers) {
    answer.start = start;
    start += answer.length;
    answer.end = start;
  }
  if (L) {
    facts.places = new Uint32Array(N * L + 1);
    for (let i = 0; i < N * L; i++) facts.places[i + 1] = facts.places[i] + arrays.entries[i];
  }
  const [student, teacher] = ["student/original", facts.target].map(n =>
    facts.readings.findIndex(r => r.name === n),
  );
  arrays.gap =
    student < 0 || teacher < 0
      ? null
      : Float32Array.from({ length: N }, (_, i) => {
          const [s, t] = [arrays.own[i * L + student], arrays.own[i * L + teacher]];
          return s === NOT_READ || t === NOT_READ ? NaN : (t - s) / 1000;
        });
}
const logprob = (i, reading) => (arrays.own[i * L + reading] === NOT_READ ? NaN : -arrays.own[i * L + reading] / 1000);
const piece = i => facts.pieces[arrays.piece[i]];

// ---------------------------------------------------------------- which tokens are kept

const state = {
  answer: 0,
  method: "",
  second: "",
  percent: "20",
  look: "",
  shade: "",
  variant: 0,
  at: -1,
  step: "",
  view: 1,
  query: "",
  sort: "",
  falling: true,
  gap: 2,
};

// As `methods.budget.response_budget`: the floor of the decimal number that was written.
function budget(n) {
  const [whole, part = ""] = state.percent.split(".");
  const kept = Math.floor((n * Number(whole + part)) / (100 * 10 ** part.length));
  return Math.min(n, Math.max(1, facts.minTokens, kept));
}
// What a method's own rule leaves to be kept, whatever the budget.
const eligible = name => arrays["eligible " + name] ?? arrays.trainable;
const orders = {};
// Tokens of each answer, best score first and the earlier of equal ones, as `methods.budget.select_top_b`.
function ranking(name) {
  if (orders[name]) return orders[name];
  const scores = arrays["score " + name];
  const order = new Uint32Array(N);
  const rank = new Uint32Array(N).fill(NONE);
  const counts = [];
  for (const { start, end } of answers) {
    const found = [];
    for (let i = start; i < end; i++) if (eligible(name)[i] && Number.isFinite(scores[i])) found.push(i);
    found.sort((a, b) => scores[b] - scores[a] || a - b);
    found.forEach((i, place) => {
      order[start + place] = i;
      rank[i] = place;
    });
    counts.push(found.length);
  }
  return (orders[name] = { order, rank, counts });
}
const unbudgeted = name => !facts.frozen && !arrays["score " + name];
const masks = {};
function kept(name) {
  if (facts.frozen) return arrays["kept " + name];
  if (unbudgeted(name)) return eligible(name);
  if (masks[name]?.percent === state.percent) return masks[name].mask;
  const { rank, counts } = ranking(name);
  const mask = new Uint8Array(N);
  answers.forEach(({ start, end }, a) => {
    const room = budget(counts[a]);
    for (let i = start; i < end; i++) mask[i] = counts[a] ? rank[i] < room : eligible(name)[i];
  });
  masks[name] = { percent: state.percent, mask };
  return mask;
}
// As `crop-trl selectors`: the budget is a share of the tokens that have a label.
function found(name, chosen) {
  const has = i => arrays.trainable[i] && arrays.label[i] >= 0;
  const ranked = arrays["score " + name] && ranking(name);
  let taken = 0;
  let hits = 0;
  let positive = 0;
  for (const a of chosen) {
    const { start, end } = answers[a];
    const labelled = [];
    for (let i = start; i < end; i++) if (has(i)) labelled.push(i);
    const places = ranked ? [...ranked.order.subarray(start, start + ranked.counts[a])].filter(has) : [];
    const mine = places.length ? places.slice(0, budget(places.length)) : labelled.filter(i => eligible(name)[i]);
    const positives = some => some.filter(i => arrays.label[i] === 1).length;
    taken += mine.length;
    hits += positives(mine);
    positive += positives(labelled);
  }
  return { precision: hits / taken, recall: hits / positive };
}

const MARGIN = 0.01;
const large = i => arrays.gap && arrays.gap[i] >= state.gap;
const LOOKS = {
  "": ["all tokens", () => true, () => true],
  missed: [
    "a large gap, not kept",
    () => arrays.gap && !facts.frozen,
    i => arrays.trainable[i] && large(i) && !kept(state.method)[i],
  ],
  idle: [
    `kept, though crop scores it under ${MARGIN}`,
    () => arrays["score crop"],
    i => kept(state.method)[i] && arrays["score crop"][i] < MARGIN,
  ],
  differ: ["kept by one of the two alone", () => state.second, i => kept(state.method)[i] !== kept(state.second)[i]],
  depends: ["depends on a condition", () => arrays.label, i => arrays.label[i] === 1],
};
const looking = i => LOOKS[state.look][2](i);
const included = () =>
  answers.map((_, a) => a).filter(a => state.step === "" || answers[a].step === Number(state.step));
const textOf = a =>
  (answers[a].text ??= Array.from({ length: answers[a].length }, (_, n) => plain(answers[a].start + n)).join(""));
const plain = i => piece(i).replaceAll("␣", " ").replaceAll("⏎", "\n").replaceAll("⋯", "");
const brief = (text, most) => (text.length > most ? text.slice(0, most).replace(/\s+\S*$/, "") + "…" : text);
const problemOf = a => facts.problems[answers[a].problem];
const original = a =>
  problemOf(a)
    .views[0][0][2].map(([text]) => text)
    .join("");
function matching(a) {
  const query = state.query.toLowerCase();
  return !query || (answers[a].lower ??= (original(a) + "\n" + textOf(a)).toLowerCase()).includes(query);
}
const everyMethod = () => (facts.frozen ? "The method of the run" : `Every method at a budget of ${state.percent} %`);
const SIGN = { right: "✓", wrong: "✗" };
const DEPENDS = {
  1: "It depends on a condition",
  0: "It depends on no condition",
  "-1": "Whether it depends on a condition is not known",
  "-2": "It comes after the first error",
};
const verdict = a => ({ true: "right", false: "wrong" })[answers[a].right] ?? "not graded";
